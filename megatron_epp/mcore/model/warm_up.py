"""Attention kernels built before training, for the sizes that chunks may have.

Transformer Engine's fused attention has cuDNN build a graph, up to a second each, for every pair of
buckets that the queries and the keys of a call fall into: 1024, 2048, ... 32768 tokens, then steps
of 32768. Chunks of an elastic pipeline come in many sizes, so graphs would be built in the midst of
the first iterations, on one stage after the other, while the others wait.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_epp.layers.attention.varlen import CuSeqlens, Operands, VarlenAttention
from megatron_epp.mcore.model.attention import Attention, Heads

logger = logging.getLogger(__name__)

SECONDS = 60.0  # of warming up at most; what is left is built when it is first needed
FIRST, DOUBLES_TO = 1024, 32768


def buckets(most: int) -> list[int]:
    """The largest sizes of the buckets up to that of ``most`` tokens, but none above ``most``."""
    sizes, size = [], FIRST
    while size < most:
        sizes.append(size)
        size += size if size < DOUBLES_TO else DOUBLES_TO
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class WarmUpCall:
    """One call: over all ``heads`` of a tensor-parallel rank (``alone``: a document that one
    context-parallel rank computes), or over this rank's."""

    queries: int
    keys: int
    alone: bool = False


def calls(context: int, alone: bool) -> Iterator[WarmUpCall]:
    """One for every pair of buckets that documents of up to ``context`` inputs may need: whole
    documents first, with ``alone`` also those that one rank computes, which are never cut; then
    slices, from short contexts to long ones."""
    sizes = buckets(context)
    yield from (WarmUpCall(size, size) for size in sizes)
    if alone:
        yield from (WarmUpCall(size, size, alone) for size in sizes)
    for keys in sizes:
        yield from (WarmUpCall(queries, keys) for queries in sizes if queries < keys)


def warm_up(
    attention: Attention, heads: Heads, whole: Heads, context: int, device: torch.device
) -> int:
    """Run forward and backward of :func:`calls` once each; how many were run in time.

    ``heads`` of this rank, and the ``whole`` of its tensor-parallel rank's. Nothing happens where
    kernels have no graphs of their own. The device's random state is afterwards what it was:
    Transformer Engine draws with every call, dropout or not.
    """
    if not isinstance(attention, VarlenAttention) or attention.name != "te":
        return 0
    began, done, random = time.monotonic(), 0, torch.cuda.get_rng_state()
    wanted = list(calls(context, alone=whole != heads))
    try:
        for call in wanted:
            if time.monotonic() - began > SECONDS:
                break
            if call.alone:
                _run(attention.whole, whole, call, device)
            else:
                _run(attention, heads, call, device)
            done += 1
    except torch.OutOfMemoryError:
        # The longest contexts need the least room when training slices them as it must.
        logger.debug("no memory to warm up attention over %d keys", call.keys)
    finally:
        torch.cuda.set_rng_state(random)
    if torch.distributed.get_rank() == 0:
        seconds = time.monotonic() - began
        logger.info("attention warmed up: %d of %d sizes in %.1f s", done, len(wanted), seconds)
    return done


def _run(attention: VarlenAttention, heads: Heads, call: WarmUpCall, device: torch.device) -> None:
    def zeros(rows: int, count: int, size: int = heads.size) -> torch.Tensor:
        return torch.zeros(rows, count, size, dtype=heads.dtype, device=device)

    cu_seqlens = CuSeqlens.of([call.queries], [call.keys], device)
    q, k = zeros(call.queries, heads.query), zeros(call.keys, heads.key)
    v = zeros(call.keys, heads.key, heads.value)
    operands = Operands(q, k, v, cu_seqlens)
    _, kept = attention.kernel.forward(operands, True)
    attention.kernel.backward(zeros(call.queries, heads.query, heads.value), operands, kept)
    if device.type == "cuda":
        torch.cuda.synchronize()
