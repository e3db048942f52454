"""Kernels' stand-ins: what backward makes grows with rows, not with sequences times rows."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_epp.layers.ssm.scans import gated_delta_rule
from megatron_epp.mcore.patching.cpu_kernels import (
    causal_conv1d,
    chunk_gated_delta_rule,
    mamba_split_conv1d_scan_combined,
)

ROWS = 2048


class Made(TorchDispatchMode):
    """Counts elements of the tensors that ops make."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.elements += made.numel()
        return made


def _mamba(lengths: list[int]) -> torch.Tensor:
    heads, size, states = 2, 8, 8
    inner = heads * size
    convolved = inner + 2 * states
    rows = torch.randn(1, ROWS, inner + convolved + heads, requires_grad=True)
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    return mamba_split_conv1d_scan_combined(
        rows,
        torch.randn(convolved, 4),
        None,
        torch.zeros(heads),
        -torch.ones(heads),
        torch.ones(heads),
        128,
        seq_idx=numbers.int(),
        headdim=size,
    )


def _delta(lengths: list[int]) -> torch.Tensor:
    q, k, v = (torch.randn(1, ROWS, 2, 8, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(1, ROWS, 2), torch.rand(1, ROWS, 2)
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    return chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=boundaries)[0]


def _conv(lengths: list[int]) -> torch.Tensor:
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randn(1, ROWS, 16, requires_grad=True)
    return causal_conv1d(rows, torch.randn(16, 4), cu_seqlens=boundaries)[0]


def _rule(rows: int) -> torch.Tensor:
    q, k, v = (torch.randn(rows, 2, 8, requires_grad=True) for _ in range(3))
    g, beta = -torch.rand(rows, 2, 1), torch.rand(rows, 2)
    return gated_delta_rule(q, k, v, g, beta, 1.0, None)[0]


def made(output: torch.Tensor) -> int:
    """Elements that the backward of ``output`` makes."""
    with Made() as counted:
        output.sum().backward()
    return counted.elements


@pytest.mark.parametrize("kernel", [_mamba, _delta, _conv])
def test_many_sequences_make_about_what_one_makes(kernel) -> None:
    assert made(kernel([ROWS // 32] * 32)) < 1.5 * made(kernel([ROWS]))


def test_the_delta_rule_makes_as_much_for_every_row() -> None:
    """Of one sequence: blocks of it are not zeros of the whole each."""
    assert made(_rule(4096)) < 5 * made(_rule(1024))
