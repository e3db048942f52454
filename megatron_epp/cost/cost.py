"""Cost model of plans: seconds and bytes of every op, for a profile and a layout of stages.

A cost consists of four parts:

- :mod:`layout <megatron_epp.cost.layout>`: stages, parallel sizes, layer kinds, columns of a chunk;
- :mod:`seconds <megatron_epp.cost.seconds>` of ops;
- :mod:`memory <megatron_epp.cost.memory>` of model states and chunks;
- :mod:`ends <megatron_epp.cost.ends>`: embedding, and LM head on the last stage or on all.

This module combines them into the table that the simulator reads. :mod:`megatron_epp.cost.build`
makes costs from the names of a model and a device.

The formulas extend eqs. 1 to 10 of InfiniPipe.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_epp.cost.backward_peak import runs_of_plan
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.chunk_tables import ChunkTables
from megatron_epp.cost.ends import Ends, ends_of
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.loads import Loads, loads_of_plan, plan_loads
from megatron_epp.cost.memory import ChunkMemory
from megatron_epp.cost.seconds import OpSeconds
from megatron_epp.ir import OF_LAYERS, Chunk, Kind, Plan, Table, check_ranks


@dataclass(frozen=True)  # no slots, because its parts are cached
class Cost:
    """Seconds and bytes of chunks on the stages of one replica.

    Attributes:
        layout: stages, parallel sizes and layer kinds.
        device_budget_bytes: memory budget of a device, for each pipeline rank. It covers all stages
            of the rank, model states included.
        host_budget_bytes: host memory for the offloaded layers of one device.
        multiple: the executor pads every chunk's number of tokens to a multiple of this number.

    Raises:
        ValueError: the number of device budgets is not that of the pipeline ranks.

    Example:
        >>> from megatron_epp.cost.build import named_cost
        >>> from megatron_epp.sim.play import play
        >>> table = named_cost("gpt-7b", "a100-80g", pp=2, cp=8).table(plan)
        >>> play(plan, table).seconds
    """

    layout: StageLayout
    device_budget_bytes: tuple[float, ...]
    host_budget_bytes: float = math.inf
    multiple: int = 1

    def __post_init__(self):
        assert self.multiple >= 1
        ranks = self.layout.placement.ranks
        if len(self.device_budget_bytes) != ranks:
            raise ValueError(
                f"{len(self.device_budget_bytes)} memory budgets for {ranks} pipeline ranks; "
                "expected one for each"
            )

    @cached_property
    def ends(self) -> Ends:
        """Seconds and bytes of the embedding and the LM head."""
        return ends_of(self.layout)

    @cached_property
    def seconds(self) -> OpSeconds:
        """Seconds of ops."""
        return OpSeconds(self.layout, self.ends)

    @cached_property
    def memory(self) -> ChunkMemory:
        """Bytes of model states and chunks."""
        return ChunkMemory(self.layout, self.ends)

    # --- budgets ---------------------------------------------------------------------------------

    @property
    def headroom_bytes(self) -> np.ndarray:
        """[ranks]: bytes for chunks: the memory budget of each rank minus its model states."""
        return np.array(self.device_budget_bytes) - np.array(self.states_of_ranks)

    @property
    def states_of_ranks(self) -> tuple[float, ...]:
        """[ranks]: bytes of weights, gradients and optimizer states of all stages of each rank."""
        return tuple(self.layout.placement.of_ranks(self.memory.states_bytes))

    def require_states_fit(self) -> None:
        """Raise a ValueError if the model states of a stage exceed the budget of its device."""
        rank_of = self.layout.placement.place
        for stage, (states, rank) in enumerate(zip(self.memory.states_bytes, rank_of, strict=True)):
            budget = self.device_budget_bytes[rank]
            if states >= budget:
                raise ValueError(
                    f"memory budget {budget / GIB:.4g} GiB: stage {stage} needs more than "
                    f"{states / GIB:.4g} GiB for its model states alone; raise the budget, or use "
                    "more stages or devices"
                )

    # --- other costs -----------------------------------------------------------------------------

    def replace(self, **fields: Any) -> "Cost":
        """Return the cost with ``fields`` replaced: fields of Cost or of its layout."""
        own = {each.name: fields.pop(each.name) for each in _FIELDS if each.name in fields}
        if fields:
            own["layout"] = dataclasses.replace(own.get("layout", self.layout), **fields)
        return dataclasses.replace(self, **own)

    def with_vocabulary(self, parallel: bool) -> "Cost":
        """Return the cost with the LM head sharded over the stages, or on the last stage alone."""
        if parallel == self.layout.vocabulary_parallel:
            return self
        return self.replace(vocabulary_parallel=parallel)

    def with_coefficients_times(self, factors: Mapping[str, float]) -> "Cost":
        """Return the cost with some coefficients of every layer multiplied.

        ``factors`` contains a factor for each field of LayerCoefficients that changes.
        """
        return self.replace(profile=self.layout.profile.times(factors))

    # --- tables ----------------------------------------------------------------------------------

    def loads(self, chunks: Sequence[Chunk], documents: Sequence[int]) -> Loads:
        """Return the loads of ``chunks`` of documents with these lengths in tokens."""
        return plan_loads(chunks, documents, ranks=self.layout.cp, multiple=self.multiple)

    def table(self, plan: Plan) -> Table:
        """Return the seconds and bytes of every op of ``plan``.

        The plan determines whether the LM head is sharded over the stages.

        Raises:
            PlanError: the chunks do not compute every token once, or a document is on a
                context-parallel rank that the layout does not have.
            ValueError: the profile lacks a rate that the layout or the plan needs, such as the rate
                to host memory of a plan that offloads layers.
        """
        if plan.vocabulary_parallel != self.layout.vocabulary_parallel:
            return self.with_vocabulary(plan.vocabulary_parallel).table(plan)
        check_ranks(plan, self.layout.cp)
        loads = loads_of_plan(plan, self.layout.cp, self.multiple)
        counts = self.layout.kinds.of_plan(plan)
        runs = runs_of_plan(self.memory, plan, loads, counts)
        return self.tables(loads, plan.forward_only).of_runs(counts, runs)

    def table_of(self, loads: Loads, counts: Counts, forward_only: bool = False) -> Table:
        """Return the table for ``counts`` of layers, as :meth:`ChunkTables.of_counts` does."""
        return self.tables(loads, forward_only).of_counts(counts)

    def tables(
        self, loads: Loads, forward_only: bool = False, kinds: Sequence[Kind] = OF_LAYERS
    ) -> ChunkTables:
        """Return the tables of chunks for different recompute modes."""
        return ChunkTables(self.seconds, self.memory, self.ends, loads, forward_only, kinds)


_FIELDS = dataclasses.fields(Cost)
