"""Plans of interleaved calls: Megatron's own order, and orders of whole micro-batches that pay."""

from random import Random

import numpy as np
import pytest

from megatron_epp.ir import Kind, check
from megatron_epp.planner.calls.call_cost import CallChunks, token_table
from megatron_epp.planner.calls.call_options import AS_CALLED, PLANNED, CallOptions
from megatron_epp.planner.calls.call_plan import unsliced_plan
from megatron_epp.planner.calls.interleaved import call_turns
from megatron_epp.planner.calls.microbatch import MicrobatchShape
from megatron_epp.planner.order.compiled import B, F
from megatron_epp.sim.play import play
from tests.planner.calls.test_group_order import extents, rates


@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (2, 3), (4, 2), (4, 3)])
def test_the_given_order_is_that_of_megatrons_schedule(ranks: int, parts: int) -> None:
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    for chunks in (ranks, 3 * ranks):
        order = get_schedule_table(chunks, parts, ranks)
        for rank, ran in enumerate(call_turns(chunks, ranks, ranks * parts, False)):
            forwards = [(chunk, stage // ranks) for kind, chunk, stage in ran if kind == F]
            backwards = [(chunk, stage // ranks) for kind, chunk, stage in ran if kind == B]
            assert forwards == list(order)
            assert backwards == [(chunk, parts - 1 - part) for chunk, part in order]
            kinds = [kind for kind, *_ in ran]
            warm = min(2 * (ranks - rank - 1) + (parts - 1) * ranks, chunks * parts)
            steady = chunks * parts - warm
            assert kinds == [F] * warm + [F, B] * steady + [B] * warm


def test_any_number_of_micro_batches_runs() -> None:
    for ranks, parts in ((2, 2), (4, 3), (8, 2)):
        stages = ranks * parts
        for count in range(1, 2 * ranks + 2):
            for forward_only in (False, True):
                made = unsliced_plan(
                    extents([10] * count), (1,) * stages, rates(stages), CallOptions(False, False),
                    forward_only, ranks,
                )  # fmt: skip
                check(made)
                assert made.predicted is not None and made.predicted.planner == AS_CALLED


@pytest.mark.parametrize("split", [False, True])
def test_planned_orders_hold_no_more_and_take_less(split: bool) -> None:
    random, planned = Random(1), 0
    for _ in range(12):
        ranks, parts = random.choice(((2, 2), (4, 2), (2, 3)))
        stages = ranks * parts
        tokens = [
            random.choice((100, 300, 1000, 4000)) for _ in range(random.randint(2, 6 * ranks))
        ]
        shapes, layers = extents(tokens), (1,) * stages
        same = CallOptions(False, False)
        given = unsliced_plan(shapes, layers, rates(stages), same, False, ranks)
        made = unsliced_plan(shapes, layers, rates(stages), CallOptions(True, split), False, ranks)
        check(made)
        halved = any(op.kind is Kind.WEIGHT for order in made.orders for op in order)
        assert split or not halved
        table = _table(shapes, stages)
        peaks = [play(plan, table).peak_bytes for plan in (given, made)]
        assert (np.array(peaks[1]) <= np.array(peaks[0]) * (1 + 1e-9)).all()
        assert given.predicted is not None and made.predicted is not None
        if made.predicted.planner == PLANNED:
            planned += 1
            assert made.predicted.seconds < 0.985 * given.predicted.seconds
            assert made.predicted.seconds == pytest.approx(play(made, table).seconds)
        else:
            assert made == given
    assert planned >= 3, planned


def _table(shapes: list[MicrobatchShape], stages: int):
    tokens = [shape.tokens for shape in shapes]
    call = CallChunks.of([[[(number, 0, count)]] for number, count in enumerate(tokens)], tokens)
    return token_table(call, rates(stages))
