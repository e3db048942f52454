"""Loops of four ranks: replicas that meet in their ops, and groups that are made anew."""

from random import Random

import numpy as np
import pytest

from megatron_epp.ir import COMPUTE, lower_rank
from megatron_epp.planner.calls.call_options import AS_CALLED, CallOptions
from megatron_epp.planner.calls.call_plan import unsliced_plan
from megatron_epp.planner.calls.microbatch import MicrobatchShape

pytestmark = pytest.mark.everything

RANKS = 4


def test_experts_over_replicas_meet_in_the_same_ops(answers) -> None:
    """Stood still in the third call: backwards were split where one replica's lengths asked."""
    found = [answer["experts over replicas"] for answer in answers]
    assert max(one["worst"] for one in found) < 1e-12
    assert all(one["losses equal"] for one in found)
    by_1f1b = [
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        " ".join(f"F{n} B{n}" for n in range(8)),
    ]
    assert [one["orders"] for one in found] == [[by_1f1b[rank // 2]] * 4 for rank in range(4)]


def test_links_speak_again_where_groups_were_made_anew(answers) -> None:
    """Twice all groups but the world, then the world, and with it groups of ours: two ranks that
    first speak make a communicator, which is no work for the midst of a plan."""
    found = [answer["groups made anew"] for answer in answers]
    assert max(one["worst"] for one in found) < 1e-12
    assert all(one["losses equal"] and len(one["orders"]) == 4 for one in found)
    assert [one["late"] for one in found] == [0] * 4


def test_replicas_that_meet_have_one_program_whatever_their_lengths() -> None:
    """Where an op waits for another replica's, so must each message before it."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.loops.replica.replica_plans import counted

    random, rates = Random(1), np.ones((4, len(COMPUTE), 3))
    free, together = set(), set()
    for _ in range(6):
        shapes = [MicrobatchShape(max(1, int(random.lognormvariate(7, 1)))) for _ in range(8)]
        plan = unsliced_plan(shapes, (2,) * 4, rates, CallOptions(False, False), False)
        assert plan.predicted is not None and plan.predicted.planner == AS_CALLED
        free.add(tuple(lower_rank(plan, stage) for stage in range(4)))
        together.add(tuple(lower_rank(plan, stage, (counted(plan),)) for stage in range(4)))
    assert len(together) == 1 < len(free)


def test_a_replica_that_misreads_leaves_none_waiting(answers) -> None:
    """Its call runs once more before anything of it was reduced; the other replica's plans go on.
    Of five calls two show the shapes; gradients are those of both replicas."""
    found = [answer["misread on a replica"] for answer in answers]
    assert all(each["worst"] < 1e-12 for each in found)
    assert [each["plans"] for each in found] == [3, 0, 3, 0]
    assert [len(each["said"]) for each in found] == [0, 1, 0, 0]
    assert "ms-swift lays out otherwise: micro-batch 3 was read as (" in found[1]["said"][0]


def test_a_framework_is_not_read_where_replicas_meet_in_ops(answers) -> None:
    """What was misread there would leave the other replicas waiting for ops."""
    found = [answer["read, in lockstep"] for answer in answers]
    assert all(each["worst"] < 1e-12 and each["plans"] == 0 for each in found)
    (said,) = found[0]["said"]
    assert "ops that meet other replicas', on rows read as ms-swift's" in said
