"""Steps of which every replica's ranks hold their own part: what they exchange, what all refuse."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_epp.control.recorded_steps import RecordedSteps
from megatron_epp.ir import PlanError, Step, StepPart
from megatron_epp.planner.options import Options
from megatron_epp.planner.replicas import plan_step
from tests.planner.cases import machine
from tests.runtime.world import run

LENGTHS = [3000, 40, 900, 17, 2000, 5]
LAYERS = (16, 16)


def made(lengths: list[int], replicas: int) -> Step:
    cost = machine(pp=2)
    return plan_step(lengths, cost, Options(effort=0), "packing", replicas).step


def test_a_part_is_text_and_back() -> None:
    step = made(LENGTHS, 3)
    parts = [step.part(replica) for replica in range(3)]
    assert Step.of_parts(parts) == step
    for replica, part in enumerate(parts):
        named = StepPart(part.assignments, part.plans, "5eed")
        assert StepPart.parse(str(named)) == named and StepPart.parse(str(part)) == part
        assert (part.first, part.replicas, part.lockstep) == (replica, 3, 1)
        assert part.plan_of(replica) == step.plans[replica]
        assert part.documents_of(replica) == step.assignments[replica]
        assert str(named).count("plan v1") == 1
    for text in (str(step), str(named).replace("5eed", "what"), f"{named}{step.plans[0]}"):
        with pytest.raises(ValueError):
            StepPart.parse(text)


# ------------------------------------------------------------------ over three ranks


class Given:
    """Gives this rank ``sourced``, or raises it."""

    def __init__(self, sourced: Any):
        self.sourced = sourced

    def step(self, iteration, lengths, forward_only):
        if isinstance(self.sourced, ValueError):
            raise self.sourced
        return self.sourced

    def look_ahead(self, iteration, following) -> None: ...


def several(rank: int) -> dict[str, Any]:
    """What every rank makes of cases in which some have another step, or none."""
    import torch.distributed as dist

    from megatron_epp.control.accept import AcceptedSteps
    from megatron_epp.control.step_source import Planning, SourcedStep
    from megatron_epp.ir import PlanError
    from megatron_epp.runtime.executor import CurrentOp

    step, other = made(LENGTHS, 3), made(LENGTHS[::-1], 3)
    groups = SimpleNamespace(
        control=dist.group.WORLD, replica=rank, replicas=3, lockstep=1, pipeline_ranks=(0, 1)
    )

    def parted(whole: Step, division: str = "5eed", **planning: Any) -> SourcedStep:
        part = StepPart(whole.part(rank).assignments, whole.part(rank).plans, division)
        return SourcedStep(part, str(part), planning=Planning(**planning))

    def accepted(sourced: Any, layers: tuple[int, ...] = LAYERS) -> Any:
        steps = AcceptedSteps(Given(sourced), groups, layers, CurrentOp(0))
        try:
            found = steps.step(4, LENGTHS, None, False)
        except PlanError as error:
            return f"PlanError: {error}"
        planning = found.planning
        return (
            *(found.tokens, found.predicted_seconds, found.predicted_peak_bytes),
            *(planning.waited_seconds, planning.ahead, planning.discarded),
        )

    fine = parted(step)
    return {
        "parts": accepted(parted(step, waited_seconds=0.5 * rank, ahead=3 - rank, discarded=rank)),
        "no plan": accepted(ValueError(f"no plan for {rank}") if rank else fine),
        "refused": accepted(fine, LAYERS if rank != 1 else (3, 1)),
        "both": accepted(ValueError("none") if rank == 2 else fine, (3, 1)),
        "divided otherwise": accepted(parted(step, "5eed" if rank != 1 else "0dd")),
        "other documents": accepted(parted(other) if rank == 2 else fine),
        "whole": accepted(SourcedStep(step, str(step))),
        "whole differs": accepted(
            SourcedStep(other if rank == 1 else step, str(other if rank == 1 else step))
        ),
        "and again": accepted(fine),
    }


def test_a_refusal_of_one_is_everybodys(tmp_path) -> None:
    heard = run(3, several, tmp_path)
    assert heard[0] == heard[1] == heard[2]  # nobody is left waiting, and all say the same
    one = heard[0]
    predicted = [plan.predicted for plan in made(LENGTHS, 3).plans]
    seconds = max(each.seconds for each in predicted)
    peaks = tuple(max(peak) * 2**30 for peak in zip(*(p.peak_gib for p in predicted), strict=True))
    facts = (sum(LENGTHS), seconds, peaks)
    assert one["parts"] == (*facts, 1.0, 3, 2)
    assert one["whole"] == one["and again"] == (*facts, 0.0, 0, 0)
    assert one["no plan"] == "PlanError: no plan for 1"
    assert one["refused"].startswith("PlanError: the plan is for 2 stages of 16 16 layers; ")
    assert one["both"] == "PlanError: none"  # who has no step comes before who cannot run it
    for case in ("divided otherwise", "whole differs"):
        assert re.match(r"PlanError: iteration 4: rank 1 on \S+: digest ", one[case])
    assert "document" in one["other documents"] and "PlanError" in one["other documents"]


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_a_rank_hears_little_of_other_replicas(replicas, monkeypatch) -> None:
    """Of every exchange, the bytes: over all ranks a few numbers, the plan within a replica."""
    import torch.distributed as dist

    from megatron_epp.control.accept import AcceptedSteps
    from megatron_epp.control.planned_steps import PlannedSteps
    from megatron_epp.runtime.executor import CurrentOp

    lengths = [7 * (n % 31) + 3 for n in range(4 * replicas)]
    heard: dict[str, list[bytes]] = {"control": [], "block": []}

    def hear(tensor, *_, group, **__) -> None:
        heard[group.name].append(tensor.numpy().tobytes())

    def hear_objects(objects, *_, group, **__) -> None:
        heard[group.name].append(str(objects[0][0]).encode())

    monkeypatch.setattr(dist, "all_reduce", hear)
    monkeypatch.setattr(dist, "broadcast_object_list", hear_objects)
    replica = replicas - 1
    control, block = (SimpleNamespace(name=name, rank=lambda: 0, size=lambda: 2) for name in heard)
    groups = SimpleNamespace(
        control=control, planned_together=block, block=block, planner=0, plans=True,
        pipeline_ranks=(0, 1), replica=replica, replicas=replicas, lockstep=1,
    )  # fmt: skip
    cost = machine(pp=2)
    steps = PlannedSteps(cost, Options(effort=0), "packing", groups, 0)
    found = AcceptedSteps(steps, groups, LAYERS, CurrentOp(0)).step(1, lengths, None, False)
    assert [plan.replica for plan in found.plans] == [replica]
    of_all = b"".join(heard["control"])
    assert b"plan" not in of_all and len(of_all) == 88  # the same for any number of replicas
    if replicas >= 8:
        assert len(of_all) <= 8 * len(lengths)
    text = b"".join(heard["block"])
    assert text.count(b"plan v1") == 1 and text.count(b"deal ") == 1


def test_a_recorded_step_that_cannot_be_read_is_a_verdict(tmp_path: Path) -> None:
    """Only a ValueError is agreed on; after another error, the other ranks would wait."""
    (tmp_path / "iteration-000001.step").mkdir()
    with pytest.raises(PlanError, match=r"iteration-000001\.step: .*[Dd]irectory"):
        RecordedSteps(str(tmp_path)).step(1, (), False)
