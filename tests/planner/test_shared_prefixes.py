"""Plans of documents with shared prefixes: planner epp computes a prefix once per replica."""

from dataclasses import replace
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


@pytest.mark.parametrize("seed", range(12))
def test_plans_of_random_forests_are_valid(seed: int) -> None:
    random = Random(seed)
    replicas, lockstep = random.choice(((1, 1), (2, 1), (4, 1), (2, 2)))
    if seed >= 8:
        replicas, lockstep = random.choice(((2, 2), (4, 2), (4, 4)))
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
    if lockstep < replicas > 2:
        return  # several groups are divided anew only with more effort
    apart = plan_step(forest.lengths, cost, options, replicas=replicas)
    assert max(each.seconds for each in planned.planned) <= apart.seconds * (1 + 1e-9)


ANSWERS = ",".join(str(300 + 90 * n) for n in range(16))
BATCHES = {
    "answers": PrefixForest.joined(
        PrefixForest.parsed(f"{prompt}+({ANSWERS})") for prompt in range(9000, 17000, 1000)
    ),
    "chats": PrefixForest.parsed(f"9000+({','.join(str(70 + 97 * n % 5000) for n in range(60))})"),
    "turns": PrefixForest.joined(
        PrefixForest.parsed(f"{5000 + 700 * n}+(400,2000+(900,{1000 + n}+(300,700)))")
        for n in range(9)
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_replicas_in_lockstep_share_almost_as_well(name: str) -> None:
    """Chunks that run at the same time take about equally long, whatever their trees look like."""
    cost = named_cost("llama3-8b", "h100-80g", pp=4, tp=8)
    forest, options = BATCHES[name], Options(context=32768, effort=1)
    free = plan_step(forest, cost, options, replicas=2)
    options = replace(options, lockstep=2)
    step = plan_step(forest, cost, options, replicas=2)
    assert all(any(plan.prefixes) for plan in step.step.plans)
    assert step.seconds < 1.05 * free.seconds
    assert step.seconds < 0.5 * plan_step(forest.lengths, cost, options, replicas=2).seconds
