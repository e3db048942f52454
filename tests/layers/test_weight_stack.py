"""Experts as one product over a stack of their weights: rows and gradients of each expert."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_epp.layers.moe.weight_stack import (
    WeightStack,
    distance,
    move_together,
    reported,
    row_ends,
)

N, K = 5, 3
COUNTS = (4, 0, 7, 2)  # rows of experts 0, 1, 2, 3


def in_a_buffer(
    count: int, gap: int = 0, dtype: torch.dtype = torch.float64, shape: tuple[int, int] = (N, K)
) -> list[Tensor]:
    """Tensors of a buffer in Megatron's order, from the last to the first, ``gap`` apart."""
    size = shape[0] * shape[1]
    buffer = torch.randn(count * (size + gap) + 9, dtype=dtype)
    starts = [9 + (count - 1 - index) * (size + gap) for index in range(count)]
    return [buffer[start : start + size].view(shape) for start in starts]


def stacked(gap: int = 0, dtype: torch.dtype = torch.float64, shape=(N, K)) -> WeightStack:
    weights = [Parameter(each) for each in in_a_buffer(len(COUNTS), gap, dtype, shape)]
    made = torch.float32 if dtype == torch.bfloat16 else dtype
    for weight, total in zip(weights, in_a_buffer(len(COUNTS), gap, made, shape), strict=True):
        weight.main_grad = total.zero_()
    return WeightStack(weights)


def by_expert(rows: Tensor, counts: Sequence[int] = COUNTS) -> list[Tensor]:
    """The rows of experts 0, 1, ..., of rows in the order of a stack."""
    return list(reversed(rows.split(list(reversed(counts)))))


def ends(counts: Sequence[int] = COUNTS) -> Tensor:
    return row_ends(torch.tensor(list(reversed(counts))))


@pytest.mark.parametrize("gap", [0, 2])
def test_every_expert_has_its_own_rows_and_gradient(gap: int) -> None:
    torch.manual_seed(0)
    stack = stacked(gap)
    rows = torch.randn(sum(COUNTS), K, dtype=torch.float64, requires_grad=True)
    answer = torch.randn(sum(COUNTS), N, dtype=torch.float64)
    reports: list[Sequence[Parameter]] = []
    stack.report = reports.append
    for _ in range(2):  # the second adds to what the first left
        rows.grad = None
        output = stack(reported(rows, [stack]), ends())
        output.backward(answer)
    assert reports == [stack.weights] * 2
    mine = zip(by_expert(rows), by_expert(output), by_expert(answer), strict=True)
    for weight, (x, y, dy) in zip(stack.weights, mine, strict=True):
        torch.testing.assert_close(y, x @ weight.t(), rtol=0, atol=1e-14)
        torch.testing.assert_close(weight.main_grad, 2 * dy.t() @ x, rtol=0, atol=1e-13)
        assert weight.grad is None
    expected = [dy @ w for dy, w in zip(by_expert(answer), stack.weights, strict=True)]
    torch.testing.assert_close(rows.grad, torch.cat(expected[::-1]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_ranks_without_rows_add_nothing_but_report(dtype: torch.dtype) -> None:
    stack = stacked(8, dtype, (24, 16))
    reports: list[Sequence[Parameter]] = []
    stack.report = reports.append
    rows = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
    output = stack(reported(rows, [stack]), ends((0, 0, 0, 0)))
    output.backward(torch.zeros(0, 24, dtype=dtype))
    assert output.shape == (0, 24) and rows.grad.shape == (0, 16)
    assert not any(weight.main_grad.any() for weight in stack.weights)
    assert reports == [stack.weights]


def test_rows_that_need_no_gradient_would_lose_the_weights() -> None:
    stack, rows = stacked(), torch.zeros(sum(COUNTS), K, dtype=torch.float64)
    with torch.no_grad():
        stack(rows, ends())
    with pytest.raises(AssertionError, match="no gradient"):
        stack(rows, ends())


def test_gradients_are_lent_where_no_ddp_has_made_them() -> None:
    weights = [Parameter(each) for each in in_a_buffer(len(COUNTS))]
    stack = WeightStack(weights)
    assert list(map(id, stack.lend_gradients())) == list(map(id, weights))
    rows = torch.ones(sum(COUNTS), K, dtype=torch.float64, requires_grad=True)
    stack(rows, ends()).sum().backward()
    assert [float(weight.main_grad[0, 0]) for weight in weights] == list(COUNTS)
    assert stack.lend_gradients() == ()


def test_only_equal_distances_from_the_last_to_the_first_are_a_stack() -> None:
    tensors = in_a_buffer(4, 2)
    assert distance(tensors) == N * K + 2
    assert distance(tensors[::-1]) is None  # from the first to the last
    assert distance([tensors[0], tensors[1], tensors[3]]) is None  # a gap
    assert distance([*tensors[:3], torch.zeros(N, K, dtype=torch.float64)]) is None
    assert distance([each.t() for each in tensors]) is None


def test_weights_apart_move_together_and_stay_what_they_are() -> None:
    weights = [Parameter(torch.randn(N, K)) for _ in range(4)]
    values = [weight.detach().clone() for weight in weights]
    assert distance([weight.data for weight in weights]) is None
    move_together(weights)
    assert distance([weight.data for weight in weights]) == N * K
    assert all(map(torch.equal, weights, values))
    stack = WeightStack(weights)
    assert torch.equal(stack.weights_ENK, torch.stack(values[::-1]))
    weights[0].data = torch.zeros(N, K)
    with pytest.raises(AssertionError, match="were moved"):
        _ = stack.weights_ENK
