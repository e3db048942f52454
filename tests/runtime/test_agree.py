"""All ranks run one plan, or none does."""

import socket
from random import Random
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from tests.runtime.world import run

TEXT = "plan v1 with an umlaut: ü\n" * 300


def several(rank: int) -> dict[str, Any]:
    """What each exchange does on this rank, one case after the other."""
    from megatron_epp.control.accept import AcceptedSteps
    from megatron_epp.control.step_source import SourcedStep
    from megatron_epp.ir import PlanError, Step
    from megatron_epp.ir.random_plan import arbitrary_plan
    from megatron_epp.runtime.consensus import broadcast_text, require_same
    from megatron_epp.runtime.executor import CurrentOp

    group, lengths = dist.group.WORLD, [8]
    step = Step(((0,),), (arbitrary_plan(lengths, (1,), Random(0)),))
    groups = SimpleNamespace(control=group, pipeline_ranks=(0,), replica=0, replicas=1, lockstep=1)

    def agreed(text: str, iteration: int, group: Any) -> str:
        """Accept a step of which this rank says ``text``."""
        source = SimpleNamespace(step=lambda *_: SourcedStep(step, text))
        steps = AcceptedSteps(source, groups, (1,), CurrentOp(0))
        return str(steps.step(iteration, lengths, None, False).tokens)

    def compared(**facts: str) -> str | None:
        try:
            return require_same(facts, group, "one folder")
        except ValueError as error:
            return str(error)

    def told(function, *arguments) -> str | None:
        try:
            return function(*arguments, group)
        except PlanError as error:
            return f"PlanError: {error}"

    return {
        "shared": told(broadcast_text, TEXT if rank == 0 else None, None),
        "empty": told(broadcast_text, "" if rank == 0 else None, None),
        "refused": told(broadcast_text, None, "no plan for you" if rank == 0 else None),
        "shared again": told(broadcast_text, "next" if rank == 0 else None, None),
        "agreed": told(agreed, TEXT, 1),
        "one differs": told(agreed, "other" if rank == 2 else TEXT, 2),
        "two differ": told(agreed, TEXT if rank == 0 else f"mine {rank}", 3),
        "agreed again": told(agreed, TEXT, 4),
        "same": compared(load="iteration 7", tokenizer="digest 1"),
        "one sees another": compared(load="iteration 7" if rank != 2 else "no checkpoint"),
        "two lack it": compared(**({"cache": "there"} if rank == 0 else {})),
    }


def test_what_every_rank_hears(tmp_path) -> None:
    heard = run(3, several, tmp_path)
    assert heard[0] == heard[1] == heard[2]  # also the errors: nobody is left waiting
    one = heard[0]
    assert one["shared"] == TEXT
    assert one["empty"] == ""
    assert one["refused"] == "PlanError: no plan for you"
    assert one["shared again"] == "next"
    assert one["agreed"] == one["agreed again"] == "8"
    host = socket.gethostname()
    assert one["one differs"].startswith(f"PlanError: iteration 2: rank 2 on {host}: digest ")
    assert "expected the same plan everywhere" in one["one differs"]
    assert one["two differ"].startswith(f"PlanError: iteration 3: ranks 1 2 on {host}: digest ")
    assert one["same"] is None
    assert one["one sees another"] == (
        f"load: rank 2 on {host}: no checkpoint; rank 0 on {host}: iteration 7; expected one folder"
    )
    assert one["two lack it"].startswith(f"cache: ranks 1 2 on {host}: nothing; rank 0 on {host}: ")
