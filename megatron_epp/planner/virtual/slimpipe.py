"""SlimPipe (arXiv 2504.14519): uniform slices, interleaved, with context exchange.

As published: every sequence is cut into slices of equal tokens, as many for each and a multiple of
the stages; slices run as 1F1B, their backwards in reverse, on interleaved stages; attention is
exchanged between devices so that every slice takes the same time; the output layer is spread over
all devices; activations are offloaded where memory is short. Taken at its best: the exchange and
the messages of the output layer cost nothing. A sequence here is documents packed to the context,
or one long one, each seeing only itself. Nothing of it can be run.
"""

from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import KIND_CODE, OF_LAYERS
from megatron_epp.planner.chunks.fixed_size import packed_chunks
from megatron_epp.planner.lower_bound import lower_bound_seconds
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.result import SimulatedPipeline
from megatron_epp.planner.virtual.pipeline import (
    Setup,
    TimedSetup,
    best_of,
    placement,
    result,
    warm_ups,
)
from megatron_epp.sim.engine import OpArrays

SLICES = (1, 2, 4, 8)  # times the stages
MOST_CHUNKS = 2048


def plan(lengths: Sequence[int], cost: Cost, options: Options) -> SimulatedPipeline:
    """SlimPipe, simulated for one replica's documents."""
    batch = SortedBatch.of(lengths)
    packed = packed_chunks(batch.lengths, options.context, rates_of(cost))
    order = np.argsort(-packed.pairs, kind="stable")
    tokens, pairs = (each[order].astype(np.float64) for each in (packed.tokens, packed.pairs))
    best: tuple[TimedSetup, int] | None = None
    virtual = 2 if 2 * cost.layout.stages <= sum(cost.layout.layers) else 1
    for times in SLICES:
        slices = times * cost.layout.stages
        if best is not None and slices * len(tokens) > MOST_CHUNKS:
            break
        played = _played(cost, tokens, pairs, slices, virtual)
        if played is not None and (best is None or played.rank < best[0].rank):
            best = played, slices
    if best is None:
        raise ValueError("slimpipe: the model's states do not fit; raise the memory budget")
    played, slices = best
    bound = lower_bound_seconds(batch.lengths, cost)
    note = f"{slices} slices of each of {len(tokens)} sequences, {virtual} stages a device"
    return result("slimpipe", played, bound, len(tokens) * slices, note)


def uniform_loads(tokens: np.ndarray, pairs: np.ndarray, slices: int) -> Loads:
    """Every sequence in ``slices`` of equal tokens and, as attention is exchanged, equal pairs."""
    sequences = len(tokens)
    chunks = sequences * slices
    number = np.arange(chunks)
    place = number % slices
    each = np.repeat(tokens / slices, slices)
    return Loads(
        tokens=each,
        pairs=np.repeat(pairs / slices, slices),
        cut_tokens=each,
        document=np.repeat(np.arange(sequences), slices),
        earlier=np.where(place > 0, number - 1, -1),
        later=np.where(place < slices - 1, number + 1, -1),
        lengths=tokens,
        spans=(number, place * each, (place + 1) * each),
    )


def _played(
    cost: Cost, tokens: np.ndarray, pairs: np.ndarray, slices: int, virtual: int
) -> TimedSetup | None:
    place = placement("interleaved" if virtual == 2 else "one", cost.layout.stages)
    loads = uniform_loads(tokens, pairs, slices)

    def head_in_layers(work: OpArrays) -> OpArrays:
        """An equal share of the output layer on every stage, as a part of its F and B in the place
        of H and G: vocabulary parallelism with messages that cost nothing."""
        kinds = len(OF_LAYERS)
        seconds = work.seconds[:kinds].copy()
        for kind, each in cost.layout.profile.last_seconds.items():
            whole = each.per_token * loads.tokens / cost.layout.shards + each.per_chunk
            seconds[KIND_CODE[kind]] += whole / len(place)
        return work._replace(
            seconds=seconds,
            moved_bytes=work.moved_bytes[:kinds],
            link_seconds=work.link_seconds[:2],  # of activations and of gradients
        )

    sizes = np.full(len(tokens), slices)
    setup = Setup.even(cost.with_vocabulary(True), place, loads, sizes, head_in_layers, True)
    if (setup.headroom_bytes <= 0).any():
        return None
    return best_of(setup, warm_ups((False,)), offload=True)
