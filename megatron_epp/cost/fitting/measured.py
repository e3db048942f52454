"""Profile from the measurements of all ranks, for every layer kind, embedding and LM head."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from megatron_epp.cost.analytic import carried_bytes
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import device as named_device
from megatron_epp.cost.catalogue.devices import host_seconds_of
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.columns import DIAGONALS
from megatron_epp.cost.fitting.fit import Sample, fit_profile, line_above
from megatron_epp.cost.fitting.readings import (
    AFTER_CONTEXT_TOKENS,
    OWN_MODES,
    Peak,
    Readings,
    modes_of,
)
from megatron_epp.cost.fitting.split_seconds import with_split
from megatron_epp.cost.loads import pairs_within
from megatron_epp.cost.profile import Bytes, Profile, Provenance, Seconds, Workspace
from megatron_epp.ir import FULL, KEEP, SELECTIVE, Kind, Span

DIFFER = 1.25  # ratio of seconds; smaller ones occur on equal devices of a busy host
ALIKE = 1.1  # ranks within this ratio get their median

_USUAL_TOKENS = 2048  # of a typical chunk


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of the measurements.

    Attributes:
        device: name of the catalogue's device, which provides coefficients that are not measured.
        tp: tensor-parallel size.
        cp: context-parallel size.
        head_tokens: maximum tokens of a chunk that the LM head processes at once; 0: all.
    """

    device: str
    tp: int
    cp: int
    head_tokens: int


def measured_profile(
    of_kinds: Mapping[str, Sequence[Readings]], model: Model, origin: Provenance, where: Conditions
) -> Profile:
    """Return the profile of all layer kinds; it describes the fastest pipeline rank of all.

    Args:
        of_kinds: readings of all ranks by layer kind, starting with the model's first kind.
        model: sizes of the model.
        origin: origin of the profile.
        where: conditions of the measurements.

    Raises:
        ValueError: the measurements do not determine a profile.
    """
    slowness = measured_slowness(of_kinds)
    if slowness:
        of_kinds = {
            kind: [one.of_fastest(slowness[one.rank]) for one in every]
            for kind, every in of_kinds.items()
        }
        factors = ", ".join(f"{factor:.2f}" for factor in slowness)
        source = f"{origin.source}; pipeline ranks take {factors} times as long as the fastest"
        origin = dataclasses.replace(origin, source=source)
    profiles = {
        kind: _fitted(every, model, kind, origin, where) for kind, every in of_kinds.items()
    }
    profile = dataclasses.replace(next(iter(profiles.values())), rank_slowness=slowness)
    if len(profiles) == 1:
        return profile
    of_each = (f"{kind}: {each.provenance.source}" for kind, each in profiles.items())
    provenance = dataclasses.replace(profile.provenance, source="; ".join(of_each))
    stores_last_slice = any(each.stores_last_slice for each in profiles.values())
    return dataclasses.replace(
        profile.with_kinds(profiles), provenance=provenance, stores_last_slice=stores_last_slice
    )


def _fitted(
    every: Sequence[Readings], model: Model, kind: str, origin: Provenance, where: Conditions
) -> Profile:
    """Return the profile of one layer kind from the readings of all ranks."""
    layer = model.shapes[kind]
    device = named_device(where.device)
    template = analytic_profile(model, device, kv_read=True, dtype=origin.dtype).of_kind(kind)
    if where.device != "cpu" and layer.masks_diagonal:
        pairs = {op: seconds.per_pair for op, seconds in template.layer_seconds.items()}
        columns = {**template.column_seconds, **dict.fromkeys(DIAGONALS, pairs)}
        template = dataclasses.replace(template, column_seconds=columns)
    best_link: dict[int, float] = {}
    for tokens, seconds in (pair for readings in every for pair in readings.link):
        best_link[tokens] = min(seconds, best_link.get(tokens, seconds))
    fitted = fit_profile(
        template,
        origin,
        tp=where.tp,
        cp=where.cp,
        seconds={
            Kind.FORWARD: [sample for readings in every for sample in readings.forward],
            Kind.BACKWARD: [sample for readings in every for sample in readings.backward],
        },
        held_bytes=[sample for readings in every for sample in readings.held],
        link_seconds=sorted(best_link.items()),
    )
    profile = fitted.profile
    workspace, last_workspace, again, forward = workspaces(
        [peak for readings in every for peak in readings.peaks], where.head_tokens
    )
    carried = layer.carried.on_device(where.tp * where.cp)
    splits = [split for readings in every for split in readings.split]
    source = "; ".join(f"{what} {quality}" for what, quality in fitted.quality.items())
    if not splits:
        source += "; I and W not measured: their analytic shares of B"
    profile = dataclasses.replace(
        profile,
        provenance=dataclasses.replace(origin, source=f"{origin.source}; {source}"),
        recompute_seconds=_recompute_seconds(every, profile, template),
        saved_bytes={
            mode: profile.saved_bytes[mode if mode in modes_of(layer) else KEEP]
            for mode in profile.saved_bytes
        },
        first_bytes=_alike(profile.first_bytes),
        last_bytes=_alike(profile.last_bytes),
        **carried_bytes(carried, origin.dtype),
        stores_last_slice=any(readings.stores_last_slice for readings in every),
        workspace_bytes=workspace,
        last_workspace_bytes=last_workspace,
        last_workspace_tokens=float(where.head_tokens),
        recompute_workspace_bytes=again,
        forward_workspace_bytes=forward,
        expert_bytes_per_token=0.0,  # part of the measured seconds, as are weights and latencies
        weight_seconds={},
        expert_weight_seconds={},
        expert_seconds={},  # measured layers include what halves hide
        tensor_gathers=0.0,
        exchange_seconds=_exchange_seconds(every),
        host_seconds=_host_seconds(every),
        expert_host_seconds={},
        host_bytes_per_second=min(readings.host_rate for readings in every),
        link_seconds_per_token=profile.link_seconds_per_token if best_link else 0.0,
        link_latency_seconds=profile.link_latency_seconds if best_link else 0.0,
    )
    return with_split(profile, splits) if splits else profile


def _exchange_seconds(every: Sequence[Readings]) -> dict[Kind, float]:
    """Return the seconds per token of all-to-alls (rows for heads) by op; empty if unmeasured."""
    rows = [reading for readings in every for reading in readings.exchange]
    if not rows:
        return {}
    forward = median(seconds / tokens for tokens, seconds, _ in rows)
    backward = median(seconds / tokens for tokens, _, seconds in rows)
    taken = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: backward}
    return {kind: seconds for kind, seconds in taken.items() if seconds > 0}


def _host_seconds(every: Sequence[Readings]) -> dict[Kind, float]:
    """Return the host's seconds to issue one layer's op, by kind; empty on a CPU."""
    rows = [reading for readings in every for reading in readings.host]
    if not rows:
        return {}
    return host_seconds_of(*map(median, zip(*rows, strict=True)))


def _alike(coefficient: Bytes) -> Bytes:
    """Return ``coefficient`` with its bytes per token used for cut tokens, too."""
    return Bytes(coefficient.per_token, coefficient.per_token)


def workspaces(
    peaks: Sequence[Peak], head_tokens: int
) -> tuple[dict[Kind, Workspace], dict[Kind, Workspace], dict[str, Bytes], dict[str, Workspace]]:
    """Return workspaces that no measured peak exceeds.

    Args:
        peaks: measured peaks of all ranks.
        head_tokens: maximum tokens of a chunk that the LM head processes at once; 0: all.

    Returns:
        Four mappings: a layer's workspaces by kind of op; additional workspaces of the last stage
        by kind of op; bytes of a recomputed layer by mode; and a layer's forward workspaces by
        mode, for modes whose workspace differs from that of a layer that saves everything.
    """

    def of(kind: Kind, mode: str, end: bool) -> list[Peak]:
        what = (kind, mode, end)
        return [p for p in peaks if (p.kind, p.mode, p.end) == what and not p.context]

    layer, last = {}, {}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        points = [(p.tokens, p.bytes) for p in of(kind, KEEP, False)]
        slope, constant = line_above(points, goes_on=True)
        after = [
            (p.context, p.bytes)
            for p in peaks
            if (p.kind, p.mode, p.end, p.tokens) == (kind, KEEP, False, AFTER_CONTEXT_TOKENS)
        ]
        per_context, _ = line_above(after)
        layer[kind] = Workspace(slope, slope, per_context, constant)
        beyond = [
            (
                min(p.tokens, head_tokens or p.tokens),
                max(0.0, p.bytes - slope * p.tokens - constant),
            )
            for p in of(kind, KEEP, True)
        ]
        slope, constant = line_above(beyond)
        last[kind] = Workspace(slope, slope, 0.0, constant)
    again = {mode: Bytes() for mode in (KEEP, FULL, *SELECTIVE)}
    uncut_peaks = sorted(of(Kind.BACKWARD, KEEP, False), key=lambda p: -p.bytes)
    kept = {p.tokens: p.bytes for p in uncut_peaks}  # the smallest of all ranks
    for mode in (FULL, *SELECTIVE):
        # In addition to what the same chunk needs without recompute; both include the constants.
        largest = sorted(of(Kind.BACKWARD, mode, False), key=lambda p: p.tokens)[-2:]
        alive = max(((p.bytes - kept[p.tokens]) / p.tokens for p in largest), default=0.0)
        again[mode] = _alike(Bytes(max(0.0, alive)))
    forward = {}
    for mode in (FULL, *SELECTIVE):
        # What a recomputed layer does not save from F to B exists until its F ends.
        passing = [(p.tokens, p.bytes) for p in of(Kind.FORWARD, mode, False)]
        slope, constant = line_above(passing, goes_on=True)
        coefficient = Workspace(slope, slope, layer[Kind.FORWARD].per_context_token, constant)
        if passing and coefficient != layer[Kind.FORWARD]:
            forward[mode] = coefficient
    for of_kind in (layer, last):
        of_kind[Kind.INPUT] = of_kind[Kind.BACKWARD]
        # W frees bytes as it runs. It makes one weight's gradient, independent of the chunk.
        of_kind[Kind.WEIGHT] = Workspace(per_op=of_kind[Kind.BACKWARD].per_op)
    return layer, last, again, forward


def _recompute_seconds(
    every: Sequence[Readings], profile: Profile, template: Profile
) -> dict[str, Seconds]:
    """Return the seconds of recompute by mode.

    Full recompute takes the seconds of a layer's forward, times the measured ratio of B's increase
    to F's seconds. Selective recompute takes the seconds of its modules; for modes that only some
    layer kinds have (OWN_MODES), it takes the increase of B. Modules that a layer lacks take no
    time.

    On a busy host, recompute may not have increased B measurably. Recompute is never free, so the
    seconds of ``template`` are then used, scaled by the measured speed of the layer's forward.
    """
    forward = profile.layer_seconds[Kind.FORWARD]
    ratios = sorted(
        more / without for readings in every for mode, _, more, without in readings.again
        if mode == FULL
    )  # fmt: skip
    ratio = ratios[len(ratios) // 2] if ratios else 1.0
    measured = [readings.module_seconds for readings in every if readings.module_seconds]
    modules = {
        name: Seconds(per_token=max(seconds[name] for seconds in measured)) for name in measured[0]
    }
    modules["core_attn"] = Seconds(per_pair=forward.per_pair)
    for own in OWN_MODES:
        longer = [
            more / tokens
            for readings in every
            for mode, tokens, more, _ in readings.again
            if mode == own
        ]
        (name,) = SELECTIVE[own]
        modules[name] = Seconds(per_token=median(longer) if longer else 0.0)
    slower = _slower(profile, template)
    for mode, names in SELECTIVE.items():
        if len(names) == 1 and modules[names[0]] == Seconds():
            known = dataclasses.replace(template.recompute_seconds[mode], per_chunk=0.0)
            modules[names[0]] = known * slower
    seconds = {KEEP: Seconds(), FULL: forward * (ratio or 1.0)}
    for mode, names in SELECTIVE.items():
        seconds[mode] = Seconds(
            sum(modules[name].per_token for name in names),
            sum(modules[name].per_pair for name in names),
        )
    return seconds


def _slower(measured: Profile, template: Profile) -> float:
    """Return the ratio of measured to template seconds of a layer's forward on a typical chunk."""
    load = _USUAL_TOKENS, pairs_within((Span(0, 0, _USUAL_TOKENS),), template.window)
    one, other = (each.layer_seconds[Kind.FORWARD](*load) for each in (measured, template))
    return one / other


# ------------------------------------------------------------------ speed of the ranks


def measured_slowness(of_kinds: Mapping[str, Sequence[Readings]]) -> tuple[float, ...]:
    """Return every pipeline rank's seconds relative to the fastest rank.

    The result is empty if ranks differ by a factor below DIFFER. Ranks with the same layer kind are
    compared by the median over replicas, and over F and B of the chunks that all of them measured.
    A rank that has no kind in common with other ranks is assumed to have their average speed. Ranks
    whose speeds differ by a factor of at most ALIKE get the same number.
    """
    ranks = 1 + max(one.rank for every in of_kinds.values() for one in every)
    rows, sides = [], []
    for every in of_kinds.values():
        offsets = _offsets(every)
        for rank, offset in offsets.items():
            row = np.zeros(ranks)
            row[list(offsets)] = -1 / len(offsets)
            row[rank] += 1
            rows.append(row)
            sides.append(offset)
    logs = np.linalg.lstsq(np.array(rows), np.array(sides), rcond=None)[0]
    if np.ptp(logs) < math.log(DIFFER):
        return ()
    factors = np.exp(_joined(logs))
    return tuple(round(float(factor), 3) for factor in factors / factors.min())


def _offsets(every: Sequence[Readings]) -> dict[int, float]:
    """Return the log seconds of one layer kind by pipeline rank, relative to their mean."""
    seen: dict[int, dict[tuple, list[float]]] = {}
    for one in every:
        for key, seconds in _seconds(one):
            seen.setdefault(one.rank, {}).setdefault(key, []).append(math.log(seconds))
    shared = set.intersection(*(set(each) for each in seen.values()))
    keys = sorted(shared)
    logs = np.array([[median(each[key]) for key in keys] for each in seen.values()])
    beyond = np.median(logs - logs.mean(0), axis=1)
    return dict(zip(seen, (beyond - beyond.mean()).tolist(), strict=True))


def _seconds(one: Readings) -> Iterable[tuple[tuple, float]]:
    """Yield (chunk and op, seconds) of stages with layers."""
    for kind, samples in ((Kind.FORWARD, one.forward), (Kind.BACKWARD, one.backward)):
        for each in samples:
            if each.layers and each.value > 0:
                yield _key(kind, each), each.value


def _key(kind: Kind, each: Sample) -> tuple:
    return (
        kind.value,
        each.choice,
        each.tokens,
        each.pairs,
        tuple(number for _, number in each.columns),
    )


def _joined(logs: np.ndarray) -> np.ndarray:
    """Return ``logs`` with the values of ranks of similar speed replaced by their median."""
    joined, order = logs.copy(), np.argsort(logs, kind="stable")
    first = 0
    for at in range(1, len(order) + 1):
        if at == len(order) or logs[order[at]] - logs[order[first]] > math.log(ALIKE):
            joined[order[first:at]] = np.median(logs[order[first:at]])
            first = at
    return joined
