"""Part of the plans' memory that depends on expert routing."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Plan


def routed_bytes(cost: Cost, plans: Sequence[Plan]) -> list[float]:
    """Return the growth of each pipeline rank's predicted peak, in bytes per unit of routing.

    The routing factor is the number of tokens of the most loaded device's experts, divided by this
    number in an even distribution. With several plans, the largest growth of each rank is returned.
    """
    # Imported only where plans are simulated, on one rank per replica: it compiles its loops.
    from megatron_epp.sim.play import play

    more = cost.replace(
        profile=replace(cost.layout.profile, routing=cost.layout.profile.routing + 1)
    )
    grown = [
        [
            float(most - even)
            for even, most in zip(
                play(plan, cost.table(plan)).peak_bytes,
                play(plan, more.table(plan)).peak_bytes,
                strict=True,
            )
        ]
        for plan in plans
    ]
    return [max(of_rank) for of_rank in zip(*grown, strict=True)]
