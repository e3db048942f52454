"""Replacements of GPU kernel packages that Megatron's SSM and linear-attention layers import.

mamba_ssm, causal_conv1d and flash-linear-attention cannot run on a CPU-only host, and Megatron's
classes cannot be built without them. So this module installs modules with the same names. Their
functions compute the results in torch (layers/ssm/scans.py), and Megatron's own classes run
unchanged. Only arguments that Megatron or this package passes are supported; other arguments
raise a TypeError.

As in mamba_ssm's fused kernel, backward recomputes a kernel's forward, so a layer saves about as
many bytes as on a GPU. ``Tensor.split`` cuts the rows into sequences, because its backward
concatenates gradients. The backward of slicing would fill a zero tensor of all rows for every
sequence.
"""

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_epp.layers.recompute.outputs import recomputable_all
from megatron_epp.layers.ssm.scans import causal_conv, gated_delta_rule, selective_scan

# Versions that Megatron requires; later ones may make it choose another code path.
_VERSIONS = {"mamba_ssm": "2.3.0", "causal_conv1d": "1.6.0", "fla": "0.4.1"}


def install_cpu_kernels() -> None:
    """Put the replacements into ``sys.modules``, before Megatron imports the packages."""
    first = sys.modules.get(next(iter(_MODULES)))
    if getattr(first, "__file__", None) == __file__:
        return
    for name, contents in _MODULES.items():
        module = sys.modules[name] = ModuleType(name, __doc__)
        module.__file__ = __file__
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for attribute, value in contents.items():
            setattr(module, attribute, value)
        if name in _VERSIONS:
            module.__dict__["__version__"] = _VERSIONS[name]
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


class RMSNorm(torch.nn.Module):
    """Replacement of mamba_ssm.ops.triton.layernorm_gated.RMSNorm, without a gate."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` over groups of channels in float32; the result has the dtype of ``x``."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        normed = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Return the output [B, L, H * P]; if ``return_final_states``, also states [B, H, P, N].

    A batch has B rows of L tokens; a layer has H heads of size P with N state channels. Name and
    arguments are those of the function in mamba_ssm.ops.triton.ssd_combined. As in mamba_ssm, each
    batch row's first sequence starts from the initial states, and the final states are the states
    after its last sequence.
    """
    assert activation == "silu"
    heads, convolved = len(dt_bias), len(conv1d_weight)
    inner = zxbcdt.shape[-1] - convolved - heads
    size = headdim or inner // heads
    numbers = [None] * len(zxbcdt) if seq_idx is None else seq_idx.tolist()

    def sequence(
        rows: Tensor,
        of_conv: tuple[Tensor, Tensor | None],
        of_scan: Sequence[Tensor],
        initial: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dt_bias, A, D = of_scan
        z, seen, dt = rows.split((inner, convolved, heads), -1)
        seen = F.silu(causal_conv(seen, *of_conv)).float()
        x, B, C = seen.split((inner, *[(convolved - inner) // 2] * 2), -1)
        x, B, C = x.unflatten(1, (heads, size)), *(y.unflatten(1, (ngroups, -1)) for y in (B, C))
        y, final = selective_scan(x, F.softplus(dt.float() + dt_bias), A, B, C, initial)
        y = y + x * (D if D.dim() > 1 else D[:, None])
        return (y.flatten(1) * F.silu(z.float())).to(rows.dtype), final

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        (rows, weight), rest = inputs[:2], list(inputs[2:])
        bias = None if conv1d_bias is None else rest.pop(0)
        initial = None if initial_states is None else rest.pop()
        outputs, finals = [], []
        for batch, of_rows in enumerate(numbers):
            pieces, state = [], None if initial is None else initial[batch]
            for run_rows in rows[batch].split(_runs(of_rows, rows.shape[1])):
                y, final = sequence(run_rows, (weight, bias), rest, state)
                pieces.append(y)
                state = None
            outputs.append(torch.cat(pieces))
            finals.append(final)
        return torch.stack(outputs), torch.stack(finals)

    tensors = (zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states)
    (y, final), _ = recomputable_all(run, [x for x in tensors if x is not None])
    return (y, final) if return_final_states else y


def _runs(numbers: Sequence[int] | None, rows: int) -> list[int]:
    """Return the lengths of runs of equal ``numbers``; [``rows``] if ``numbers`` is None."""
    return [rows] if numbers is None else [len(list(run)) for _, run in groupby(numbers)]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Return the causal convolution of ``x`` [batch, tokens, channels], and None as final state.

    Name and arguments are those of the function in fla.modules.convolution. States are not
    supported.
    """
    assert activation in (None, "silu", "swish") and initial_state is None
    assert not output_final_state

    def run(*inputs: Tensor) -> tuple[Tensor]:
        rows, weight = inputs[:2]
        bias = inputs[2] if len(inputs) > 2 else None
        output = _by_sequence(cu_seqlens, lambda x: causal_conv(x, weight, bias), rows)
        return (output if activation is None else F.silu(output),)

    (y,), _ = recomputable_all(run, [one for one in (x, weight, bias) if one is not None])
    return y, None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return ``x`` divided by its L2 norm over the last dimension, like fla.modules.l2norm."""
    single = x.float()
    return (single * (single.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output [B, T, H, P], and the final states [N, H, K, P] of sequences, or None.

    A batch has B rows of T tokens, with N sequences in all; H heads have keys of size K and values
    of size P. Name and arguments are those of the function in fla.ops.gated_delta_rule. The states
    are None without ``output_final_state``.
    """
    assert not use_qk_l2norm_in_kernel
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    lengths = _lengths(cu_seqlens, q.shape[1])

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        parts = inputs[:5]
        outputs: list[Tensor] = []
        finals: list[Tensor] = []
        for of_rows in zip(*parts, strict=True):
            of_batch = []
            for sequence_rows in zip(*(part.split(lengths) for part in of_rows), strict=True):
                q, k, v, g, beta = (part.float() for part in sequence_rows)
                state = inputs[5][len(finals)] if len(inputs) > 5 else None
                y, final = gated_delta_rule(q, k, v, g[..., None], beta, scale, state)
                of_batch.append(y)
                finals.append(final)
            outputs.append(torch.cat(of_batch))
        return torch.stack(outputs).to(parts[0].dtype), torch.stack(finals)

    tensors = (q, k, v, g, beta, initial_state)
    (y, final), _ = recomputable_all(run, [x for x in tensors if x is not None])
    return y, final if output_final_state else None


def _lengths(cu_seqlens: Tensor | None, rows: int) -> list[int]:
    return [rows] if cu_seqlens is None else cu_seqlens.diff().tolist()


def _by_sequence(
    cu_seqlens: Tensor | None, function: Callable[[Tensor], Tensor], x_BTC: Tensor
) -> Tensor:
    """Apply ``function`` to each sequence of each batch row, and concatenate the results."""
    lengths = _lengths(cu_seqlens, x_BTC.shape[1])
    return torch.stack(
        [torch.cat([function(sequence) for sequence in rows.split(lengths)]) for rows in x_BTC]
    )


def _not_for_training(*inputs: Any, **others: Any) -> Any:
    raise NotImplementedError("this host has no GPU: a kernel that only inference calls")


_MODULES: dict[str, dict[str, Any]] = {
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": _not_for_training,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    },
    "causal_conv1d": {"causal_conv1d_fn": _not_for_training},
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": _not_for_training},
    "fla": {},
    "fla.modules": {},
    "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
    "fla.modules.l2norm": {"l2norm": l2norm},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}
