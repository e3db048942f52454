"""Plans of documents with shared prefixes: planner epp computes a prefix once per replica."""

from random import Random

import numpy as np
import pytest

from megatron_epp.corpus.shared_prefixes import PrefixForest, shared_prefixes
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir import Step, StepPart, check, check_op_templates
from megatron_epp.planner.options import Options
from megatron_epp.planner.process import PlannerSettings, Request, answer
from megatron_epp.planner.replicas import plan_part, plan_step
from megatron_epp.sim.play import play


def random_forest(random: Random, samples: int) -> PrefixForest:
    """Return documents that begin with common tokens, some of them equal, from random turns."""
    turns = [random.randint(16, 3000) for _ in range(6)]
    rows = []
    for number in range(samples):
        words = [np.full(turns[t], t) for t in sorted(random.sample(range(6), 3))]
        own = np.full(random.choice((0, random.randint(1, 2500))), 100 + number % 5)
        rows.append(np.concatenate((*words, own)))
    return shared_prefixes(rows)


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_random_forests_are_valid(seed: int) -> None:
    random = Random(seed)
    replicas, lockstep = random.choice(((1, 1), (2, 1), (4, 1), (2, 2)))
    place = (0, 1, 1, 0) if seed % 4 == 3 else ()
    budget = random.choice((70.0, 12.0))
    cost = named_cost(
        "llama3-8b", "h100-80g", pp=4, tp=8, vocabulary_parallel=seed % 3 == 1,
        memory_budget_gib=budget, place=place,
    )  # fmt: skip
    forest = random_forest(random, random.randint(replicas, 14))
    options = Options(context=16384, effort=0, lockstep=lockstep)
    planned = plan_step(forest, cost, options, replicas=replicas)
    step = planned.step
    assert step.lengths == forest.lengths and Step.parse(str(step)) == step
    check_op_templates(step)
    for replica, plan in enumerate(step.plans):
        check(plan)
        played = play(plan, cost.table(plan))
        if lockstep == 1:
            assert played.seconds == pytest.approx(plan.predicted.seconds)
            assert max(played.peak_bytes) <= budget * GIB
        part = step.part(replica)
        for sample, length in zip(
            part.documents_of(replica), part.lengths_of(replica), strict=True
        ):
            held = [d for d, of in enumerate(part.samples_of(replica)) if sample in of]
            assert sum(plan.documents[d] for d in held) == length
        own = plan_part(forest, cost, options, "epp", replicas, replica)
        assert own.plan_of(replica) == plan
        sent = answer(
            PlannerSettings(cost, options, "epp", replicas, replica), Request("", forest, False)
        )
        assert StepPart.parse(sent.step) == own
    apart = plan_step(forest.lengths, cost, options, replicas=replicas)
    assert max(each.seconds for each in planned.planned) <= apart.seconds * (1 + 1e-9)
