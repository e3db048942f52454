"""By the cost model, `epp` is never slower than a schedule that a training could run instead."""

from dataclasses import replace
from random import Random

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import PlanError
from megatron_epp.planner.choose.choice import PLACEMENT_NAMES, placed_cost
from megatron_epp.planner.options import TRAINING_LEVERS, Options
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.replicas import plan_step

MODELS = {
    "llama3-8b": "h100-80g",
    "llama3-70b": "h200-141g",
    "gpt-7b": "a100-40g",
    "qwen3-30b-a3b": "h100-80g",
    "nemotron-h-8b": "h100-80g",
}
ALWAYS_SPLIT = ("adaptis", "zb-v")
# Over several replicas or groups, each planner divides the documents by its own times.
ALONE, TOGETHER = 1.001, 1.005


def job(random: Random) -> tuple[tuple[int, ...], Cost, Options, int]:
    """Draw documents, a machine, levers and effort, and a number of replicas."""
    while True:
        name = random.choice(list(MODELS))
        pp, tp, cp = random.choice((1, 2, 3, 4, 8)), random.choice((2, 4, 8)), random.choice((1, 2))
        lockstep = random.choice((1, 1, 2)) if name == "qwen3-30b-a3b" else 1
        dp = lockstep * random.choice((1, 1, 2))
        ep = {"ep": tp * cp * lockstep} if name == "qwen3-30b-a3b" else {}
        degrees = {"pp": pp, "tp": tp, "cp": cp, "dp": dp, **ep}
        try:
            cost = named_cost(name, MODELS[name], zero=1, logits_held=False, **degrees)
        except ValueError:  # model states do not fit, or degrees do not divide the model
            continue
        placement = random.choice(("even", "even", *PLACEMENT_NAMES)) if pp > 1 else "even"
        placed = cost if placement == "even" else placed_cost(cost, placement)
        if placed is None:
            continue
        if pp > 1 and lockstep == 1:
            placed = placed.with_vocabulary(random.random() < 0.3)
        states = placed.states_of_ranks
        rooms = [b - s for b, s in zip(placed.device_budget_bytes, states, strict=True)]
        if min(rooms) <= 0:
            continue
        share = random.choice((1.0, 1.0, 0.3, 0.1))
        budgets = tuple(s + share * r for s, r in zip(states, rooms, strict=True))
        documents = dp * random.randint(1, 24)
        lengths = tuple(
            min(65_536, max(16, int(random.lognormvariate(8, 1.3)))) for _ in range(documents)
        )
        levers = TRAINING_LEVERS - (set() if random.random() < 0.7 else {"wsplit"})
        options = Options(65_536, levers, effort=random.choice((0, 0, 4)), lockstep=lockstep)
        return lengths, placed.replace(device_budget_bytes=budgets), options, dp


def seconds_of(
    planner: str, lengths: tuple[int, ...], cost: Cost, options: Options, replicas: int
) -> float | None:
    """Return the seconds of the step; None if a plan does not fit."""
    try:
        step = plan_step(lengths, cost, options, planner, replicas)
    except PlanError:
        return None
    return step.seconds if all(each.fits for each in step.planned) else None


def require_never_slower(seed: int) -> None:
    lengths, cost, options, replicas = job(Random(seed))
    ours = seconds_of("epp", lengths, cost, options, replicas)
    most = ALONE if replicas == options.lockstep else TOGETHER
    for name, row in PLANNERS.items():
        if not row.takes(cost.layout.placement.place):
            continue
        if name in ALWAYS_SPLIT and "wsplit" not in options.levers:
            continue
        theirs = seconds_of(name, lengths, cost, options, replicas)
        if theirs is not None:
            assert ours is not None, (seed, name)
            assert ours <= theirs * most, (seed, name, ours / theirs)


@pytest.mark.parametrize("seeds", [range(at, at + 5) for at in range(0, 20, 5)], ids=str)
def test_never_slower(seeds: range) -> None:
    for seed in seeds:
        require_never_slower(seed)


@pytest.mark.everything
@pytest.mark.parametrize("seeds", [range(at, at + 20) for at in range(20, 200, 20)], ids=str)
def test_never_slower_on_many_jobs(seeds: range) -> None:
    for seed in seeds:
        require_never_slower(seed)


def test_documents_are_divided_again_if_a_replica_finds_no_plan() -> None:
    """The first division gives the longest document's replica too many others for its memory."""
    lengths, cost, options, replicas = job(Random(100))
    with pytest.raises(PlanError, match="no plan fits: pipeline rank 0"):
        plan_step(lengths, cost, replace(options, effort=0), "epp", replicas)
    assert seconds_of("epp", lengths, cost, options, replicas) is not None
