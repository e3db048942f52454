"""Measurement of a profile: seconds and bytes of this model on this device.

All ranks of a pipeline run the same synthetic chunks at the same time through their own layers,
embedding and LM head, as in training: on a host they share memory and caches. The model's shape
alone determines what is measured, and how often (by work, not time), so all ranks do the same.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp

from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.columns import DIAGONAL
from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.measured import Conditions, measured_profile
from megatron_epp.cost.fitting.readings import AFTER_CONTEXT_TOKENS, Peak, Readings, modes_of
from megatron_epp.cost.kinds.layer import Layer
from megatron_epp.cost.profile import Profile, Provenance
from megatron_epp.ir import FULL, KEEP, Kind, Payload
from megatron_epp.mcore.calibrate.clocks import IssueClock
from megatron_epp.mcore.calibrate.host_rate import host_rate
from megatron_epp.mcore.calibrate.probe import Measurement, Probe, Shape
from megatron_epp.mcore.calibrate.split_cost import measure_split
from megatron_epp.runtime.consensus import broadcast_result
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.link import receive_now, send_now

logger = logging.getLogger(__name__)

# Limit of a calibration's work on one rank: on a CPU about nine seconds of one core, at the 110
# Gflops in float32 of a server core of 2023; on a GPU about three seconds.
CPU_FLOPS = 1e12
CPU_SLOWER_IN_HALVES = 20  # slow-down of a CPU without bf16 units
GPU_FLOPS = 1.5e15
# The median counts. The minimum is what an op can take, but iterations consist of what ops do take:
# on a shared host 5% to 10% more.
REPEATS = 3
# Tokens of the chunks whose bytes are measured. On a CPU, bytes are what autograd saved, exactly
# linear. A GPU's allocator also counts temporaries. There, small chunks show what an op needs for
# any chunk (a weight's gradient, the minimum of an attention kernel), large ones what it needs per
# token. Tensors of 1 to 10 MiB may occupy 1 MiB more: a few per cent of small chunks. cuDNN's
# workspace is that of a bucket of 1024, 2048, ... tokens. Chunks are a little above a boundary,
# where the workspace is twice what their tokens need, so no chunk needs more than predicted.
_CPU_WEIGHED = (128, 256)
_GPU_WEIGHED = (256, 2048 + 64, 8192 + 64)
_CONTEXTS = (0, 16384, 65536)  # before chunks of AFTER_CONTEXT_TOKENS
_CONTEXT_FRACTION = 1 / 16  # limit of the longest context, of the device's memory


@dataclass(frozen=True, slots=True)
class Point:
    """A chunk to measure, in units of the base size, and the recompute mode of its one layer."""

    tokens: float
    context: float = 0.0
    pieces: int = 1
    mode: str = KEEP


# The cost per chunk shows in small chunks only. They are cheap to measure and easily disturbed, so
# they run twice as often.
_SMALL = (Point(0.125), Point(0.25))
_COMPANY = Shape(512)
# Planners cut no slices of fewer tokens. Kernels with few queries take up to twice as long per
# pair, which would be mistaken for the cost of every pair.
_LEAST_SLICE = 512
_SMALL_SLICES = (Point(0.25, 4.0), Point(0.25, 16.0))
# Chunks of thousands of tokens, as planners make them; a pair costs more once K and V no longer fit
# into a cache.
_POINTS = (
    Point(0.5),
    Point(0.5, 16.0),
    Point(1.0, pieces=8),
    Point(0.5, 4.0),
    Point(1.0),
    Point(1.0, mode=FULL),
    Point(1.0, 1.0),
    Point(2.0),
    Point(1.0, 2.0),
    Point(1.0, 2.0, mode=FULL),
    Point(1.0, 4.0),
)


def _points(base: int) -> tuple[Point, ...]:
    slices = [p for p in _SMALL_SLICES if p.tokens * base >= _LEAST_SLICE]
    small = (*_SMALL, *slices)
    return (*small, *_POINTS, *small)


def _pairs(shape: Shape, layer: Layer) -> int:
    """Return the query-key pairs that ``layer`` computes in a chunk."""
    return shape.pairs_within(layer.window) if layer.flops_per_pair else 0


def grid(layer: Layer, context: int, flops: float) -> list[tuple[Shape, str]]:
    """Return the chunks to measure: those of the largest base size with work below ``flops``."""

    def scaled(base: int) -> list[tuple[Shape, str]]:
        points = []
        own = (Point(1.0, mode=mode) for mode in layer.modes)
        for point in (*_points(base), *own):
            tokens = max(16, int(base * point.tokens))
            after = min(int(base * point.context), max(0, context - tokens))
            points.append((Shape(min(tokens, context), after, point.pieces), point.mode))
        return points

    def work(base: int) -> float:
        return REPEATS * sum(
            (4 if mode == FULL else 3)
            * (shape.tokens * layer.flops_per_token + _pairs(shape, layer) * layer.flops_per_pair)
            for shape, mode in scaled(base)
        )

    base = 64
    while base * 2 <= min(context, 8192) and work(base * 2) <= flops:
        base *= 2
    return scaled(base)


# ------------------------------------------------------------------ measuring


def calibrate(
    probe: Probe,
    groups: Groups,
    model: Model,
    context: int,
    provenance: Provenance,
    split_backward: bool,
    kinds: Sequence[str] = (),
) -> Profile:
    """Measure and fit a profile. Collective.

    Gradients accumulate in the model and random numbers are drawn: see ``probe.undisturbed``.

    Args:
        probe: The probe of this rank.
        groups: The job's process groups.
        model: Shape of the model.
        context: Most tokens of a document.
        provenance: Model, device and dtype; the errors of the fit on rows that it has not seen are
            added to its source.
        split_backward: Whether plans may split backwards; else I and W get the analytic fractions
            of
            B, and no split runs.
        kinds: Kinds of this stage's layers, as ``model`` names them. One layer of every kind is
            measured alone, one kind after the other, by the ranks that have it.

    Returns:
        The same profile on every rank.

    Raises:
        ValueError: The measurements cannot be fitted.
    """
    flops = _most_flops(probe)
    of_kinds: dict[str, list[Readings]] = {}
    for kind, layer in model.shapes.items():
        readings, first = Readings(groups.pipeline_rank, replica=groups.replica), not of_kinds
        kind_probe: Probe | None = probe
        if kinds:
            kind_probe = probe.of_layer(kinds.index(kind)) if kind in kinds else None
        # Embedding and LM head once, whatever the layers of their stages are.
        there = layer if kind_probe is not None else None
        _measure_bytes(kind_probe or probe, readings, context, there, ends=first)
        shapes = grid(layer, context, flops)
        _measure_seconds(kind_probe, probe, groups, shapes, readings, layer)
        if first:
            _measure_end_seconds(probe, groups, shapes, readings)
        if kind_probe is not None:
            _measure_modules(kind_probe, shapes, readings)
            readings.host += _host_seconds(kind_probe, shapes[0][0])
            readings.stores_last_slice = kind_probe.stores_last_slice
        dist.barrier(groups.control)
        if split_backward and kind_probe is not None:
            large = max(shape.tokens for shape, _ in shapes) // 2
            readings.split += measure_split(kind_probe, large, _sizes(probe, context)[-2:])
        if probe.config.context_parallel_size > 1:
            _measure_exchange(kind_probe, groups, shapes, readings)
        if first:
            _measure_links(probe, groups, readings)
            readings.host_rate = host_rate(probe, groups)
        every: list = [None] * groups.control.size()
        dist.all_gather_object(every, readings, group=groups.control)
        of_kinds[kind] = every

    def fitted() -> str:
        try:
            return measured_profile(of_kinds, model, provenance, _conditions(probe)).to_json()
        except ValueError as refusal:
            raise ValueError(f"calibration: {refusal}") from refusal

    return Profile.from_json(broadcast_result(fitted, groups.control))


def _most_flops(probe: Probe) -> float:
    if probe.device.type == "cuda":
        return GPU_FLOPS
    slower = 1 if probe.config.params_dtype.itemsize > 2 else CPU_SLOWER_IN_HALVES
    return CPU_FLOPS / slower


def _conditions(probe: Probe) -> Conditions:
    config = probe.config
    gradient = torch.promote_types(config.params_dtype, torch.float32)
    return Conditions(
        "cpu" if probe.device.type == "cpu" else _GPU,
        config.tensor_model_parallel_size,
        config.context_parallel_size,
        config.params_dtype.itemsize,
        gradient.itemsize,
        # A block is of one rank's rows; peaks are predicted for the rows of all context-parallel
        # ranks.
        probe.head_tokens * config.context_parallel_size,
    )


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
        if on_gpu:  # allocations that happen only once
            list(_ends(probe, shape, weigh=False))
        for measured, first, last in _ends(probe, shape, weigh=True):
            held = max(1, measured.held_bytes)
            if tokens in sizes[-2:]:
                readings.held.append(Sample("", first, last, tokens, shape.pairs, 0, held))
            if last:
                readings.peaks += _peaks(measured, KEEP, True, tokens)
    attends = layer is not None and layer.flops_per_pair > 0
    for after in _contexts(probe, context) if on_gpu and attends else ():
        measured = _weighed(probe, Shape(AFTER_CONTEXT_TOKENS, after), KEEP)
        readings.peaks += _peaks(measured, KEEP, False, AFTER_CONTEXT_TOKENS, after)


def _measure_layer_bytes(
    probe: Probe, readings: Readings, tokens: int, fits_line: bool, layer: Layer
) -> None:
    """Measure a layer's bytes; ``fits_line``: what is held from F to B is a sample of the fit."""
    for mode in modes_of(layer):
        for cut in (False, True):
            shape = Shape(tokens, cut=cut)
            measured = _weighed(probe, shape, mode)
            kept = tokens if cut else 0
            if fits_line:
                load = (tokens, _pairs(shape, layer), kept)
                readings.held.append(Sample(mode, False, False, *load, measured.held_bytes))
            if not cut:
                readings.peaks += _peaks(measured, mode, False, tokens)


def _sizes(probe: Probe, context: int) -> list[int]:
    """Return the tokens of the chunks whose bytes are measured."""
    sizes = _GPU_WEIGHED if probe.device.type == "cuda" else _CPU_WEIGHED
    return sorted({min(size, context) for size in sizes})


def _weighed(probe: Probe, shape: Shape, mode: str) -> Measurement:
    if probe.device.type == "cuda":
        # The first call allocates kernels and the libraries' buffers, which stay.
        probe.layers(shape, mode)
    return probe.layers(shape, mode, weigh=True)


def _peaks(
    measured: Measurement, mode: str, end: bool, tokens: int, context: int = 0
) -> tuple[Peak, Peak]:
    where = (mode, end, tokens, context)
    return (
        Peak(Kind.FORWARD, *where, measured.forward_bytes),
        Peak(Kind.BACKWARD, *where, measured.backward_bytes),
    )


def _contexts(probe: Probe, context: int) -> tuple[int, ...]:
    """Return the contexts before a measured slice; () if documents are too short."""
    most = min(context - AFTER_CONTEXT_TOKENS, probe.most_context(_CONTEXT_FRACTION))
    if most < AFTER_CONTEXT_TOKENS:
        return ()
    # As far apart as the document allows: see line_above.
    return tuple(sorted({min(size, most * size // _CONTEXTS[-1]) for size in _CONTEXTS}))


def _ends(probe: Probe, shape: Shape, weigh: bool) -> Iterator[tuple[Measurement, bool, bool]]:
    """Yield (measurement, has embedding, has LM head) for those that the stage has."""
    if probe.first:
        yield probe.embedding(shape, weigh), True, False
    if probe.last:
        yield probe.ends(shape, weigh), probe.first, True


def _measure_seconds(
    probe: Probe | None,
    company: Probe,
    groups: Groups,
    shapes: Sequence[tuple[Shape, str]],
    readings: Readings,
    layer: Layer,
) -> None:
    """Measure the seconds of a layer.

    ``probe`` is None if the stage has no such ``layer``; it then keeps a core busy with ``company``
    while it waits for the ranks that have one.
    """
    runs: dict[tuple[Shape, str], list[Measurement]] = {}
    if probe is not None:
        probe.layers(shapes[0][0], KEEP)  # one-time costs: threads, buffers, gradients
    for _ in range(REPEATS):
        for shape, mode in shapes:
            _meet(company, groups)
            if probe is not None:
                runs.setdefault((shape, mode), []).append(probe.layers(shape, mode))
    typical = {
        key: (median(m.forward_seconds for m in got), median(m.backward_seconds for m in got))
        for key, got in runs.items()
    }
    for (shape, mode), (forward, backward) in typical.items():
        load = (shape.tokens, _pairs(shape, layer), 0)
        columns = tuple((each, each.of(shape.spans)) for each in (*layer.work, DIAGONAL))
        if mode == KEEP:
            for rows, seconds in ((readings.forward, forward), (readings.backward, backward)):
                rows.append(Sample(KEEP, False, False, *load, seconds, columns=columns))
        elif (shape, KEEP) in typical:
            kept_seconds = typical[shape, KEEP]
            more = max(0.0, backward - kept_seconds[1])
            readings.again.append((mode, shape.tokens, more, kept_seconds[0]))


def _host_seconds(probe: Probe, small: Shape) -> list[tuple[float, float]]:
    """Return (F, B) seconds that a GPU's host takes to issue a layer, whatever its chunk.

    A ``small`` chunk is timed on an idle GPU. The minimum of several runs counts, because
    disturbances only add time. A CPU is its own host, so nothing is measured.
    """
    if probe.device.type == "cpu":
        return []
    issuing = probe.timed_by(IssueClock(probe.now))
    runs = [issuing.layers(small, KEEP) for _ in range(2 * REPEATS)]
    return [(min(run.forward_seconds for run in runs), min(run.backward_seconds for run in runs))]


def _meet(probe: Probe, groups: Groups) -> None:
    """Wait for all ranks; on a CPU, compute meanwhile, because memory and caches are shared."""
    met = dist.barrier(groups.control, async_op=True)
    while probe.computes_alone and not met.is_completed():
        probe.layers(_COMPANY, KEEP)
    met.wait()


def _measure_end_seconds(
    probe: Probe, groups: Groups, shapes: Sequence[tuple[Shape, str]], readings: Readings
) -> None:
    """Measure the seconds of embedding and LM head, in rounds of small and large chunks.

    An LM head takes as long as many layers. Rounds keep a disturbance from being mistaken for a
    cost per chunk.
    """
    largest = max(shape.tokens for shape, _ in shapes)
    if not probe.fused_head:  # a device may not have memory for all logits at once
        largest //= 2
    runs: dict[Shape, list[list[tuple[Measurement, bool, bool]]]] = {}
    for _ in range(REPEATS):
        for shape in (Shape(largest // 8), Shape(largest // 2), Shape(largest)):
            _meet(probe, groups)
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
    """Measure the modules that selective recompute runs again; a missing module takes no time."""
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
    """Measure documents sharded over context-parallel ranks against one document per rank."""
    for part in (4, 2):
        dist.barrier(groups.control)
        if probe is None:
            continue
        rows = probe.row_shard.padded(max(shape.tokens for shape, _ in shapes) // part)
        ways = [Shape(rows, pieces=probe.row_shard.parts, local=local) for local in (False, True)]
        probe.layers(ways[1], KEEP)  # one-time costs
        runs = [[probe.layers(shape, KEEP) for shape in ways] for _ in range(REPEATS)]
        forward, backward = (
            median(getattr(sharded, name) - getattr(local, name) for sharded, local in runs)
            for name in ("forward_seconds", "backward_seconds")
        )
        readings.exchange.append((rows, forward, backward))


def _measure_links(probe: Probe, groups: Groups, readings: Readings) -> None:
    """Measure round trips between the first two stages of every pipeline."""
    if groups.pipeline_size < 2:
        return
    first, second = groups.pipeline_ranks[:2]  # ranks of the world, which the payload groups span
    for tokens in (16, 256, 1024, 2048):
        for repeat in range(REPEATS + 1):
            tensor = probe.message(tokens)
            dist.barrier(groups.control)
            if groups.pipeline_rank > 1:
                continue
            began = probe.now()
            there, back = groups.payload[Payload.ACTIVATION], groups.payload[Payload.GRADIENT]
            if groups.pipeline_rank == 0:
                send_now(tensor, there, second)
                receive_now(tensor, back, second)
            else:
                receive_now(tensor, there, first)
                send_now(tensor, back, first)
            if repeat:
                readings.link.append((tokens, (probe.now() - began) / 2))


_GPU = "h100-80g"  # the template for what is not measured
