"""A profile from measurements: seconds and bytes of this model on this device.

All ranks of a pipeline run the same made-up chunks at the same time, through their own layers and
ends, as they will when they train: on a host they share memory and caches. What is measured, and
how often, follows from the model's shape alone (work, not time), so every rank does the same.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp

from megatron_epp.cost.analytic import carried_bytes
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import device as named_device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.fitting.fit import Sample, fit_profile, line_above
from megatron_epp.cost.kinds.layer import Layer
from megatron_epp.cost.profile import Bytes, Profile, Provenance, Seconds, Workspace
from megatron_epp.ir import FULL, KEEP, SELECTIVE, Kind, Payload
from megatron_epp.layers.recompute.wrap import ON_DEVICE
from megatron_epp.mcore.calibrate.host_rate import host_rate
from megatron_epp.mcore.calibrate.probe import Measurement, Probe, Shape
from megatron_epp.mcore.calibrate.split_cost import SplitSeconds, measure_split, with_split
from megatron_epp.runtime.consensus import broadcast_text
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.link import receive_now, send_now

logger = logging.getLogger(__name__)

# What a calibration may compute on one rank: on a CPU about nine seconds of one core at the 110
# Gflops that a server core of 2023 reaches in float32; on a GPU about three seconds.
CPU_FLOPS = 1e12
GPU_FLOPS = 1.5e15
# The median counts. The fastest would be what an op can take, and iterations are made of what ops
# do take: on a shared host 5% to 10% more.
REPEATS = 3
# Tokens of the chunks that are weighed. On a CPU bytes are what autograd saved, exactly linear. A
# GPU's allocator tells of temporaries, too: there small chunks show what an op needs whatever its
# chunk (a weight's gradient, the least that an attention kernel asks for), large ones what it needs
# per token. Tensors of 1 to 10 MiB may occupy 1 MiB too much: a few per cent of small chunks.
_CPU_WEIGHED = (128, 256)
_GPU_WEIGHED = (256, 2048, 8192)
# Behind contexts of these sizes so many tokens are weighed: a backward makes the gradients of all
# its keys at once, which shows only where they are more than what a weight's gradient takes.
_BEHIND_TOKENS = 1024
_CONTEXTS = (0, 16384, 65536)
_USUAL_TOKENS = 2048  # of a chunk, where one must stand for all
_CONTEXT_SHARE = 1 / 16  # of the device's memory that the longest context may take


@dataclass(frozen=True, slots=True)
class Point:
    """A chunk to measure, in units of the base size, and how its one layer is recomputed."""

    tokens: float
    context: float = 0.0
    pieces: int = 1
    letter: str = KEEP


# What a chunk costs whatever its size shows in small ones only. They cost little to measure and
# are easily disturbed, so they run twice as often as the others.
_SMALL = (Point(0.125), Point(0.25))
# Slices of fewer tokens are not what planners cut, and kernels take up to twice as long for a pair
# where they have few queries, which would pass for what every pair costs.
_LEAST_SLICE = 512
_SMALL_SLICES = (Point(0.25, 4.0), Point(0.25, 16.0))
# Chunks as planners make them, of thousands of tokens; a pair costs more where K and V no longer
# fit into a cache.
_POINTS = (
    Point(0.5),
    Point(0.5, 16.0),
    Point(1.0, pieces=8),
    Point(0.5, 4.0),
    Point(1.0),
    Point(1.0, letter=FULL),
    Point(1.0, 1.0),
    Point(2.0),
    Point(1.0, 2.0),
    Point(1.0, 2.0, letter=FULL),
    Point(1.0, 4.0),
)


def _points(base: int) -> tuple[Point, ...]:
    slices = [p for p in _SMALL_SLICES if p.tokens * base >= _LEAST_SLICE]
    small = (*_SMALL, *slices)
    return (*small, *_POINTS, *small)


def _pairs(shape: Shape, layer: Layer) -> int:
    """Pairs of queries and keys that ``layer`` meets in a chunk."""
    return shape.pairs_within(layer.shape.window) if layer.flops_per_pair else 0


def letters_of(layer: Layer) -> str:
    """The recompute letters that make a difference to ``layer``, and KEEP."""
    return ON_DEVICE + layer.letters


def grid(layer: Layer, context: int, flops: float) -> list[tuple[Shape, str]]:
    """The chunks to measure: the largest base size whose work stays below ``flops``."""

    def scaled(base: int) -> list[tuple[Shape, str]]:
        made = []
        own = (Point(1.0, letter=letter) for letter in letters_of(layer) if letter not in ON_DEVICE)
        for point in (*_points(base), *own):
            tokens = max(16, int(base * point.tokens))
            behind = min(int(base * point.context), max(0, context - tokens))
            made.append((Shape(min(tokens, context), behind, point.pieces), point.letter))
        return made

    def work(base: int) -> float:
        return REPEATS * sum(
            (4 if letter == FULL else 3)
            * (
                shape.tokens * layer.flops_per_token
                + shape.pairs_within(layer.shape.window) * layer.flops_per_pair
            )
            for shape, letter in scaled(base)
        )

    base = 64
    while base * 2 <= min(context, 8192) and work(base * 2) <= flops:
        base *= 2
    return scaled(base)


# ------------------------------------------------------------------ measuring


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that an op held beyond its chunk's bytes: of one layer, or of the last stage's end.

    bytes   below 0 where a backward frees more than it makes
    """

    kind: Kind
    letter: str
    end: bool
    tokens: int
    context: int
    bytes: int


@dataclass(slots=True)
class Readings:
    """Measurements of one rank.

    held            samples of bytes from F to B; ``peaks`` beyond them
    again           (letter, tokens, seconds that it added to B, seconds of F) of one layer
    module_seconds  by name of a selective set's module: of one layer, per token
    link            (tokens of a message, seconds)
    split           backwards whole and in halves
    exchange        (tokens, seconds of F, of B) that one layer takes longer of spread documents
                    than of those local to a context-parallel rank
    host_rate       bytes per second to the host's memory
    stores_last_slice      whether the layer's attention has last slices kept, too
    """

    forward: list[Sample] = dataclasses.field(default_factory=list)
    backward: list[Sample] = dataclasses.field(default_factory=list)
    held: list[Sample] = dataclasses.field(default_factory=list)
    peaks: list[Peak] = dataclasses.field(default_factory=list)
    again: list[tuple[str, int, float, float]] = dataclasses.field(default_factory=list)
    module_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    link: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    split: list[SplitSeconds] = dataclasses.field(default_factory=list)
    exchange: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    host_rate: float = 0.0
    stores_last_slice: bool = False


def calibrate(
    probe: Probe,
    groups: Groups,
    model: Model,
    context: int,
    provenance: Provenance,
    split_backward: bool,
    kinds: Sequence[str] = (),
) -> Profile:
    """Measure and fit; collective, and the same profile on every rank. Gradients add up in the
    model and random numbers are drawn: see ``probe.undisturbed``.

    ``split_backward``: whether plans may split backwards; else I and W keep the analytic shares of
    B, and nothing of that machinery runs.
    ``kinds``: of this stage's layers as ``model`` names them, where it names any. One layer of
    every kind is measured alone, one kind after the other, by the ranks whose stage has it.

    What the errors are on rows that the fit has not seen is added to ``provenance.source``.
    """
    flops = GPU_FLOPS if probe.device.type == "cuda" else CPU_FLOPS
    of_kinds: dict[str, list[Readings]] = {}
    for kind, layer in model.shapes.items():
        readings, first = Readings(), not of_kinds
        mine: Probe | None = probe
        if kinds:
            mine = probe.of_layer(kinds.index(kind)) if kind in kinds else None
        # The ends once, whatever their stages' layers are.
        there = layer if mine is not None else None
        _measure_bytes(mine or probe, readings, context, there, ends=first)
        shapes = grid(layer, context, flops)
        _measure_seconds(mine, groups, shapes, readings, layer)
        if first:
            _measure_end_seconds(probe, groups, shapes, readings)
        if mine is not None:
            _measure_modules(mine, shapes, readings)
            readings.stores_last_slice = mine.stores_last_slice
        dist.barrier(groups.control)
        if split_backward and mine is not None:
            large = max(shape.tokens for shape, _ in shapes) // 2
            readings.split += measure_split(mine, large, _sizes(probe, context)[-2:])
        if probe.config.context_parallel_size > 1:
            _measure_exchange(mine, groups, shapes, readings)
        if first:
            _measure_links(probe, groups, readings)
            readings.host_rate = host_rate(probe, groups)
        every: list = [None] * groups.control.size()
        dist.all_gather_object(every, readings, group=groups.control)
        of_kinds[kind] = every
    text = error = None
    if groups.control.rank() == 0:
        try:
            text = _of_all_kinds(of_kinds, model, provenance, probe).to_json()
        except ValueError as refusal:
            error = f"calibration: {refusal}"
    return Profile.from_json(broadcast_text(text, error, groups.control))


def _measure_bytes(
    probe: Probe, readings: Readings, context: int, layer: Layer | None, *, ends: bool = True
) -> None:
    """Measure bytes of the ``layer`` that the probe runs, if any, and of the ``ends``."""
    on_gpu, sizes = probe.device.type == "cuda", _sizes(probe, context)
    for tokens in sizes:
        if layer is not None:
            _measure_layer_bytes(probe, readings, tokens, tokens in sizes[-2:], layer)
        if not ends:
            continue
        shape = Shape(tokens)
        if on_gpu:  # whatever happens only once
            list(_ends(probe, shape, weigh=False))
        for measured, first, last in _ends(probe, shape, weigh=True):
            held = max(1, measured.held_bytes)
            if tokens in sizes[-2:]:
                readings.held.append(Sample("", first, last, tokens, shape.pairs, 0, held))
            if last:
                readings.peaks += _peaks(measured, KEEP, True, tokens)
    attends = layer is not None and layer.flops_per_pair > 0
    for behind in _contexts(probe, context) if on_gpu and attends else ():
        measured = _weighed(probe, Shape(_BEHIND_TOKENS, behind), KEEP)
        readings.peaks += _peaks(measured, KEEP, False, _BEHIND_TOKENS, behind)


def _measure_layer_bytes(
    probe: Probe, readings: Readings, tokens: int, fits_line: bool, layer: Layer
) -> None:
    """``fits_line``: whether what is held from F to B is one of the fit's samples."""
    for letter in letters_of(layer):
        for cut in (False, True):
            shape = Shape(tokens, cut=cut)
            measured = _weighed(probe, shape, letter)
            kept = tokens if cut else 0
            if fits_line:
                load = (tokens, _pairs(shape, layer), kept)
                readings.held.append(Sample(letter, False, False, *load, measured.held_bytes))
            if not cut:
                readings.peaks += _peaks(measured, letter, False, tokens)


def _sizes(probe: Probe, context: int) -> list[int]:
    """Tokens of the chunks to weigh."""
    sizes = _GPU_WEIGHED if probe.device.type == "cuda" else _CPU_WEIGHED
    return sorted({min(size, context) for size in sizes})


def _weighed(probe: Probe, shape: Shape, letter: str) -> Measurement:
    if probe.device.type == "cuda":
        # Kernels and the libraries' own buffers come with the first call and stay.
        probe.layers(shape, letter)
    return probe.layers(shape, letter, weigh=True)


def _peaks(
    measured: Measurement, letter: str, end: bool, tokens: int, context: int = 0
) -> tuple[Peak, Peak]:
    where = (letter, end, tokens, context)
    return (
        Peak(Kind.FORWARD, *where, measured.forward_bytes),
        Peak(Kind.BACKWARD, *where, measured.backward_bytes),
    )


def _contexts(probe: Probe, context: int) -> tuple[int, ...]:
    """Contexts to weigh a slice behind; none where documents have none worth the name."""
    most = min(context - _BEHIND_TOKENS, probe.most_context(_CONTEXT_SHARE))
    if most < _BEHIND_TOKENS:
        return ()
    # As far apart as the document allows: see line_above.
    return tuple(sorted({min(size, most * size // _CONTEXTS[-1]) for size in _CONTEXTS}))


def _ends(probe: Probe, shape: Shape, weigh: bool) -> Iterator[tuple[Measurement, bool, bool]]:
    """(measured, with the first stage's part, with the last stage's) of what the stage has."""
    if probe.first:
        yield probe.embedding(shape, weigh), True, False
    if probe.last:
        yield probe.ends(shape, weigh), probe.first, True


def _measure_seconds(
    probe: Probe | None,
    groups: Groups,
    shapes: Sequence[tuple[Shape, str]],
    readings: Readings,
    layer: Layer,
) -> None:
    """``probe``: None where the stage has no such ``layer``; it waits for those that have."""
    runs: dict[tuple[Shape, str], list[Measurement]] = {}
    if probe is not None:
        probe.layers(shapes[0][0], KEEP)  # what happens only once: threads, buffers, gradients
    for _ in range(REPEATS):
        for shape, letter in shapes:
            dist.barrier(groups.control)
            if probe is not None:
                runs.setdefault((shape, letter), []).append(probe.layers(shape, letter))
    typical = {
        key: (median(m.forward_seconds for m in got), median(m.backward_seconds for m in got))
        for key, got in runs.items()
    }
    for (shape, letter), (forward, backward) in typical.items():
        load = (shape.tokens, _pairs(shape, layer), 0)
        if letter == KEEP:
            for rows, seconds in ((readings.forward, forward), (readings.backward, backward)):
                behind = shape.context if layer.carried.expanded else 0
                rows.append(Sample(KEEP, False, False, *load, seconds, context=behind))
        elif (shape, KEEP) in typical:
            plain = typical[shape, KEEP]
            more = max(0.0, backward - plain[1])
            readings.again.append((letter, shape.tokens, more, plain[0]))


def _measure_end_seconds(
    probe: Probe, groups: Groups, shapes: Sequence[tuple[Shape, str]], readings: Readings
) -> None:
    """In rounds, of small and large chunks: an output layer takes as long as many layers, and what
    disturbs one moment must not pass for what every chunk costs."""
    largest = max(shape.tokens for shape, _ in shapes)
    if not probe.early_head:  # a device may have no room for all its logits at once
        largest //= 2
    runs: dict[Shape, list[list[tuple[Measurement, bool, bool]]]] = {}
    for _ in range(REPEATS):
        for shape in (Shape(largest // 8), Shape(largest // 2), Shape(largest)):
            dist.barrier(groups.control)
            runs.setdefault(shape, []).append(list(_ends(probe, shape, weigh=False)))
    for shape, got in runs.items():
        for same in zip(*got, strict=True):
            _, first, last = same[0]
            ends = (first, last, shape.tokens, shape.pairs, 0)
            forward = median(measured.forward_seconds for measured, *_ in same)
            backward = median(measured.backward_seconds for measured, *_ in same)
            readings.forward.append(Sample("", *ends, forward))
            readings.backward.append(Sample("", *ends, backward))


def _measure_modules(probe: Probe, shapes: Sequence[tuple[Shape, str]], readings: Readings) -> None:
    """Measure what selective recompute runs again; a module that the layer lacks takes nothing."""
    shape = Shape(max(shape.tokens for shape, _ in shapes) // 2)
    for name, all_parts in {"mlp": (), "layernorm": (), **probe.modules}.items():
        parts = [part for part in all_parts if not isinstance(part, IdentityOp)]
        seconds = [sum(probe.module_seconds(shape, p) for p in parts) for _ in range(REPEATS)]
        readings.module_seconds[name] = median(seconds) / shape.tokens


def _measure_exchange(
    probe: Probe | None,
    groups: Groups,
    shapes: Sequence[tuple[Shape, str]],
    readings: Readings,
) -> None:
    """The same documents, as many as there are context-parallel ranks, spread and local."""
    for part in (4, 2):
        dist.barrier(groups.control)
        if probe is None:
            continue
        rows = probe.share.padded(max(shape.tokens for shape, _ in shapes) // part)
        ways = [Shape(rows, pieces=probe.share.parts, local=local) for local in (False, True)]
        probe.layers(ways[1], KEEP)  # what happens only once
        runs = [[probe.layers(shape, KEEP) for shape in ways] for _ in range(REPEATS)]
        forward, backward = (
            median(getattr(spread, name) - getattr(local, name) for spread, local in runs)
            for name in ("forward_seconds", "backward_seconds")
        )
        readings.exchange.append((rows, forward, backward))


def _measure_links(probe: Probe, groups: Groups, readings: Readings) -> None:
    """Round trips between the first two stages of every pipeline, through the groups of F and B."""
    if groups.stages < 2:
        return
    first, second = groups.pipeline_ranks[:2]  # of the world, as the payload groups span it
    for tokens in (16, 256, 1024, 2048):
        for repeat in range(REPEATS + 1):
            tensor = probe.message(tokens)
            dist.barrier(groups.control)
            if groups.stage > 1:
                continue
            began = probe.now()
            there, back = groups.payload[Payload.ACTIVATION], groups.payload[Payload.GRADIENT]
            if groups.stage == 0:
                send_now(tensor, there, second)
                receive_now(tensor, back, second)
            else:
                receive_now(tensor, there, first)
                send_now(tensor, back, first)
            if repeat:
                readings.link.append((tokens, (probe.now() - began) / 2))


# ------------------------------------------------------------------ fitting


def _of_all_kinds(
    of_kinds: Mapping[str, Sequence[Readings]], model: Model, origin: Provenance, probe: Probe
) -> Profile:
    """The first kind's profile with the layers of all."""
    made = {kind: _fitted(every, model, kind, origin, probe) for kind, every in of_kinds.items()}
    whole = next(iter(made.values()))
    if len(made) == 1:
        return whole
    said = (f"{kind}: {each.provenance.source}" for kind, each in made.items())
    provenance = dataclasses.replace(whole.provenance, source="; ".join(said))
    stores_last_slice = any(each.stores_last_slice for each in made.values())
    return dataclasses.replace(
        whole.with_kinds(made), provenance=provenance, stores_last_slice=stores_last_slice
    )


def _fitted(
    every: Sequence[Readings], model: Model, kind: str, origin: Provenance, probe: Probe
) -> Profile:
    config, layer = probe.config, model.shapes[kind]
    device = named_device("cpu" if probe.device.type == "cpu" else _GPU)
    template = analytic_profile(model, device).of_kind(kind)
    best_link: dict[int, float] = {}
    for tokens, seconds in (pair for readings in every for pair in readings.link):
        best_link[tokens] = min(seconds, best_link.get(tokens, seconds))
    fitted = fit_profile(
        template,
        origin,
        tp=config.tensor_model_parallel_size,
        cp=config.context_parallel_size,
        seconds={
            Kind.FORWARD: [sample for readings in every for sample in readings.forward],
            Kind.BACKWARD: [sample for readings in every for sample in readings.backward],
        },
        held_bytes=[sample for readings in every for sample in readings.held],
        link_seconds=sorted(best_link.items()),
    )
    profile = fitted.profile
    # Blocks are of a rank's rows, and peaks are told of all that the context-parallel ranks share.
    head_tokens = probe.head_tokens * config.context_parallel_size
    workspace, last_workspace, again, forward = _workspaces(
        [peak for readings in every for peak in readings.peaks], head_tokens
    )
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    carried = layer.carried.on_device(ranks)
    gradient = torch.promote_types(config.params_dtype, torch.float32)
    splits = [split for readings in every for split in readings.split]
    source = "; ".join(f"{what} {quality}" for what, quality in fitted.quality.items())
    if not splits:
        source += "; I and W not measured: their analytic shares of B"
    profile = dataclasses.replace(
        profile,
        provenance=dataclasses.replace(origin, source=f"{origin.source}; {source}"),
        recompute_seconds=_recompute_seconds(every, profile, template),
        saved_bytes={
            letter: profile.saved_bytes[letter if letter in letters_of(layer) else KEEP]
            for letter in profile.saved_bytes
        },
        first_bytes=_alike(profile.first_bytes),
        last_bytes=_alike(profile.last_bytes),
        **carried_bytes(carried, config.params_dtype.itemsize, gradient.itemsize),
        stores_last_slice=any(readings.stores_last_slice for readings in every),
        workspace_bytes=workspace,
        last_workspace_bytes=last_workspace,
        last_workspace_tokens=float(head_tokens),
        recompute_workspace_bytes=again,
        forward_workspace_bytes=forward,
        expert_bytes_per_token=0.0,  # part of what was measured
        exchange_seconds=_exchange_seconds(every),
        host_bytes_per_second=min(readings.host_rate for readings in every),
        link_seconds_per_token=profile.link_seconds_per_token if best_link else 0.0,
        link_latency_seconds=profile.link_latency_seconds if best_link else 0.0,
    )
    return with_split(profile, splits) if splits else profile


def _exchange_seconds(every: Sequence[Readings]) -> dict[Kind, float]:
    """Per token; none where nothing was spread, or it took no longer."""
    rows = [reading for readings in every for reading in readings.exchange]
    if not rows:
        return {}
    forward = median(seconds / tokens for tokens, seconds, _ in rows)
    backward = median(seconds / tokens for tokens, _, seconds in rows)
    taken = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUT: backward}
    return {kind: seconds for kind, seconds in taken.items() if seconds > 0}


def _alike(figure: Bytes) -> Bytes:
    """Tokens and logits do not know whether their document is cut."""
    return Bytes(figure.per_token, figure.per_token)


def _workspaces(
    peaks: Sequence[Peak], head_tokens: int
) -> tuple[dict[Kind, Workspace], dict[Kind, Workspace], dict[str, Bytes], dict[str, Workspace]]:
    """Bytes beyond what is held: while F, B, I or W runs, besides on the last stage, of the layer
    that lives again, by letter, and while F runs of a layer that is recomputed, by letter, where
    that is not what a kept one needs. No measured peak lies above what these promise.

    ``head_tokens``: of the chunk at most, that the last stage's end works on; 0: all.
    """

    def of(kind: Kind, letter: str, end: bool) -> list[Peak]:
        what = (kind, letter, end)
        return [p for p in peaks if (p.kind, p.letter, p.end) == what and not p.context]

    layer, last = {}, {}
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        points = [(p.tokens, p.bytes) for p in of(kind, KEEP, False)]
        slope, constant = line_above(points, goes_on=True)
        behind = [
            (p.context, p.bytes)
            for p in peaks
            if (p.kind, p.letter, p.end, p.tokens) == (kind, KEEP, False, _BEHIND_TOKENS)
        ]
        per_context, _ = line_above(behind)
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
    again = {letter: Bytes() for letter in (KEEP, FULL, *SELECTIVE)}
    plain = sorted(of(Kind.BACKWARD, KEEP, False), key=lambda p: -p.bytes)
    kept = {p.tokens: p.bytes for p in plain}  # of several ranks the least
    for letter in (FULL, *SELECTIVE):
        # Beyond what the same chunk takes without recompute: constants are in both.
        largest = sorted(of(Kind.BACKWARD, letter, False), key=lambda p: p.tokens)[-2:]
        alive = max(((p.bytes - kept[p.tokens]) / p.tokens for p in largest), default=0.0)
        again[letter] = _alike(Bytes(max(0.0, alive)))
    forward = {}
    for letter in (FULL, *SELECTIVE):
        # What a recomputed layer does not hold from F to B lives as long as its F runs.
        passing = [(p.tokens, p.bytes) for p in of(Kind.FORWARD, letter, False)]
        slope, constant = line_above(passing, goes_on=True)
        figure = Workspace(slope, slope, layer[Kind.FORWARD].per_context_token, constant)
        if passing and figure != layer[Kind.FORWARD]:
            forward[letter] = figure
    for of_kind in (layer, last):
        of_kind[Kind.INPUT] = of_kind[Kind.BACKWARD]
        # W frees while it goes. What it makes is one weight's gradient, whatever the chunk's size.
        of_kind[Kind.WEIGHT] = Workspace(per_op=of_kind[Kind.BACKWARD].per_op)
    return layer, last, again, forward


def _recompute_seconds(
    every: Sequence[Readings], profile: Profile, template: Profile
) -> dict[str, Seconds]:
    """Full: a layer's forward, times how much longer B really took. Selective: its modules', or
    what B took longer; nothing of modules that the layer has not.

    Where the host was busy a B that ran something again may have been no slower than one that did
    not. Nothing runs again for nothing: then it is what ``template`` has of it, at the speed that
    the layer's forward was measured at.
    """
    forward = profile.layer_seconds[Kind.FORWARD]
    ratios = sorted(
        more / plain for readings in every for letter, _, more, plain in readings.again
        if letter == FULL
    )  # fmt: skip
    ratio = ratios[len(ratios) // 2] if ratios else 1.0
    measured = [readings.module_seconds for readings in every if readings.module_seconds]
    modules = {
        name: Seconds(per_token=max(seconds[name] for seconds in measured)) for name in measured[0]
    }
    modules["core_attn"] = Seconds(per_pair=forward.per_pair)
    for own in (letter for letter in SELECTIVE if letter not in ON_DEVICE):
        longer = [
            more / tokens
            for readings in every
            for letter, tokens, more, _ in readings.again
            if letter == own
        ]
        (name,) = SELECTIVE[own]
        modules[name] = Seconds(per_token=median(longer) if longer else 0.0)
    slower = _slower(profile, template)
    for letter, names in SELECTIVE.items():
        if len(names) == 1 and modules[names[0]] == Seconds():
            known = dataclasses.replace(template.recompute_seconds[letter], per_chunk=0.0)
            modules[names[0]] = _times(known, slower)
    seconds = {KEEP: Seconds(), FULL: _times(forward, ratio or 1.0)}
    for letter, names in SELECTIVE.items():
        seconds[letter] = Seconds(
            sum(modules[name].per_token for name in names),
            sum(modules[name].per_pair for name in names),
        )
    return seconds


def _slower(measured: Profile, template: Profile) -> float:
    """Measured over ``template``'s seconds of a layer's forward, of a chunk of a usual size."""
    usual = Shape(_USUAL_TOKENS)
    load = usual.tokens, usual.pairs_within(template.window)
    one, other = (each.layer_seconds[Kind.FORWARD](*load) for each in (measured, template))
    return one / other


def _times(seconds: Seconds, factor: float) -> Seconds:
    return Seconds(
        seconds.per_token * factor, seconds.per_pair * factor, seconds.per_chunk * factor
    )


_GPU = "h100-80g"  # the template of what is not measured
