"""A profile from measurements: op by op, by regression, with what it missed.

    seconds of F     ~ layers * (tokens, pairs, 1) . layer   + first * (tokens, 1) . first
                                                             + last  * (tokens, 1) . last
    seconds of B, I  ~ the same                              + count(letter) * (tokens, pairs, 1)
    held bytes       ~ count(letter) * (whole tokens, cut tokens) + first * (...) + last * (...)

What was not measured keeps the template's figure; I and W, where only B was measured, their
template's share of B; and B, where only I and W were, its template's share of their sum.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_epp.cost.profile import LETTERS, Bytes, Profile, Provenance, Seconds, Workspace
from megatron_epp.cost.regression import Quality, fit
from megatron_epp.ir import BACKWARDS, KEEP, Kind

_HALVES = (Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement on one stage: ``value`` seconds, or bytes, of an op on a chunk.

    choice       the stage's recompute letters, one a layer
    first, last  whether it is the pipeline's first stage, its last
    cut_tokens   inputs whose K and V later slices attend to (Loads.kept_tokens)
    """

    choice: str
    first: bool
    last: bool
    tokens: int
    pairs: int
    cut_tokens: int
    value: float

    def __post_init__(self):
        if not set(self.choice) <= set(LETTERS):
            raise ValueError(f"recompute choice {self.choice!r}: expected of {' '.join(LETTERS)}")
        if self.tokens < 1 or not 0 <= self.cut_tokens <= self.tokens:
            raise ValueError(f"{self.tokens} tokens, {self.cut_tokens} of a cut document")

    @property
    def layers(self) -> int:
        return len(self.choice)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A profile, and by what was fitted how well it predicts rows that it has not seen."""

    profile: Profile
    quality: Mapping[str, Quality]

    def __str__(self) -> str:
        return "\n".join(f"{what}: {quality}" for what, quality in self.quality.items())


def fit_profile(
    template: Profile,
    provenance: Provenance,
    *,
    tp: int = 1,
    cp: int = 1,
    seconds: Mapping[Kind, Sequence[Sample]],
    held_bytes: Sequence[Sample] = (),
    workspace_bytes: Mapping[Kind, Sequence[Sample]] | None = None,
    link_seconds: Sequence[tuple[int, float]] = (),
    near: bool = False,
) -> Fitted:
    """``template`` with everything replaced that the samples speak of.

    seconds           of ops: B and I with the recompute that their choice asks for
    held_bytes        from F to B, K and V of cut documents apart
    workspace_bytes   at an op's peak beyond what is held
    link_seconds      (tokens, seconds) of messages between stages
    near              whether seconds stay as near to the template's as the samples allow: those of
                      one pipeline do not tell its layers from its ends

    The samples are of one device under ``tp`` and ``cp``; the communication that they contain
    becomes part of the layer's seconds.
    """
    fields: dict = {"provenance": provenance, "tp": tp, "cp": cp}
    quality: dict[str, Quality] = {}
    if tp * cp > 1:
        fields["all_to_all_bytes_per_token"] = fields["tensor_bytes_per_token"] = 0.0
        fields["expert_bytes_per_token"] = 0.0
    fields |= _fit_seconds(template, seconds, quality, near)
    if held_bytes:
        fields |= _fit_held(template, held_bytes, quality)
    if workspace_bytes:
        fields |= _fit_workspace(template, workspace_bytes, quality)
    if link_seconds:
        result = fit([(tokens, 1.0) for tokens, _ in link_seconds], [s for _, s in link_seconds])
        fields["link_seconds_per_token"], fields["link_latency_seconds"] = result.coefficients
        quality["link seconds"] = result.quality
    return Fitted(dataclasses.replace(template, **fields), quality)


# Of a chunk's constant seconds, what its tokens are given where the fit left them none.
_TOKENS_SHARE = 1e-3


def _no_token_is_free(seconds: Seconds, tokens: int) -> Seconds:
    """Layers so small that only a chunk's constant shows, on a busy host: planners divide by what
    ``tokens`` cost, and a profile in which they cost nothing is refused."""
    if seconds.per_token or seconds.per_pair:
        return seconds
    return dataclasses.replace(seconds, per_token=_TOKENS_SHARE * seconds.per_chunk / tokens)


def _fit_seconds(
    template: Profile,
    samples: Mapping[Kind, Sequence[Sample]],
    quality: dict[str, Quality],
    near: bool,
) -> dict:
    layer, first, last = (
        dict(grid)
        for grid in (template.layer_seconds, template.first_seconds, template.last_seconds)
    )
    recompute = dict(template.recompute_seconds)
    learnt: dict[str, int] = {}  # by letter, how many samples the present figure rests on
    for kind, rows in samples.items():
        if not rows:
            continue
        letters = tuple(
            letter
            for letter in LETTERS
            if letter != KEEP and kind in BACKWARDS and any(letter in row.choice for row in rows)
        )
        prior = _seconds_columns(template, kind, letters) if near else None
        result = fit(
            [_seconds_row(row, letters) for row in rows], [row.value for row in rows], prior
        )
        quality[f"seconds of {kind.value}"] = result.quality
        numbers = iter(result.coefficients)
        layer[kind] = _no_token_is_free(
            Seconds(next(numbers), next(numbers), next(numbers)), max(row.tokens for row in rows)
        )
        ends = [(first, any(row.first for row in rows)), (last, any(row.last for row in rows))]
        for grid, seen in ends:
            end = Seconds(per_token=next(numbers), per_chunk=next(numbers))
            if seen:
                grid[kind] = end
        for letter in letters:
            again = Seconds(next(numbers), next(numbers), next(numbers))
            count = sum(letter in row.choice for row in rows)
            if count > learnt.get(letter, 0):
                recompute[letter], learnt[letter] = again, count
    ends_and_layer = (
        (layer, template.layer_seconds),
        (first, template.first_seconds),
        (last, template.last_seconds),
    )
    missing = [kind for kind in (Kind.BACKWARD, *_HALVES) if not samples.get(kind)]
    for grid, old in ends_and_layer:
        halves, halves_before = (_sum(*(of[kind] for kind in _HALVES)) for of in (grid, old))
        if missing == [Kind.BACKWARD]:
            grid[Kind.BACKWARD] = _share(halves, old[Kind.BACKWARD], halves_before, 1.0)
        elif Kind.BACKWARD not in missing:
            for kind in missing:
                grid[kind] = _share(grid[Kind.BACKWARD], old[kind], old[Kind.BACKWARD], 0.5)
    return {
        "layer_seconds": layer,
        "first_seconds": first,
        "last_seconds": last,
        "recompute_seconds": recompute,
    }


def _seconds_row(sample: Sample, letters: Sequence[str]) -> list[float]:
    load = (sample.tokens, sample.pairs, 1)
    row = [float(sample.layers * feature) for feature in load]
    for end in (sample.first, sample.last):
        row += [float(end * sample.tokens), float(end)]
    for letter in letters:
        row += [float(sample.choice.count(letter) * feature) for feature in load]
    return row


def _seconds_columns(profile: Profile, kind: Kind, letters: Sequence[str]) -> list[float]:
    """What ``profile`` says of the columns of :func:`_seconds_row`."""
    columns = list(dataclasses.astuple(profile.layer_seconds[kind]))
    for end in (profile.first_seconds[kind], profile.last_seconds[kind]):
        columns += [end.per_token, end.per_chunk]
    for letter in letters:
        columns += dataclasses.astuple(profile.recompute_seconds[letter])
    return columns


def _share(whole: Seconds, part_before: Seconds, whole_before: Seconds, unknown: float) -> Seconds:
    """``whole`` in the proportion of ``part_before`` to ``whole_before``, figure by figure; the
    share is ``unknown`` where nothing was there before."""

    def share(name: str) -> float:
        before = getattr(whole_before, name)
        return getattr(whole, name) * (getattr(part_before, name) / before if before else unknown)

    return Seconds(*(share(field.name) for field in dataclasses.fields(Seconds)))


def _sum(one: Seconds, other: Seconds) -> Seconds:
    names = [field.name for field in dataclasses.fields(Seconds)]
    return Seconds(*(getattr(one, name) + getattr(other, name) for name in names))


def _pair(sample: Sample) -> tuple[float, float]:
    return float(sample.tokens - sample.cut_tokens), float(sample.cut_tokens)


def _fit_held(template: Profile, samples: Sequence[Sample], quality: dict[str, Quality]) -> dict:
    letters = tuple(letter for letter in LETTERS if any(letter in row.choice for row in samples))
    rows = []
    for sample in samples:
        row = [
            sample.choice.count(letter) * tokens for letter in letters for tokens in _pair(sample)
        ]
        for end in (sample.first, sample.last):
            row += [end * tokens for tokens in _pair(sample)]
        rows.append(row)
    result = fit(rows, [sample.value for sample in samples])
    quality["held bytes"] = result.quality
    numbers = iter(result.coefficients)
    saved = dict(template.saved_bytes)
    for letter in letters:
        saved[letter] = _seen(
            Bytes(next(numbers), next(numbers)),
            [row for row in samples if letter in row.choice],
            saved[letter],
        )
    first = Bytes(next(numbers), next(numbers))
    last = Bytes(next(numbers), next(numbers))
    return {
        "saved_bytes": saved,
        "first_bytes": _seen(first, [row for row in samples if row.first], template.first_bytes),
        "last_bytes": _seen(last, [row for row in samples if row.last], template.last_bytes),
    }


def line_above(points: Sequence[tuple[float, float]], goes_on: bool = False) -> tuple[float, float]:
    """(slope, constant), each at least 0, of a line with no point (x, y) above it.

    For peaks: the largest of what several moments need, each a constant and something in proportion
    to x. Such a curve is convex, so its steepest stretch is its last, where what adds to both ends
    does not count. ``goes_on``: x may be much larger than at the last point, where one moment's
    constant may still have hidden another's slope, which is y / x there at most.
    """
    highest: dict[float, float] = {}
    for x, y in points:
        highest[x] = max(y, highest.get(x, y))
    ordered = sorted(highest.items())
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(ordered)]
    slope = max((0.0, *slopes))
    if goes_on and ordered:
        slope = max(slope, ordered[-1][1] / ordered[-1][0])
    return slope, max((0.0, *(y - slope * x for x, y in ordered)))


def _seen(fitted: Bytes, rows: Sequence[Sample], before: Bytes) -> Bytes:
    """``fitted``, but ``before``'s figure for tokens of a sort that no row holds."""
    whole = any(row.tokens > row.cut_tokens for row in rows)
    cut = any(row.cut_tokens for row in rows)
    return Bytes(
        fitted.per_token if whole else before.per_token,
        fitted.per_cut_token if cut else before.per_cut_token,
    )


def _fit_workspace(
    template: Profile, samples: Mapping[Kind, Sequence[Sample]], quality: dict[str, Quality]
) -> dict:
    """Of any stage, of the last one besides, and of the one layer that lives again.

    A chunk may mix letters, but one layer lives at a time: the largest counts. Samples whose
    letters are mixed are left out, as which of them was largest is what is asked.
    """
    workspace = dict(template.workspace_bytes)
    last = dict(template.last_workspace_bytes)
    again = dict(template.recompute_workspace_bytes)
    learnt: dict[str, int] = {}
    for kind, all_rows in samples.items():
        rows = [row for row in all_rows if len(set(row.choice) - {KEEP}) <= 1]
        if not rows:
            continue
        letters = tuple(
            letter
            for letter in LETTERS
            if letter != KEEP and kind in BACKWARDS and any(letter in row.choice for row in rows)
        )
        features = []
        for row in rows:
            feature = [*_pair(row), *(row.last * tokens for tokens in _pair(row))]
            for letter in letters:
                feature += [(letter in row.choice) * tokens for tokens in _pair(row)]
            features.append(feature)
        result = fit(features, [row.value for row in rows])
        quality[f"workspace bytes of {kind.value}"] = result.quality
        numbers = iter(result.coefficients)
        per_token = _seen(Bytes(next(numbers), next(numbers)), rows, workspace[kind])
        workspace[kind] = Workspace(*dataclasses.astuple(per_token))
        end = Bytes(next(numbers), next(numbers))
        end = _seen(end, [row for row in rows if row.last], last[kind])
        last[kind] = Workspace(*dataclasses.astuple(end))
        for letter in letters:
            figure = Bytes(next(numbers), next(numbers))
            with_letter = [row for row in rows if letter in row.choice]
            if len(with_letter) > learnt.get(letter, 0):
                again[letter] = _seen(figure, with_letter, again[letter])
                learnt[letter] = len(with_letter)
    return {
        "workspace_bytes": workspace,
        "last_workspace_bytes": last,
        "recompute_workspace_bytes": again,
    }
