"""The part of plans' memory that depends on which experts its tokens choose."""

from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Plan


def routed_bytes(cost: Cost, plans: Sequence[Plan]) -> list[float]:
    """Growth of every pipeline rank's predicted peak, in the plan where it grows most, if
    the fullest device's experts got one even share of tokens more."""
    # Imported where plans are played, on one rank of each replica: it compiles its loops.
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
