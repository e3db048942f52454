"""Fit of a profile to measurements: a regression for each kind of op, with its errors.

    seconds of F     ~ layers * (tokens, pairs, 1) . layer   + first * (tokens, 1) . first
                                                             + last  * (tokens, 1) . last
    seconds of B, I  ~ the same                              + count(mode) * (tokens, pairs, 1)
    held bytes       ~ count(mode) * (other tokens, cut tokens) + first * (...) + last * (...)

Cut tokens are those whose K and V are cached. With several layer kinds, seconds are the sum of such
terms for every kind. Pairs are counted within the window of a kind, and additional columns of a
kind are additional terms.

A coefficient without measurements keeps its value in the template, the profile before the fit. If
only B was measured, I and W get the template's fractions of B. If only I and W were measured, B
gets the template's ratio of B to I + W.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_epp.cost.columns import Column, WindowPairs
from megatron_epp.cost.fitting.regression import Quality, fit
from megatron_epp.cost.profile import (
    MODES,
    Bytes,
    LayerCoefficients,
    Profile,
    Provenance,
    Seconds,
    layer_coefficients,
)
from megatron_epp.ir import BACKWARDS, FULL, KEEP, Kind

logger = logging.getLogger(__name__)

_HALVES = (Kind.INPUT, Kind.WEIGHT)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement on one stage: seconds of an op on a chunk, or bytes.

    Attributes:
        choice: recompute mode of each layer of the stage.
        first: whether the stage is the first of the pipeline.
        last: number of runs of the LM head: on the last stage one per predicted token, on other
            stages 0.
        tokens: tokens of the chunk.
        pairs: query-key pairs; only those within the window, unless these are in ``columns``.
        cut_tokens: tokens whose K and V are cached for later slices (Loads.cached_tokens).
        value: seconds or bytes.
        kinds: kind of each layer of the stage; empty: the profile has only one kind.
        columns: additional columns of these kinds, with the quantities of the chunk.

    Raises:
        ValueError: ``kinds`` and ``choice`` differ in length, a mode is unknown, or the tokens are
            invalid.
    """

    choice: str
    first: bool
    last: int
    tokens: int
    pairs: int
    cut_tokens: int
    value: float
    kinds: tuple[str, ...] = ()
    columns: tuple[tuple[Column, float], ...] = ()

    def __post_init__(self):
        if self.kinds and len(self.kinds) != len(self.choice):
            raise ValueError(f"kinds {self.kinds} of the layers with choices {self.choice!r}")
        if not set(self.choice) <= set(MODES):
            raise ValueError(f"recompute choice {self.choice!r}: expected of {' '.join(MODES)}")
        if self.tokens < 1 or not 0 <= self.cut_tokens <= self.tokens:
            raise ValueError(f"{self.tokens} tokens, {self.cut_tokens} of a cut document")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.choice)

    def modes_of(self, kind: str) -> str:
        """Return the recompute modes of the layers of ``kind``."""
        if not self.kinds:
            return self.choice
        return "".join(
            mode for mode, one in zip(self.choice, self.kinds, strict=True) if one == kind
        )

    def number(self, column: Column) -> float:
        """Return the chunk's quantity of an additional column; 0 if it is not in ``columns``."""
        return dict(self.columns).get(column, 0)

    def load(self, window: int) -> tuple[float, float, int]:
        """Return (tokens, pairs, 1) of the chunk for a layer with this ``window`` (0: none)."""
        pairs = dict(self.columns).get(WindowPairs(window), self.pairs) if window else self.pairs
        return self.tokens, pairs, 1


@dataclass(frozen=True, slots=True)
class FitResult:
    """Profile, and the quality of each fit on held-out measurements."""

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
    link_seconds: Sequence[tuple[int, float]] = (),
    near: bool = False,
) -> FitResult:
    """Return ``template`` with the coefficients that the samples determine, and the fits' quality.

    The samples are of one device with ``tp`` and ``cp``. Communication in the samples becomes part
    of the layer's seconds.

    Args:
        template: profile whose coefficients are replaced.
        provenance: origin of the result.
        tp: tensor-parallel size of the samples.
        cp: context-parallel size of the samples.
        seconds: seconds of ops by kind; B and I include recompute in the modes of Sample.choice.
        held_bytes: bytes held from F to B, without K and V of cut documents.
        link_seconds: (tokens, seconds) of messages between stages.
        near: whether seconds stay near those of the template where samples allow it. This is useful
            if samples, such as those of one pipeline, do not separate layers from embedding and LM
            head.

    Raises:
        ValueError: a measured time is not a finite number above 0.
    """
    fields: dict = {"provenance": provenance, "tp": tp, "cp": cp}
    quality: dict[str, Quality] = {}
    if tp * cp > 1:
        nothing = ("all_to_all", "tensor", "expert")
        template = template.each_kind(**{f"{what}_bytes_per_token": 0.0 for what in nothing})
    template = _fit_seconds(template, seconds, quality, near)
    if held_bytes:
        fields |= _fit_held(template, held_bytes, quality)
    if link_seconds:
        what, loads = "link seconds", [(tokens, 1.0) for tokens, _ in link_seconds]
        result = fit(loads, [seconds for _, seconds in link_seconds], what=what)
        fields["link_seconds_per_token"], fields["link_latency_seconds"] = result.coefficients
        quality[what] = result.quality
    return FitResult(dataclasses.replace(template, **fields), quality)


# Fraction of a chunk's constant seconds that is assigned to tokens if the fit assigned none.
_TOKENS_FRACTION = 1e-3


def _no_token_is_free(seconds: Seconds, tokens: int) -> Seconds:
    """Return ``seconds``, with a small time per token if tokens and pairs take no time.

    With very small layers on a busy host only the constant per chunk is visible. Planners divide by
    the time of tokens, and profiles in which tokens take no time are refused. ``tokens`` is the
    number of tokens of the largest sample.
    """
    if seconds.per_token or seconds.per_pair:
        return seconds
    return dataclasses.replace(seconds, per_token=_TOKENS_FRACTION * seconds.per_chunk / tokens)


def _load(sample: Sample, coefficients: LayerCoefficients) -> tuple[float, float, int]:
    """Return (tokens, pairs, 1) of a layer; pairs are 0 if the layer caches no K and V."""
    tokens, pairs, one = sample.load(coefficients.window)
    return tokens, pairs if coefficients.kv_bytes_per_token else 0, one


@dataclass(frozen=True, slots=True)
class FitColumns:
    """Columns of a fit, in which the seconds of one kind of op are linear.

    Attributes:
        op: kind of op.
        coefficients: template's coefficients of each layer kind, by name.
        modes: (layer kind, recompute mode) of all recomputed layers in the samples.
    """

    op: Kind
    coefficients: Mapping[str, LayerCoefficients]
    modes: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, profile: Profile, op: Kind, rows: Sequence[Sample]) -> "FitColumns":
        """Return the columns that ``rows`` determine."""
        known = profile.kinds
        seen = {kind for row in rows for kind in row.kinds}
        coefficients = {kind: known[kind] for kind in known if kind in seen or len(known) == 1}
        modes = tuple(
            (kind, mode)
            for kind in coefficients
            for mode in MODES
            if mode != KEEP and op in BACKWARDS and any(mode in row.modes_of(kind) for row in rows)
        )
        return cls(op, coefficients, modes)

    def row(self, sample: Sample) -> list[float]:
        """Return the quantities of a sample in these columns."""
        row: list[float] = []
        for kind, coefficients in self.coefficients.items():
            count = len(sample.modes_of(kind))
            row += [float(count * feature) for feature in _load(sample, coefficients)]
            row += [float(count * sample.number(column)) for column in _fitted(coefficients)]
        for end in (sample.first, sample.last):
            row += [float(end * sample.tokens), float(end)]
        for kind, mode in self.modes:
            count = sample.modes_of(kind).count(mode)
            load = _load(sample, self.coefficients[kind])
            row += [float(count * feature) for feature in load]
        return row

    def coefficients_row(self, profile: Profile) -> list[float]:
        """Return the coefficients of ``profile`` for these columns."""
        row: list[float] = []
        for kind in self.coefficients:
            of = profile.kinds[kind]
            row += dataclasses.astuple(of.layer_seconds[self.op])
            row += [of.column_seconds[column].get(self.op, 0.0) for column in _fitted(of)]
        for end in (profile.first_seconds[self.op], profile.last_seconds[self.op]):
            row += [end.per_token, end.per_chunk]
        for kind, mode in self.modes:
            row += dataclasses.astuple(profile.kinds[kind].recompute_seconds[mode])
        return row

    def again(self, profile: Profile, sample: Sample) -> float:
        """Return the seconds of full recompute due to additional columns; these are not fitted."""
        if self.op not in BACKWARDS:
            return 0.0
        return sum(
            sample.modes_of(kind).count(FULL)
            * sample.number(column)
            * profile.kinds[kind].column_seconds[column].get(Kind.FORWARD, 0.0)
            for kind, coefficients in self.coefficients.items()
            for column in _fitted(coefficients)
        )


def _fitted(coefficients: LayerCoefficients) -> list[Column]:
    """Return the additional columns whose coefficients can be measured."""
    return [column for column in coefficients.column_seconds if column.FITTED]


def _fit_seconds(
    template: Profile,
    samples: Mapping[Kind, Sequence[Sample]],
    quality: dict[str, Quality],
    near: bool,
) -> Profile:
    """Return ``template`` with seconds from the samples; add each fit's quality to ``quality``."""
    known = template.kinds
    layer = {kind: dict(each.layer_seconds) for kind, each in known.items()}
    # Measured seconds of pairs include the seconds of columns that are not fitted.
    of_columns = {
        kind: {
            column: dict(seconds) if column.FITTED or not any(samples.values()) else {}
            for column, seconds in each.column_seconds.items()
        }
        for kind, each in known.items()
    }
    recompute = {kind: dict(each.recompute_seconds) for kind, each in known.items()}
    first, last = dict(template.first_seconds), dict(template.last_seconds)
    # Number of samples that determine the current coefficient
    learnt: dict[tuple[str, str], int] = {}
    for op, rows in samples.items():
        if not rows:
            continue
        columns = FitColumns.of(template, op, rows)
        # Known seconds are subtracted, but a positive rest remains, because measurements are above
        # 0.
        values = [max(row.value - columns.again(template, row), 0.1 * row.value) for row in rows]
        prior = columns.coefficients_row(template) if near else None
        what = f"seconds of {op.value}"
        result = fit([columns.row(row) for row in rows], values, prior, what)
        quality[what] = result.quality
        numbers = iter(result.coefficients)
        most = max(row.tokens for row in rows)
        for kind, coefficients in columns.coefficients.items():
            seconds = Seconds(next(numbers), next(numbers), next(numbers))
            layer[kind][op] = _no_token_is_free(seconds, most)
            for column in _fitted(coefficients):
                of_columns[kind][column][op] = next(numbers)
        ends = [(first, any(row.first for row in rows)), (last, any(row.last for row in rows))]
        for grid, seen in ends:
            end = Seconds(per_token=next(numbers), per_chunk=next(numbers))
            if seen:
                grid[op] = end
        for kind, mode in columns.modes:
            again = Seconds(next(numbers), next(numbers), next(numbers))
            count = sum(mode in row.modes_of(kind) for row in rows)
            if count > learnt.get((kind, mode), 0):
                recompute[kind][mode], learnt[kind, mode] = again, count
    missing = [op for op in (Kind.BACKWARD, *_HALVES) if not samples.get(op)]
    grids = [(layer[kind], known[kind].layer_seconds) for kind in known]
    grids += [(first, template.first_seconds), (last, template.last_seconds)]
    for grid, old in grids:
        _fill(grid, old, missing)
    for kind, each in known.items():
        for column in _fitted(each):
            seconds_of, before = (
                {op: Seconds(per_token=s) for op, s in of[column].items()}
                for of in (of_columns[kind], each.column_seconds)
            )
            _fill(seconds_of, before, missing)
            of_columns[kind][column] = {op: seconds.per_token for op, seconds in seconds_of.items()}
    coefficients_of = {
        kind: dataclasses.replace(
            layer_coefficients(each),
            layer_seconds=layer[kind],
            column_seconds=of_columns[kind],
            recompute_seconds=recompute[kind],
        )
        for kind, each in known.items()
    }
    ends_of = dataclasses.replace(template, first_seconds=first, last_seconds=last)
    return ends_of.with_kinds(coefficients_of)


def _fill(grid: dict[Kind, Seconds], old: Mapping[Kind, Seconds], missing: Sequence[Kind]) -> None:
    """Set the seconds of ``missing`` ops from measured ops, in the proportions of ``old``."""
    halves, halves_before = (_sum(*(of[kind] for kind in _HALVES)) for of in (grid, old))
    if missing == [Kind.BACKWARD]:
        grid[Kind.BACKWARD] = _part(halves, old[Kind.BACKWARD], halves_before, 1.0)
    elif Kind.BACKWARD not in missing:
        for kind in missing:
            grid[kind] = _part(grid[Kind.BACKWARD], old[kind], old[Kind.BACKWARD], 0.5)


def _part(total: Seconds, part_before: Seconds, total_before: Seconds, unknown: float) -> Seconds:
    """Return ``total`` times the ratio of ``part_before`` to ``total_before``, field by field.

    ``unknown`` is the ratio where ``total_before`` is 0.
    """

    def fraction(name: str) -> float:
        before = getattr(total_before, name)
        return getattr(total, name) * (getattr(part_before, name) / before if before else unknown)

    return Seconds(*(fraction(field.name) for field in dataclasses.fields(Seconds)))


def _sum(one: Seconds, other: Seconds) -> Seconds:
    names = [field.name for field in dataclasses.fields(Seconds)]
    return Seconds(*(getattr(one, name) + getattr(other, name) for name in names))


def _pair(sample: Sample) -> tuple[float, float]:
    return float(sample.tokens - sample.cut_tokens), float(sample.cut_tokens)


def _fit_held(template: Profile, every: Sequence[Sample], quality: dict[str, Quality]) -> dict:
    # An allocator's difference is below 0 if earlier tensors were freed during the forward.
    samples = [sample for sample in every if sample.value > 0]
    if len(samples) < len(every):
        logger.warning(
            "held bytes: %d of %d measurements are at most 0; these are not used, and bytes "
            "without other measurements are those of the analytic model",
            len(every) - len(samples),
            len(every),
        )
    if not samples:
        return {}
    modes = tuple(mode for mode in MODES if any(mode in row.choice for row in samples))
    rows = []
    for sample in samples:
        row = [sample.choice.count(mode) * tokens for mode in modes for tokens in _pair(sample)]
        for end in (sample.first, sample.last):
            row += [end * tokens for tokens in _pair(sample)]
        rows.append(row)
    what = "held bytes"
    result = fit(rows, [sample.value for sample in samples], what=what)
    quality[what] = result.quality
    numbers = iter(result.coefficients)
    saved = dict(template.saved_bytes)
    for mode in modes:
        saved[mode] = _seen(
            Bytes(next(numbers), next(numbers)),
            [row for row in samples if mode in row.choice],
            saved[mode],
        )
    first = Bytes(next(numbers), next(numbers))
    last = Bytes(next(numbers), next(numbers))
    return {
        "saved_bytes": saved,
        "first_bytes": _seen(first, [row for row in samples if row.first], template.first_bytes),
        "last_bytes": _seen(last, [row for row in samples if row.last], template.last_bytes),
    }


def line_above(points: Sequence[tuple[float, float]], goes_on: bool = False) -> tuple[float, float]:
    """Return (slope, constant), each at least 0, of a line with none of ``points`` (x, y) above it.

    The line bounds memory peaks. A peak is the maximum over several moments. The bytes of each
    moment are a constant plus a number proportional to x. The peak as a function of x is therefore
    convex: its last segment is steepest. With ``goes_on`` the line also covers x far beyond the
    last point, where another moment may be the peak. The slope of that moment is at most y / x of
    the last point.
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
    """Return ``fitted``; if no row has cut (or other) tokens, their bytes come from ``before``."""
    has_uncut = any(row.tokens > row.cut_tokens for row in rows)
    cut = any(row.cut_tokens for row in rows)
    return Bytes(
        fitted.per_token if has_uncut else before.per_token,
        fitted.per_cut_token if cut else before.per_cut_token,
    )
