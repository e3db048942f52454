"""Scans of SSM and linear-attention layers in torch, for CPU-only hosts.

Each scan works in blocks of rows: the rows of a block interact as in attention, and a state passes
from block to block. A call scans one sequence.

Shape suffixes: L rows of a sequence, in c blocks of Q rows; H heads, in G groups of R heads (H = G
R); P channels of a head's values; N channels of a head's keys (K channels in the delta rule).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SCAN_ROWS = 64


def causal_conv(x_LC: Tensor, weight_CW: Tensor, bias_C: Tensor | None) -> Tensor:
    """Return the depthwise causal convolution [L, C] with W taps, padded with zeros."""
    rows, taps = len(x_LC), weight_CW.shape[1]
    padded = F.pad(x_LC, (0, 0, taps - 1, 0))
    output = sum(padded[tap : tap + rows] * weight_CW[:, tap] for tap in range(taps))
    assert isinstance(output, Tensor), "at least one tap"
    return output if bias_C is None else output + bias_C


def selective_scan(
    x_LHP: Tensor,
    dt_LH: Tensor,
    A_H: Tensor,
    B_LGN: Tensor,
    C_LGN: Tensor,
    state_HPN: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return Mamba-2's scan [L, H, P] and the final state [H, P, N].

    state = exp(dt A) state + dt x B', output = state C. Source: Dao and Gu, Transformers are SSMs
    (2024), listing 1.

    Args:
        x_LHP: [rows, heads, head size] inputs.
        dt_LH: [rows, heads] step sizes.
        A_H: [heads] decay rates.
        B_LGN: [rows, groups, state size] input projections.
        C_LGN: [rows, groups, state size] output projections.
        state_HPN: [heads, head size, state size] initial state; None for zeros.
    """
    return _with_rest(
        lambda parts, state: _selective_blocks(parts, A_H, state),
        (x_LHP, dt_LH, B_LGN, C_LGN),
        state_HPN,
    )


def _selective_blocks(
    parts: Sequence[Tensor], A_H: Tensor, state_HPN: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, dt, B, C = map(_blocks, parts)
    groups = B.shape[2]
    x = x.unflatten(2, (groups, -1))  # [c, Q, G, R, P]
    dt = dt.unflatten(2, (groups, -1))  # [c, Q, G, R]
    decayed = (dt * A_H.unflatten(0, (groups, -1))).cumsum(1)
    within = _decay(decayed.movedim(1, -1))  # [c, G, R, Q, Q]
    scores = torch.einsum("cign,cjgn->cgij", C, B)
    weights = scores[:, :, None] * within * dt.movedim(1, -1)[..., None, :]
    y = torch.einsum("cgrij,cjgrp->cigrp", weights, x)
    left = (decayed[:, -1:] - decayed).exp() * dt  # of a row at its block's end
    added = torch.einsum("cjgr,cjgrp,cjgn->cgrpn", left, x, B)
    state = added.new_zeros(added.shape[1:])
    if state_HPN is not None:
        state = state_HPN.to(added.dtype).unflatten(0, (groups, -1))
    before = []
    for of_block, its_decay in zip(added, decayed[:, -1].exp(), strict=True):
        before.append(state)
        state = its_decay[..., None, None] * state + of_block
    y = y + torch.einsum("cign,cgrpn,cigr->cigrp", C, torch.stack(before), decayed.exp())
    return y.flatten(0, 1).flatten(1, 2), state.flatten(0, 1)


def gated_delta_rule(
    q_LHK: Tensor,
    k_LHK: Tensor,
    v_LHP: Tensor,
    g_LH1: Tensor,
    beta_LH: Tensor,
    scale: float,
    state_HKP: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gated delta rule's outputs [L, H, P] and the final state [H, K, P].

    S = exp(g) S, then S = S + k beta (v - k'S)', output = scale q'S. Source: Yang, Kautz and
    Hatamizadeh, Gated Delta Networks (2025), eq. 10. Each block solves a triangular system, as in
    section 3.3.

    Args:
        q_LHK: [rows, heads, key size] queries.
        k_LHK: [rows, heads, key size] keys.
        v_LHP: [rows, heads, value size] values.
        g_LH1: [rows, heads, 1] log decay per head.
        beta_LH: [rows, heads] write strengths.
        scale: factor on the outputs.
        state_HKP: [heads, key size, value size] initial state; None for zeros.
    """
    return _with_rest(
        lambda parts, state: _delta_blocks(parts, scale, state),
        (q_LHK, k_LHK, v_LHP, g_LH1, beta_LH),
        state_HKP,
    )


def _delta_blocks(
    parts: Sequence[Tensor], scale: float, state_HKP: Tensor | None
) -> tuple[Tensor, Tensor]:
    # [c, H, Q, .]
    q, k, v, g, beta = (_blocks(part).transpose(1, 2) for part in parts)
    beta = beta[..., None]
    decayed = g.cumsum(2)  # [c, H, Q, 1]
    within = _decay(decayed[..., 0])  # [c, H, Q, Q]
    system = (beta * ((k @ k.mT) * within)).tril(-1)
    system = system + torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    known = torch.cat((beta * v, beta * decayed.exp() * k), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.mT) * within
    left = (decayed[..., -1:, :] - decayed).exp() * k
    state = k.new_zeros(*k.shape[1:2], k.shape[-1], v.shape[-1])
    if state_HKP is not None:
        state = state_HKP.to(k.dtype)
    ends = decayed[:, :, -1].exp()[..., None]
    outputs = []
    for value, key, query, score, end, rest in zip(
        values, keys, q * decayed.exp(), scores, ends, left, strict=True
    ):
        changed = value - key @ state
        outputs.append(query @ state + score @ changed)
        state = end * state + rest.mT @ changed
    o = scale * torch.stack(outputs).transpose(1, 2).flatten(0, 1)
    return o, state


def _with_rest(
    scan: Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]],
    parts: Sequence[Tensor],
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Run ``scan`` on the complete blocks, then on the remaining rows; join the outputs.

    Padding with zeros instead would copy all rows, and save the copies for backward.
    """
    rows = len(parts[0])
    aligned = rows - rows % SCAN_ROWS
    if aligned in (0, rows):
        return scan(parts, state)
    first, state = scan([part[:aligned] for part in parts], state)
    rest, state = scan([part[aligned:] for part in parts], state)
    return torch.cat((first, rest)), state


def _blocks(x: Tensor) -> Tensor:
    """Return [L, ...] as [c, Q, ...], with complete blocks or one shorter block."""
    return x.unflatten(0, (-1, min(SCAN_ROWS, max(1, len(x)))))


def _decay(sums: Tensor) -> Tensor:
    """Return the decay [..., Q, Q] from row j to row i (0 if j > i), from cumulative logarithms."""
    rows = sums.shape[-1]
    later = torch.ones(rows, rows, dtype=torch.bool, device=sums.device).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
