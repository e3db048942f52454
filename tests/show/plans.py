"""Plans and runs that the tests of the pictures share."""

import dataclasses
import random

from megatron_epp.ir import Plan, Table
from megatron_epp.sim.play import Simulation, play
from megatron_epp.sim.unit_table import unit_table
from tests import plans
from tests.sim import test_play

# A document cut in two, a hybrid chunk, a pack.
EXAMPLE = plans.EXAMPLE.replace("replica 0 of 1\n", "").split("predicted")[0]


def example() -> Plan:
    return Plan.parse(EXAMPLE)


def split_example() -> Plan:
    """The example with every backward in halves, so that it holds all kinds of work."""
    text = EXAMPLE.replace("B1 B0 B2", "I1 W1 B0 I2 W2").replace("B1 B0 F2 B2", "B1 I0 F2 W0 B2")
    return Plan.parse(text)


def vocabulary_example() -> Plan:
    """The same with the output layer over both stages, so that it holds all kinds there are."""
    stages = ("F0 F1 F2 H0 H1 I1 W1 B0 G1 G0 H2 I2 W2 G2", "F0 F1 H0 H1 B1 I0 F2 W0 G1 H2 B2 G0 G2")
    head = EXAMPLE.split("stage 0")[0]
    return Plan.parse(head + "".join(f"stage {s}: {order}\n" for s, order in enumerate(stages)))


def one_f_one_b(stages: int, microbatches: int) -> Plan:
    """Uniform 1F1B: equal packs, ``stages - s`` in flight on stage s."""
    return test_play.one_f_one_b(stages, [1] * microbatches)


def table(plan: Plan, seed: int = 0, split: bool = False) -> Table:
    """Random durations and bytes; links cost nothing, so that records tell every reason."""
    chance = random.Random(seed)
    made = unit_table(plan)
    seconds = {
        kind: [[chance.uniform(0.5, 2.0) for _ in plan.chunks] for _ in plan.layers]
        for kind in made.seconds
    }
    held = {
        item: [[chance.randint(1, 9) * 1e8 for _ in row] for row in grid]
        for item, grid in made.held_bytes.items()
    }
    return dataclasses.replace(
        made, seconds=seconds, held_bytes=held, resident_bytes=(1e9,) * plan.stages
    )


def played(plan: Plan, seed: int = 0) -> Simulation:
    return play(plan, table(plan, seed))
