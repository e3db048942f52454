"""Attention of chunks against a naive softmax over whole documents, forward and backward."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from megatron_epp.ir import Span
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.layers.attention.cpu import _contexts
from megatron_epp.layers.attention.cpu_flash import attend, attend_backward
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.runtime.kv_store import Store
from tests.layers.runner import (
    NAMES,
    ROWS,
    SCALE,
    Documents,
    Dropping,
    Runner,
    Varlen,
    distances,
    documents,
    naive,
    plan_of,
    require_exact,
    sliced_plan,
)

RUNNERS = (Runner, Varlen, Dropping)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("kind", ROWS)
def test_every_kind_of_row(kind, heads, groups, multiple, runner) -> None:
    plan = ROWS[kind]
    given = documents(plan.documents, heads, groups, torch.float64)
    require_exact(runner, plan, given, multiple)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("seed", range(40))
def test_arbitrary_plans_with_recompute(seed, runner) -> None:
    random = Random(seed)
    lengths = tuple(random.randint(1, 30) for _ in range(random.randint(1, 5)))
    plan = arbitrary_plan(lengths, (1,), random)
    given = documents(lengths, 4, 2, torch.float64, seed)
    require_exact(runner, plan, given, random.choice((1, 4)))


@pytest.mark.parametrize("runner", RUNNERS)
def test_evaluation_frees_with_the_last_slice(runner) -> None:
    plan = plan_of((23, 6), ["0[0:8]", "0[8:9] 1[0:6]", "0[9:23]"], "F0 F1 F2")
    given = documents(plan.documents, 2, 1, torch.float64)
    with torch.no_grad():
        results = runner(plan, given).run()
    expected = naive(given)
    assert all((a[0] - b[0]).abs().max() < 1e-14 for a, b in zip(results, expected, strict=True))


def test_a_lone_slice_saves_no_keys_and_values_twice() -> None:
    """Its rows are in the store; a chunk of several spans cannot point there."""
    for chunks, expected in (
        (["0[0:6]", "0[6:11]"], 3),  # q, out, log-sum-exp
        (["0[0:6] 1[0:4]", "0[6:11]"], 5),  # and k, v
    ):
        lengths = (11, 4)[: len(chunks[0].split())]
        given = documents(lengths, 2, 1, torch.float64)
        runner = Runner(plan_of(lengths, chunks, "F0 F1 B1 B0"), given)
        assert len(runner.forward(0).out.grad_fn.saved_tensors) == expected


# ------------------------------------------------------------------ rounding


def plain_kernel(given: Documents) -> list[tuple[Tensor, ...]]:
    """The same kernel on whole documents."""
    results = []
    for q, k, v, grad in given:
        out, lse = attend(q, k, v, True, SCALE)
        results.append((out, *attend_backward(grad, q, k, v, out, lse, True, SCALE)))
    return results


@pytest.mark.parametrize("runner", [Runner, Varlen])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slices", [1, 2, 5, 16])
def test_rounding_is_at_most_twice_the_plain_kernels(dtype, slices, runner) -> None:
    """Gradients of slices add up in float32: the error does not grow with their number."""
    plan = sliced_plan(320, slices)
    given = documents(plan.documents, 4, 2, dtype)
    whole = plain_kernel(given) if runner is Runner else runner(sliced_plan(320, 1), given).run()
    expected = naive(given)
    ours, plain = (distances(results, expected) for results in (runner(plan, given).run(), whole))
    for name in NAMES:
        assert ours[name] <= 2 * plain[name], (name, ours, plain)


def test_a_whole_document_is_bit_equal_to_the_plain_kernel() -> None:
    given = documents((37,), 4, 2, torch.bfloat16)
    (ours,) = Runner(plan_of((37,), ["0[0:37]"], "F0 B0"), given).run()
    (plain,) = plain_kernel(given)
    assert all(map(torch.equal, ours, plain))


def test_consecutive_documents_attend_to_what_they_share_at_once() -> None:
    """Document 1 continues 0, the others continue both; 4 continues another part of 0."""
    both = (Span(0, 0, 5), Span(1, 0, 3))
    prefixes = {1: both[:1], 2: both, 3: both, 4: (Span(0, 0, 2),)}
    rows = [Rows(2 * d - 2, 2 * d, Span(d, 0, 2), False, True, of) for d, of in prefixes.items()]
    rows[0] = replace(rows[0], span=Span(1, 1, 3))  # a second slice
    state = ChunkState(0, tuple(rows), 8, "k", Store({}))
    assert _contexts(state) == [
        (slice(0, 6), 0, 5), (slice(0, 2), 1, 1), (slice(2, 6), 1, 3), (slice(6, 8), 0, 2)
    ]  # fmt: skip
