"""Plans of a replica's calls, which one rank makes and broadcasts, and every rank caches."""

from collections.abc import Callable

from megatron_epp.ir import Plan, check
from megatron_epp.runtime.consensus import broadcast_text
from megatron_epp.runtime.groups import Groups

MOST_REMEMBERED = 64  # limit of cached plans


class ReplicaPlans:
    """Cache of the replica's plans; all ranks of the replica must request plans in one order."""

    def __init__(self, groups: Groups | None):
        self.groups = groups
        self._known: dict[object, Plan] = {}

    def plan(self, key: object, make: Callable[[], Plan]) -> Plan:
        """Return the cached plan for ``key``, or make, check and broadcast it. Collective.

        If no plan is cached, rank 0 of the replica calls ``make``, and the other ranks receive and
        parse the plan's text. A full cache is cleared before the plan is added.

        Raises:
            PlanError: The plan is invalid; raised on every rank.
            ValueError: ``make`` raised an exception, whose text is in the message; raised on every
                rank.
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
                except Exception as unexpected:  # the other ranks wait for a broadcast
                    error = f"{type(unexpected).__name__}: {unexpected}"
            plan = Plan.parse(broadcast_text(text, error, self.groups.control))
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[key] = plan
        return plan
