"""Attention kernels built before training, for the sizes that chunks may have.

Transformer Engine's fused attention has cuDNN build a graph, up to a second each, for every pair of
buckets that the queries and the keys of a call fall into: 1024, 2048, ... 32768 tokens, then steps
of 32768; and for every number of documents: up to 32, 64, 128 and so on. Chunks of an elastic
pipeline come in many sizes, so graphs would be built in the midst of the first iterations, on one
stage after the other, while the others wait.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron_epp.layers.attention.layer_attention import Attention, Heads
from megatron_epp.layers.attention.te import DOCUMENTS, bucket
from megatron_epp.layers.attention.varlen import CuSeqlens, Operands, VarlenAttention

logger = logging.getLogger(__name__)

SECONDS = 60.0  # of warming up at most; what is left is built when it is first needed
FIRST, DOUBLES_TO = 1024, 32768
# Documents that are packed into a chunk, of together as many tokens as chunks mostly have, at most.
PACKED, PACKS_TO = (DOCUMENTS, 2 * DOCUMENTS, 4 * DOCUMENTS), 32768


def buckets(most: int) -> list[int]:
    """The largest sizes of the buckets up to that of ``most`` tokens, but none above ``most``."""
    sizes, size = [], FIRST
    while size < most:
        sizes.append(size)
        size += size if size < DOUBLES_TO else DOUBLES_TO
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class WarmUpCall:
    """One call of ``documents`` side by side, queries and keys of all of them: over all heads of a
    tensor-parallel rank (``alone``: documents that one context-parallel rank computes), or over
    this rank's."""

    queries: int
    keys: int
    alone: bool = False
    documents: int = 1

    @property
    def graph(self) -> tuple[int, int, int]:
        """The buckets of documents, queries and keys: calls with the same ones share a graph."""
        most = bucket(self.documents, PACKED[0])
        return most, _bucket(self.queries), _bucket(self.keys)


def _bucket(tokens: int) -> int:
    if tokens > DOUBLES_TO:
        return -(-tokens // DOUBLES_TO) * DOUBLES_TO
    return bucket(tokens, FIRST)


def calls(
    context: int, alone: bool, before: int | None = None, packs_to: int | None = None
) -> Iterator[WarmUpCall]:
    """One for every graph that documents of up to ``context`` inputs may need: whole documents
    first, packed into chunks that are longer than any of them, too; with ``alone`` also those that
    one rank computes, which are never cut; then slices, from short contexts to long ones, of which
    a window shows the ``before`` inputs in front; then packs of very many documents. ``packs_to``:
    tokens of the largest pack (None: PACKS_TO)."""
    sizes, packs = buckets(context), buckets(PACKS_TO if packs_to is None else packs_to)
    sized = [WarmUpCall(size, size) for size in sizes]
    for size in packs:
        if size > context:
            sized.append(WarmUpCall(size, size, documents=-(-size // context)))
    yield from sized
    if alone:
        yield from (replace(call, alone=True) for call in sized)
    for keys in sizes:
        for queries in sizes:
            if queries < keys and (before is None or keys <= _bucket(queries + before)):
                yield WarmUpCall(queries, keys)
    for count in PACKED[1:]:
        for size in packs:
            if count <= size <= count * context:
                yield WarmUpCall(size, size, documents=count)


def warm_up(
    attention: Attention,
    heads: Heads,
    all_heads: Heads,
    context: int,
    device: torch.device,
    packs_to: int | None = None,
) -> int:
    """Run forward and backward of :func:`calls` once each; how many were run in time.

    ``heads`` of this rank, and the ``all_heads`` of its tensor-parallel rank's. Nothing happens
    where kernels have no graphs of their own. The device's random state is afterwards what it was:
    Transformer Engine draws with every call, dropout or not. Windows and sinks: ``attention``'s
    (``of_layer``). ``packs_to``: as :func:`calls` takes it.
    """
    if not isinstance(attention, VarlenAttention) or attention.name != "te":
        return 0
    began, done, random = time.monotonic(), 0, torch.cuda.get_rng_state()
    wanted = list(calls(context, all_heads != heads, attention.before, packs_to))
    try:
        for call in wanted:
            if time.monotonic() - began > SECONDS:
                break
            if call.alone:
                _run(attention.all_heads, all_heads, call, device)
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

    queries, keys = (_assigned(size, call.documents) for size in (call.queries, call.keys))
    cu_seqlens = CuSeqlens.of(queries, keys, device)
    q, k = zeros(call.queries, heads.query), zeros(call.keys, heads.key)
    v = zeros(call.keys, heads.key, heads.value)
    sinks = None if attention.sinks() is None else zeros(1, heads.query, 1).flatten()
    operands = Operands(q, k, v, cu_seqlens, sinks)
    _, kept = attention.kernel.forward(operands, True)
    attention.kernel.backward(zeros(call.queries, heads.query, heads.value), operands, kept)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _assigned(tokens: int, documents: int) -> list[int]:
    """Lengths of so many documents, as equal as can be."""
    return [tokens // documents + (number < tokens % documents) for number in range(documents)]
