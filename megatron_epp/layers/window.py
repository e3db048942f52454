"""Sliding-window attention on CPUs: a query sees itself and the W tokens before it.

Queries are processed in tiles, so that each tile needs few keys:

    queries     keys, W = 2, tiles of 3        a tile after a context of one slice
    0 1 2       0 1 2                          (c c) 0 1 2
    3 4 5       1 2 3 4 5
    6           4 5 6

A mask selects the keys that each query of a tile sees; tiles of the same shape share a mask. Each
query is compared with at most W + (tile size) keys.

Shape suffixes: T queries, P context rows (at most W), H query heads, G key heads, D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_epp.layers.attention.cpu_flash import attend, attend_backward

LEAST_TILE = 128


def attend_window(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, context: tuple[Tensor, Tensor], before: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return output [T, H, D] and log-sum-exp [H, T] over the window's keys.

    Args:
        q_THD: [queries, heads, head size] queries.
        k_TGD: [queries, groups, head size] keys of the same rows.
        v_TGD: [queries, groups, head size] values of the same rows.
        context: k and v [P, G, D] of the rows directly before the queries; P may be 0.
        before: W, the number of tokens before a query that the query sees.
        scale: scale of the logits.
    """
    outputs, sums = [], []
    for tile in _tiles(len(q_THD), len(context[0]), before):
        k, v = (_keys(x, c, tile) for x, c in zip((k_TGD, v_TGD), context, strict=True))
        mask = _band(tile, before, q_THD.dtype)
        out, lse = attend(q_THD[tile.queries], k, v, False, scale, mask)
        outputs.append(out)
        sums.append(lse)
    return torch.cat(outputs), torch.cat(sums, 1)


def attend_window_backward(
    grad_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, context: tuple[Tensor, Tensor],
    out_THD: Tensor, lse_HT: Tensor, before: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, and of the context's k and v.

    Args:
        grad_THD: [queries, heads, head size] gradient of the output.
        q_THD: [queries, heads, head size] queries.
        k_TGD: [queries, groups, head size] keys of the same rows.
        v_TGD: [queries, groups, head size] values of the same rows.
        context: k and v [P, G, D] of the rows directly before the queries; P may be 0.
        out_THD: [queries, heads, head size] output of the forward.
        lse_HT: [heads, queries] log-sum-exp of the forward.
        before: W, the number of tokens before a query that the query sees.
        scale: scale of the logits.
    """
    dq_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    own = [x.new_zeros(x.shape) for x in (k_TGD, v_TGD)]
    front = [x.new_zeros(x.shape) for x in context]
    for tile in _tiles(len(q_THD), len(context[0]), before):
        k, v = (_keys(x, c, tile) for x, c in zip((k_TGD, v_TGD), context, strict=True))
        rows = tile.queries
        dq, *parts = attend_backward(
            grad_THD[rows], q_THD[rows], k, v, out_THD[rows], lse_HT[:, rows], False, scale,
            _band(tile, before, q_THD.dtype),
        )  # fmt: skip
        dq_THD[rows] = dq
        for gradient, total, front_total in zip(parts, own, front, strict=True):
            total[tile.own] += gradient[tile.front :]
            if tile.front:
                front_total += gradient[: tile.front]
    return dq_THD, own[0], own[1], front[0], front[1]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of ``queries``, rows of their keys (``own``), and number of context keys (``front``)."""

    queries: slice
    own: slice
    front: int


def _tiles(tokens: int, context: int, before: int) -> Iterator[_Tile]:
    size = max(before, LEAST_TILE)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        first = max(0, start - before)
        yield _Tile(slice(start, stop), slice(first, stop), 0 if start else context)


def _keys(x_TGD: Tensor, context_PGD: Tensor, tile: _Tile) -> Tensor:
    own = x_TGD[tile.own]
    return torch.cat((context_PGD, own)) if tile.front else own


def _band(tile: _Tile, before: int, dtype: torch.dtype) -> Tensor:
    queries = tile.queries.stop - tile.queries.start
    keys = tile.front + tile.own.stop - tile.own.start
    return _mask(queries, keys, before, dtype)


@lru_cache(maxsize=8)
def _mask(queries: int, keys: int, before: int, dtype: torch.dtype) -> Tensor:
    """Return [queries, keys]: 0 if a query sees a key, else -inf.

    Query i sees key i + keys - queries, and the ``before`` keys before this key.
    """
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen = seen.tril(keys - queries).triu(keys - queries - before)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill_(~seen, -torch.inf)
