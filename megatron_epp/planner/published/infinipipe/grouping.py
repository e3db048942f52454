"""InfiniPipe's dynamic program, which groups documents into successive 1F1B pipelines.

Source: InfiniPipe eqs 12 to 20. The in-flight limit of a pipeline depends on its longest document
(eq. 7), so documents with similar numbers of slices belong together. But every pipeline adds a
warm-up of ``delta`` seconds.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, Kind
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.order.problem import Counts
from megatron_epp.planner.order.warmup import pipelines
from megatron_epp.planner.published.infinipipe.memory import paper_freed, paper_moves
from megatron_epp.planner.recompute import ilp
from megatron_epp.planner.recompute.ilp import Solver


class RecomputeIlps:
    """Integer programs for the recompute of one chunking, with InfiniPipe's memory model.

    Args:
        solver: solver of the integer programs.
        chunking: the chunks.
        loads: numbers of tokens and query-key pairs of the chunks.
        cost: cost model, including the stages and parallel degrees.
        headroom_bytes: [stages] bytes available besides the model states.
    """

    def __init__(
        self,
        solver: Solver,
        chunking: Chunking,
        loads: Loads,
        cost: Cost,
        headroom_bytes: np.ndarray,
    ):
        self.solver, self.chunking, self.cost = solver, chunking, cost
        self.headroom_bytes = headroom_bytes
        self.moves = paper_moves(cost, loads)
        self.freed = paper_freed(cost, loads)
        forward = float(cost.seconds.of(Kind.FORWARD, loads).sum())
        self.layer_seconds = forward / sum(cost.layout.layers) / loads.chunks  # F_hat of eq. 17

    def layers(
        self, first: int, stop: int, headroom_bytes: np.ndarray, *, integer: bool
    ) -> np.ndarray | None:
        """Return C of eqs 18 to 20, the layers to recompute in a pipeline of consecutive groups.

        Args:
            first: index of the first group (sliced document or pack).
            stop: index after the last group.
            headroom_bytes: [stages] bytes available besides the model states.
            integer: whether to solve the integer program instead of its relaxation.

        Returns:
            [slots] number of recomputed layers of every slot (diagonal of stages and chunks). None
            if the pipeline does not fit in memory.
        """
        chunking, cost = self.chunking, self.cost
        begin, end = chunking.starts[first], chunking.starts[stop]
        sizes = chunking.sizes[first:stop]
        slots = int(end - begin) + cost.layout.stages - 1
        most = np.full(slots, min(cost.layout.layers))
        solution = ilp.solve_order(
            self.solver,
            pipelines(sizes, [], cost.layout.stages),
            chunking.backward[begin:end] - begin,
            np.ascontiguousarray(self.moves[..., begin:end]),
            np.ascontiguousarray(self.freed[None, :, begin:end]),
            headroom_bytes,
            most,
            integer=integer,
        )
        return None if solution is None else solution[0]

    def seconds(self, first: int, stop: int) -> float:
        """Return T_ckpt, the recompute seconds of a pipeline of groups ``first`` to ``stop`` - 1.

        The relaxed program is solved. The result is infinite if no recompute fits.
        """
        layers = self.layers(first, stop, self.headroom_bytes, integer=False)
        return np.inf if layers is None else self.layer_seconds * float(layers.sum())

    def counts(self, cuts: Sequence[int], headroom_bytes: np.ndarray) -> Counts | None:
        """Return the recompute counts; None if the pipelines do not fit in ``headroom_bytes``.

        ``cuts`` contains the first groups of the second and later pipelines. ``headroom_bytes``
        [stages] are the bytes available besides the model states.
        """
        chunking, stages = self.chunking, self.cost.layout.stages
        grid = np.zeros((stages, chunking.count))
        for first, stop in itertools.pairwise((0, *cuts, chunking.groups)):
            layers = self.layers(first, stop, headroom_bytes, integer=True)
            if layers is None:
                return None
            begin, end = chunking.starts[first], chunking.starts[stop]
            backward = chunking.backward[begin:end] - begin
            grid[:, begin:end] = ilp.broadcast_diagonals(layers, backward, stages)
        return self.cost.layout.kinds.first(FULL, grid)


def group(
    ilps: RecomputeIlps, delta: float, below: float = np.inf
) -> tuple[tuple[int, ...], float] | None:
    """Assign documents to pipelines by eq. 14.

    A group is a sliced document or a pack. Groups are in descending order of their slice counts, so
    every pipeline consists of consecutive groups. Only groups with fewer slices than the previous
    group are tried as first groups of pipelines.

    Args:
        ilps: recompute programs of the chunking.
        delta: warm-up of a pipeline in seconds.
        below: seconds of warm-ups and recompute; the caller needs only a result that takes less.

    Returns:
        The groups at which another pipeline begins, and the seconds of all warm-ups and recompute.
        The result is None if nothing fits in memory, and may be None if nothing takes less than
        ``below``.
    """
    sizes = ilps.chunking.sizes
    boundaries = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    last = len(boundaries) - 1
    one_pipeline = ilps.seconds(0, len(sizes))
    if one_pipeline <= delta:
        return (), delta + one_pipeline  # two pipelines cost at least two deltas
    least = [0.0] + [np.inf] * last
    came = [0] * (last + 1)
    for stop in range(1, last + 1):
        # A longer run needs at least as much recompute, so the first run that cannot win ends the
        # loop.
        for first in range(stop - 1, -1, -1):
            if least[first] + delta >= min(least[stop], below):
                continue
            if stop - first == last:
                taken = one_pipeline
            else:
                taken = ilps.seconds(boundaries[first], boundaries[stop])
            if delta + taken >= min(least[stop], below):
                break
            if least[first] + delta + taken < least[stop]:
                least[stop], came[stop] = least[first] + delta + taken, first
    if least[-1] == np.inf:
        return None
    cuts, at = [], last
    while at:
        at = came[at]
        if at:
            cuts.append(boundaries[at])
    return tuple(reversed(cuts)), least[-1]
