"""The plans of a replica's calls: made by one rank, told to the others, remembered."""

import dataclasses
from collections.abc import Callable

from megatron_epp.ir import Chunk, Plan, Span, check
from megatron_epp.runtime.consensus import broadcast_text
from megatron_epp.runtime.groups import Groups

MOST_REMEMBERED = 64  # plans of calls that looked alike


def counted(plan: Plan) -> Plan:
    """``plan`` with a token in every chunk: what replicas that meet in their ops have in common,
    however long their micro-batches are."""
    return dataclasses.replace(
        plan,
        documents=(1,) * len(plan.chunks),
        chunks=tuple(Chunk((Span(number, 0, 1),)) for number in range(len(plan.chunks))),
    )


class ReplicaPlans:
    """Makes the replica's plans. All its ranks ask for the same ones, in the same order."""

    def __init__(self, groups: Groups | None):
        self.groups = groups
        self._known: dict[object, Plan] = {}

    def plan(self, key: object, make: Callable[[], Plan]) -> Plan:
        """The plan for ``key``, made by ``make`` on one rank where it is not known. Collective.

        PlanError, ValueError: there can be none; on every rank.
        """
        if key in self._known:
            return self._known[key]
        if self.groups is None:
            plan = make()
            check(plan)
        else:
            text, error = None, None
            if self.groups.control.rank() == 0:
                try:
                    plan = make()
                    check(plan)
                    text = str(plan)
                except ValueError as refusal:
                    error = str(refusal)
                except Exception as unexpected:  # the others wait for a word
                    error = f"{type(unexpected).__name__}: {unexpected}"
            plan = Plan.parse(broadcast_text(text, error, self.groups.control))
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[key] = plan
        return plan
