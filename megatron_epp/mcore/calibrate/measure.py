"""Measurement of a profile (measured cost model): seconds and bytes of this model on this device.

All ranks run the same synthetic chunks at the same time. Each rank runs them through one layer of
every kind that its stages have, and through the embedding and the LM head if its stages have them.
So the ranks of a host share memory and caches, as in training. Chunks and repeats do not depend on
measured times, so all ranks run the same number of measurements.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch.distributed as dist
from megatron.core.transformer.identity_op import IdentityOp

from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.columns import DIAGONALS
from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.measured import Conditions, measured_profile
from megatron_epp.cost.fitting.readings import AFTER_CONTEXT_TOKENS, Peak, Readings, modes_of
from megatron_epp.cost.fitting.split_seconds import SMALL_TOKENS, SplitSeconds
from megatron_epp.cost.kinds.layer import Layer
from megatron_epp.cost.profile import Profile, Provenance
from megatron_epp.ir import FULL, KEEP, Kind, Payload
from megatron_epp.mcore.calibrate.clocks import IssueClock
from megatron_epp.mcore.calibrate.host_rate import host_rate
from megatron_epp.mcore.calibrate.probe import Measurement, Probe, Shape
from megatron_epp.runtime.consensus import all_gathered, broadcast_result
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.link import receive_now, send_now

logger = logging.getLogger(__name__)

# Limit of a calibration's work on one rank. On a CPU core with 110 Gflop/s in float32 (a server of
# 2023) it takes about nine seconds; on a GPU about three seconds, and three times that for the work
# that comes before timed ops.
CPU_FLOPS = 1e12
CPU_SLOWER_IN_HALVES = 20  # slow-down of a CPU without bf16 units
GPU_FLOPS = 1.5e15
# A GPU's clock rate follows its power within 10 ms (clocks.py). Before the layers' timed forwards,
# a GPU therefore works for a time that is long beside what its host needs between ops.
BUSY_SECONDS, GPU_RATE = 0.1, 5e14  # of a layer on an H100, in flop/s
# The profile uses the median of the repeats. The minimum would be too optimistic: on a shared host,
# ops typically take 5% to 10% longer.
REPEATS = 3
SPLIT_REPEATS = 4
# Tokens of the chunks whose bytes are measured. On a CPU, autograd's saved bytes are exactly linear
# in the tokens. A GPU's allocator also counts temporaries: small chunks determine the constant
# bytes of an op (a weight's gradient, the minimum of an attention kernel), large chunks the bytes
# per token. Tensors of 1 to 10 MiB may occupy 1 MiB more, a few per cent of small chunks. cuDNN
# allocates the workspace of the next bucket of 1024, 2048, ... tokens. The measured chunks are
# slightly larger than a bucket, where the workspace is twice as large as their tokens need, so
# predictions are upper bounds.
_CPU_WEIGHED = (128, 256)
_GPU_WEIGHED = (256, 2048 + 64, 8192 + 64)
_CONTEXTS = (0, 16384, 65536)  # before chunks of AFTER_CONTEXT_TOKENS
_CONTEXT_FRACTION = 1 / 16  # limit of the longest context, as a fraction of the device's memory


@dataclass(frozen=True, slots=True)
class Point:
    """A chunk to measure: token counts as multiples of a base size, and a recompute mode."""

    tokens: float
    context: float = 0.0
    pieces: int = 1
    mode: str = KEEP


# Only small chunks reveal the cost per chunk. Their times are short and easily disturbed, so they
# run twice as often.
_SMALL = (Point(0.125), Point(0.25))
_COMPANY = Shape(512)
# Planners cut no slices of fewer tokens. Kernels with few queries take up to twice as long per
# pair, which would distort the fitted cost per pair.
_LEAST_SLICE = 512
_SMALL_SLICES = (Point(0.25, 4.0), Point(0.25, 16.0))
# Chunks of thousands of tokens, as in plans. A pair costs more when K and V exceed a cache.
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
    """Return the number of query-key pairs that ``layer`` computes in a chunk."""
    return shape.pairs_within(layer.window) if layer.flops_per_pair else 0


def _flops(layer: Layer, shape: Shape, mode: str) -> float:
    """Return the floating-point operations of F and B of ``layer`` on a chunk, on all ranks."""
    pairs = _pairs(shape, layer)
    forward = shape.tokens * layer.flops_per_token + pairs * layer.flops_per_pair
    return (4 if mode == FULL else 3) * forward


def busy_repeats(probe: Probe, layer: Layer, shape: Shape) -> int:
    """Return how many times a GPU must run ``layer`` on a chunk to be busy for BUSY_SECONDS.

    Ranks that share the layer exchange data in it, so all of them need the same number. It
    therefore follows from the model's shape, and not from a measurement.
    """
    ranks = probe.config.tensor_model_parallel_size * probe.config.context_parallel_size
    return math.ceil(BUSY_SECONDS * GPU_RATE * ranks / _flops(layer, shape, KEEP))


def grid(layer: Layer, context: int, flops: float) -> list[tuple[Shape, str]]:
    """Return the chunks and recompute modes to measure.

    The sizes of the chunks are fixed multiples and fractions of a base size, but at least 16 and at
    most ``context`` tokens. The base size is the largest power of 2 from 64 to 8192 tokens that
    does not exceed ``context``, and for which all measurements of ``layer`` take at most ``flops``
    floating-point operations; 64 if there is none.
    """

    def scaled(base: int) -> list[tuple[Shape, str]]:
        points = []
        own = (Point(1.0, mode=mode) for mode in layer.modes)
        for point in (*_points(base), *own):
            tokens = max(16, int(base * point.tokens))
            after = min(int(base * point.context), max(0, context - tokens))
            points.append((Shape(min(tokens, context), after, point.pieces), point.mode))
        return points

    def work(base: int) -> float:
        return REPEATS * sum(_flops(layer, shape, mode) for shape, mode in scaled(base))

    base = 64
    while base * 2 <= min(context, 8192) and work(base * 2) <= flops:
        base *= 2
    return scaled(base)


# ------------------------------------------------------------------ measuring


def calibrate(
    stages: Sequence[Probe],
    groups: Groups,
    model: Model,
    context: int,
    provenance: Provenance,
    split_backward: bool,
    kinds: Sequence[Sequence[str]] = (),
) -> Profile:
    """Measure and fit a profile (measured cost model).

    All ranks of the job must call this function.

    The measurement accumulates gradients in the model and draws random numbers. Call the function
    inside the context manager ``probe.undisturbed``, which restores both.

    Args:
        stages: The probes of this rank's stages, first to last.
        groups: The job's process groups.
        model: Shape of the model.
        context: Largest number of tokens of a document.
        provenance: Model, device and dtype. The function appends the fit's errors on held-out
            measurements to ``provenance.source``.
        split_backward: Whether plans may split B into I and W. If so, the function also measures
            split backwards. Otherwise, it predicts I and W as analytic fractions of B.
        kinds: For each of ``stages``, the name of each layer's kind, as in ``model``; empty if all
            layers have one kind. The function measures one kind after another. Each rank that has
            the kind measures one layer, even if the rank has several stages.

    Returns:
        The same profile on every rank.

    Raises:
        ValueError: The measurements cannot be fitted.
    """
    company, flops = stages[0], _most_flops(stages[0])
    of_kinds: dict[str, list[Readings]] = {}
    for kind, layer in model.shapes.items():
        readings, first = Readings(groups.pipeline_rank, replica=groups.replica), not of_kinds
        probe = _layer_probe(kind, stages, kinds)
        if probe is not None:
            _measure_bytes(probe, readings, context, layer)
        if first:  # embedding and LM head are measured once, with the first kind
            _measure_end_bytes(stages, readings, context)
        shapes = grid(layer, context, flops)
        large = max(shape.tokens for shape, _ in shapes) // 2
        busy = busiest = None
        if probe is not None:
            busy = probe.after_work(Shape(large))
            busiest = probe.after_work(Shape(large), busy_repeats(probe, layer, Shape(large)))
        _measure_seconds(busiest, company, groups, shapes, readings, layer)
        if first:
            busy_stages = [stage.after_work(Shape(large)) for stage in stages]
            _measure_end_seconds(busy_stages, groups, shapes, readings)
        if probe is not None and busy is not None:
            _measure_modules(busy, shapes, readings)
            readings.host += _host_seconds(probe, shapes[0][0])
            readings.stores_last_slice = probe.stores_last_slice
        dist.barrier(groups.control)
        weighed = _sizes(company, context)[-2:]
        if split_backward and probe is not None and busy is not None:
            readings.split += measure_split(probe, busy, large, weighed)
        if split_backward and first and stages[-1].last:
            readings.split += measure_split_head(stages[-1], busy_stages[-1], large, weighed)
        if company.config.context_parallel_size > 1:
            _measure_exchange(busy, groups, shapes, readings)
        if first:
            _measure_links(company, groups, readings)
            readings.host_rate = host_rate(company, groups)
        of_kinds[kind] = all_gathered(readings, groups.control)

    def fitted() -> str:
        try:
            return measured_profile(of_kinds, model, provenance, _conditions(company)).to_json()
        except ValueError as refusal:
            raise ValueError(f"calibration: {refusal}") from refusal

    return Profile.from_json(broadcast_result(fitted, groups.control))


def _layer_probe(
    kind: str, stages: Sequence[Probe], kinds: Sequence[Sequence[str]]
) -> Probe | None:
    """Return a probe of this rank's first layer of ``kind``; None if the rank has no such layer."""
    if not any(kinds):
        return stages[0]
    for stage, of_layers in zip(stages, kinds, strict=True):
        if kind in of_layers:
            return stage.of_layer(of_layers.index(kind))
    return None


def _most_flops(probe: Probe) -> float:
    if probe.device.type == "cuda":
        return GPU_FLOPS
    slower = 1 if probe.config.params_dtype.itemsize > 2 else CPU_SLOWER_IN_HALVES
    return CPU_FLOPS / slower


def _conditions(probe: Probe) -> Conditions:
    config = probe.config
    return Conditions(
        "cpu" if probe.device.type == "cpu" else _GPU,
        config.tensor_model_parallel_size,
        config.context_parallel_size,
        # A block counts one rank's rows, but peaks are predicted for the rows of all
        # context-parallel ranks.
        probe.head_tokens * config.context_parallel_size,
    )


def _measure_bytes(probe: Probe, readings: Readings, context: int, layer: Layer) -> None:
    """Measure the bytes of ``layer``."""
    sizes = _sizes(probe, context)
    for tokens in sizes:
        _measure_layer_bytes(probe, readings, tokens, tokens in sizes[-2:], layer)
    attends = probe.device.type == "cuda" and layer.flops_per_pair > 0
    for after in _contexts(probe, context) if attends else ():
        measured = _weighed(probe, Shape(AFTER_CONTEXT_TOKENS, after), KEEP)
        readings.peaks += _peaks(measured, KEEP, False, AFTER_CONTEXT_TOKENS, after)


def _measure_end_bytes(stages: Sequence[Probe], readings: Readings, context: int) -> None:
    """Measure the bytes of the embedding and the LM head that ``stages`` have."""
    sizes = _sizes(stages[0], context)
    for shape in map(Shape, sizes):
        if stages[0].device.type == "cuda":  # allocations that happen only once
            list(_ends(stages, shape, weigh=False))
        for measured, first, last in _ends(stages, shape, weigh=True):
            held = max(1, measured.held_bytes)
            if shape.tokens in sizes[-2:]:
                readings.held.append(Sample("", first, last, shape.tokens, shape.pairs, 0, held))
            if last:
                readings.peaks += _peaks(measured, KEEP, True, shape.tokens)


def _measure_layer_bytes(
    probe: Probe, readings: Readings, tokens: int, fits_line: bool, layer: Layer
) -> None:
    """Measure a layer's peak bytes; with ``fits_line``, also its bytes held from F to B."""
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
    """Return the token counts of the chunks whose bytes are measured."""
    sizes = _GPU_WEIGHED if probe.device.type == "cuda" else _CPU_WEIGHED
    return sorted({min(size, context) for size in sizes})


def _weighed(probe: Probe, shape: Shape, mode: str) -> Measurement:
    if probe.device.type == "cuda":
        # The first call loads kernels and allocates the libraries' buffers, which remain allocated.
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
    """Return the context lengths of the measured slices; () if documents are too short."""
    most = min(context - AFTER_CONTEXT_TOKENS, probe.most_context(_CONTEXT_FRACTION))
    if most < AFTER_CONTEXT_TOKENS:
        return ()
    # The contexts differ as much as the document length allows, for the fit by line_above.
    return tuple(sorted({min(size, most * size // _CONTEXTS[-1]) for size in _CONTEXTS}))


def _ends(
    stages: Sequence[Probe], shape: Shape, weigh: bool
) -> Iterator[tuple[Measurement, bool, bool]]:
    """Measure the stages' embedding and head; yield (measurement, with embedding, with head)."""
    for probe in stages:
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
    """Measure the seconds of ``layer`` with ``probe``, and add them to ``readings``.

    ``probe`` is None if this rank has no layer of the kind of ``layer``. While other ranks
    measure, a CPU rank keeps its core busy with layers of the probe ``company``.
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
        columns = tuple((each, each.of(shape.spans)) for each in (*layer.work, *DIAGONALS))
        if mode == KEEP:
            for rows, seconds in ((readings.forward, forward), (readings.backward, backward)):
                rows.append(Sample(KEEP, False, False, *load, seconds, columns=columns))
        elif (shape, KEEP) in typical:
            kept_seconds = typical[shape, KEEP]
            more = max(0.0, backward - kept_seconds[1])
            readings.again.append((mode, shape.tokens, more, kept_seconds[0]))


def _host_seconds(probe: Probe, small: Shape) -> list[tuple[float, float]]:
    """Return [(F, B)]: the seconds that the host needs to issue a layer's kernels to the GPU.

    These times do not depend on the chunk's size, so the function runs a ``small`` chunk on an idle
    GPU. It takes the minimum of several runs, because disturbances only add time. On a CPU, the
    function returns [].
    """
    if probe.device.type == "cpu":
        return []
    issuing = probe.timed_by(IssueClock(probe.now))
    runs = [issuing.layers(small, KEEP) for _ in range(2 * REPEATS)]
    return [(min(run.forward_seconds for run in runs), min(run.backward_seconds for run in runs))]


def _meet(probe: Probe, groups: Groups) -> None:
    """Wait for all ranks; on a CPU, run layers meanwhile, because ranks share memory and caches."""
    met = dist.barrier(groups.control, async_op=True)
    while probe.computes_alone and not met.is_completed():
        probe.layers(_COMPANY, KEEP)
    met.wait()


def _measure_end_seconds(
    stages: Sequence[Probe],
    groups: Groups,
    shapes: Sequence[tuple[Shape, str]],
    readings: Readings,
) -> None:
    """Measure the seconds of embedding and LM head, in rounds of small and large chunks.

    The LM head takes the time of many layers. Every round runs all sizes, so that a temporary
    disturbance affects all sizes and does not look like a cost per chunk.
    """
    largest = max(shape.tokens for shape, _ in shapes)
    if not stages[0].fused_head:  # the logits of the largest chunk may exceed the device's memory
        largest //= 2
    runs: dict[Shape, list[list[tuple[Measurement, bool, bool]]]] = {}
    for _ in range(REPEATS):
        for shape in (Shape(largest // 8), Shape(largest // 2), Shape(largest)):
            _meet(stages[0], groups)
            runs.setdefault(shape, []).append(list(_ends(stages, shape, weigh=False)))
    for shape, got in runs.items():
        for same in zip(*got, strict=True):
            _, first, last = same[0]
            ends = (first, last, shape.tokens, shape.pairs, 0)
            forward = median(measured.forward_seconds for measured, *_ in same)
            backward = median(measured.backward_seconds for measured, *_ in same)
            readings.forward.append(Sample("", *ends, forward))
            readings.backward.append(Sample("", *ends, backward))


def _measure_modules(probe: Probe, shapes: Sequence[tuple[Shape, str]], readings: Readings) -> None:
    """Measure the forward seconds per token of the modules that selective recompute recomputes.

    A module that the layer does not have takes 0 seconds.
    """
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
    """Measure the extra seconds of documents sharded over the context-parallel ranks.

    The function also measures each document on a single rank, and takes the difference.
    """
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
    """Measure the seconds of messages between the first two ranks of every pipeline."""
    if groups.pipeline_size < 2:
        return
    first, second = groups.pipeline_ranks[:2]  # global ranks, because payload groups span the world
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


_GPU = "h100-80g"  # device of the catalogue for coefficients that are not measured


# ------------------------------------------------------------------ split backwards


def measure_split(
    probe: Probe, busy: Probe, tokens: int, weighed: Sequence[int]
) -> list[SplitSeconds]:
    """Return measurements of split backwards on one rank.

    The function measures seconds with ``busy`` (:meth:`.probe.Probe.after_work`) for chunks of up
    to ``tokens`` tokens, and bytes with ``probe`` for chunks of ``weighed`` tokens.
    """
    return [*_split_bytes(probe, weighed), *_split_seconds(busy, tokens)]


def _split_bytes(probe: Probe, weighed: Sequence[int]) -> Iterator[SplitSeconds]:
    for tokens in weighed:
        shape = Shape(tokens)
        if probe.device.type == "cuda":  # memory that the first call allocates and keeps
            probe.layers(shape, KEEP, split=True)
        halves = probe.layers(shape, KEEP, weigh=True, split=True)
        held, peak = halves.weight_input_bytes, max(0, halves.backward_bytes)
        yield SplitSeconds(False, tokens, input_bytes=peak, weight_input_bytes=held)


def _split_seconds(probe: Probe, largest: int) -> Iterator[SplitSeconds]:
    for tokens in (SMALL_TOKENS, largest // 2, largest):
        shape = Shape(tokens)
        runs = []
        for _ in range(SPLIT_REPEATS):
            unsplit = probe.layers(shape, KEEP)
            halves = probe.layers(shape, KEEP, split=True)
            runs.append((unsplit.backward_seconds, halves.backward_seconds, halves.weight_seconds))
        yield SplitSeconds(False, tokens, *map(median, zip(*runs, strict=True)))


def measure_split_head(
    probe: Probe, busy: Probe, tokens: int, weighed: Sequence[int]
) -> list[SplitSeconds]:
    """Return measurements of the LM head's split backward; arguments as in measure_split."""
    runs = [busy.ends(Shape(tokens // 2), split=True) for _ in range(SPLIT_REPEATS)]
    seconds = median(run.backward_seconds for run in runs)
    weight = median(run.weight_seconds for run in runs)
    splits = [SplitSeconds(True, tokens // 2, seconds + weight, seconds, weight)]
    for size in weighed:
        held = probe.ends(Shape(size), weigh=True, split=True).weight_input_bytes
        splits.append(SplitSeconds(True, size, weight_input_bytes=held))
    return splits
