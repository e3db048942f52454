"""A chunking on a machine as arrays: what schedulers and searches compute with."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import KEEP, Kind
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.slicing import Rates
from megatron_epp.sim.engine import OpArrays
from megatron_epp.sim.inputs import op_arrays

Counts = Mapping[str, np.ndarray]  # by recompute letter: layers [stages, chunks] with that choice


def rates_of(cost: Cost) -> Rates:
    """Forward plus backward on the average stage."""
    per = cost.seconds_per(Kind.FORWARD) + cost.seconds_per(Kind.BACKWARD)
    token, pair, chunk = per.mean(axis=0).tolist()
    return Rates(token, pair, chunk)


def padded(tokens: np.ndarray, multiple: int) -> np.ndarray:
    return -(-tokens // multiple) * multiple


def loads_of(chunking: Chunking, lengths: np.ndarray, multiple: int = 1) -> Loads:
    """What the cost model reads; the tokens that a chunk is padded by count as a short document."""
    cut = chunking.document >= 0
    same = cut[1:] & (chunking.document[1:] == chunking.document[:-1])
    number = np.arange(chunking.count)
    earlier = np.full(chunking.count, -1, dtype=np.int64)
    later = np.full(chunking.count, -1, dtype=np.int64)
    earlier[1:][same] = number[:-1][same]
    later[:-1][same] = number[1:][same]
    return Loads(
        tokens=padded(chunking.tokens, multiple).astype(np.float64),
        pairs=chunking.pairs.astype(np.float64),
        cut_tokens=chunking.slice_tokens.astype(np.float64),
        document=chunking.document,
        earlier=earlier,
        later=later,
        lengths=lengths.astype(np.float64),
    )


@dataclass(frozen=True, slots=True)
class ScheduleProblem:
    """A chunking's ops on a machine, with the orders of its chunks.

    ops              seconds and bytes of every op, as the simulator plays them
    backward_order   chunks in the order of their backwards
    last_of_group    [chunks] the last chunk of each one's group
    budget_bytes     [stages] what is left beside the residents
    """

    ops: OpArrays
    backward_order: np.ndarray
    last_of_group: np.ndarray
    budget_bytes: np.ndarray

    @property
    def stages(self) -> int:
        return self.ops.seconds.shape[1]

    @property
    def chunks(self) -> int:
        return self.ops.seconds.shape[2]


def with_kept(cost: Cost, counts: Counts, chunks: int) -> Counts:
    """``counts`` of what is recomputed, and of the layers that are left: kept."""
    kept = np.tile(np.array(cost.layers, dtype=np.float64)[:, None], (1, chunks))
    for grid in counts.values():
        kept = kept - grid
    return {**counts, KEEP: kept}


def problem_of(cost: Cost, chunking: Chunking, loads: Loads, counts: Counts) -> ScheduleProblem:
    """The work of ``chunking`` where ``counts`` layers are recomputed."""
    table = cost.table_of(loads, with_kept(cost, counts, chunking.count))
    return ScheduleProblem(
        ops=op_arrays(table, loads),
        backward_order=chunking.backward,
        last_of_group=np.repeat(chunking.starts[1:] - 1, chunking.sizes),
        budget_bytes=np.array(cost.budget_bytes) - np.array(cost.states_bytes),
    )
