"""Replicas whose devices are of unlike speed: what each gets of a batch, and plans for it."""

from pathlib import Path

import numpy as np
import pytest

from megatron_epp.__main__ import main
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Step
from megatron_epp.planner import Options
from megatron_epp.planner.choose.choice import unlike_seconds
from megatron_epp.planner.order.problem import rates_of
from megatron_epp.planner.replicas import divide_documents, plan_part, plan_step

LENGTHS = [30000, 9000, 8000, 7000, 5000, 4000, 4000, 3000, 2000, 1500, 1000, 900, 800, 700] * 2
OPTIONS = Options(32768, frozenset(), 0)


def cost_of(pp: int, dp: int, *slowness: float):
    """8B on pipelines whose ranks are so slow, replica by replica."""
    cost = named_cost("llama3-8b", "h100-80g", pp=pp, dp=dp, cp=8)
    return cost.replace(profile=cost.layout.profile.with_slowness(slowness, pp))


def test_slowness_is_that_of_the_worst_replica_and_of_each() -> None:
    profile = cost_of(2, 3, 2, 2, 2, 3, 2, 2).layout.profile
    assert profile.replica_slowness == (1, 1, 1, 1.5, 1, 1)
    assert profile.rank_slowness == (1, 1.5)
    assert Profile.from_json(profile.to_json()) == profile
    same = cost_of(2, 2, 1, 2, 1, 2).layout.profile
    assert (same.rank_slowness, same.replica_slowness) == ((1, 2), ())
    alike = cost_of(2, 2, 3, 3, 3, 3).layout.profile
    assert alike == named_cost("llama3-8b", "h100-80g", pp=2, dp=2, cp=8).layout.profile
    cost = cost_of(2, 3, 1, 1, 1, 1.5, 1, 1)
    assert cost.of_replicas(1).layout.profile.rank_slowness == (1, 1.5)
    assert cost.of_replicas(0) is cost.of_replicas(2)
    assert cost.of_replicas(0, 2).layout.profile.rank_slowness == (1, 1.5)  # in lockstep


def work(lengths: list[int], cost, replicas: int) -> list[float]:
    """Seconds of each replica's documents, as of devices that are alike."""
    rates = rates_of(cost)
    dealt = divide_documents(lengths, cost, OPTIONS, replicas, "epp")
    assert sorted(document for held in dealt for document in held) == [*range(len(lengths))]
    seconds = rates.document_seconds(np.array(lengths))
    return [float(seconds[list(held)].sum()) for held in dealt]


def test_documents_follow_the_speed_of_replicas() -> None:
    alike = work(LENGTHS, cost_of(1, 4), 4)
    assert max(alike) < 1.1 * min(alike)
    slow = work(LENGTHS, cost_of(1, 4, 1, 1, 2, 1), 4)
    assert slow[2] == pytest.approx(sum(slow) / 7, rel=0.1)  # half of what each other one has
    assert work([900, 800], cost_of(1, 3, 1, 3, 1), 3)[1] == 0  # none, where it would be last
    with pytest.raises(ValueError, match="measured on 4 replicas whose devices differ, and there"):
        work(LENGTHS, cost_of(1, 4, 1, 1, 2, 1), 2)


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_slow_replicas_plan_is_its_own_and_the_step_is_faster(replicas: int) -> None:
    cost = cost_of(2, replicas, *(1, 1) * (replicas - 1), 1, 2)
    step = plan_step(LENGTHS, cost, OPTIONS, "epp", replicas)
    alike = divide_documents(LENGTHS, cost_of(2, replicas), OPTIONS, replicas, "epp")
    held = [LENGTHS[document] for document in alike[-1]]
    (as_if_alike,) = plan_step(held, cost.of_replicas(replicas - 1), OPTIONS).planned
    seconds = [planned.seconds for planned in step.planned]
    assert max(seconds) < 0.85 * as_if_alike.seconds
    part = plan_part(LENGTHS, cost, OPTIONS, "epp", replicas, replicas - 1)
    assert part.plans[0].predicted.seconds == pytest.approx(seconds[-1])


def test_which_ranks_form_a_pipeline_is_the_simulators_choice() -> None:
    """Of four devices two are slow: at different stages of two replicas they slow down both."""
    apart = cost_of(2, 2, 1, 2, 2, 1)
    in_one_replica = cost_of(2, 2, 1, 1, 2, 2)
    on_one_stage = cost_of(2, 2, 1, 2, 1, 2)
    taken = {
        by_time: [
            unlike_seconds(cost, [LENGTHS], OPTIONS, "epp", by_time)
            for cost in (apart, in_one_replica, on_one_stage)
        ]
        for by_time in (False, True)
    }
    assert taken[False][1] < 0.85 * min(taken[False][0], taken[False][2])
    assert taken[True][2] < 0.85 * taken[True][0]  # the slow stage has fewer layers
    assert taken[True][2] < taken[False][2]


def test_by_the_command_line(tmp_path: Path, capsys) -> None:
    file, out = tmp_path / "cost.json", tmp_path / "a.step"
    words = ["plan", "--lengths", str(tmp_path / "lengths"), "--model", "llama3-8b", "--context"]
    words += [
        "32768",
        "--device",
        "h100-80g",
        "--pp",
        "1",
        "--cp",
        "8",
        "--dp",
        "2",
        "--effort",
        "0",
    ]
    words += ["--cost-model", str(file), "-o", str(out), "--global-batch-size", str(len(LENGTHS))]
    (tmp_path / "lengths").write_text("\n".join(map(str, LENGTHS)))
    tokens = {}
    for slowness in ((1, 1), (1, 2)):
        profile = cost_of(1, 2, *slowness).layout.profile
        profile.save(str(file))
        assert main(words) == 0
        plans = Step.parse(out.read_text()).plans
        tokens[slowness] = [sum(plan.documents) for plan in plans]
    assert tokens[1, 1][1] > 0.8 * tokens[1, 1][0]
    assert tokens[1, 2][1] < 0.7 * tokens[1, 2][0]
    capsys.readouterr()
    assert main([*words, "--dp", "4"]) == 2
    assert "measured on 2 replicas whose devices differ" in capsys.readouterr().err
