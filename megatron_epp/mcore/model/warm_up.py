"""Warm-up of attention kernels before training, for the sizes that chunks may have.

For Transformer Engine's fused attention, cuDNN builds a graph, which takes up to a second. A graph
serves one bucket of queries and one bucket of keys (1024, 2048, ... 32768 tokens, then steps of
32768), and one bucket of documents (32, 64, 128, ...). Chunks have many sizes. Without a warm-up,
the stages would build graphs one after another in the first iterations, while other stages wait.

Calls are also recorded (layers/attention/te_direct.py). A recording serves all calls whose numbers
of documents and longest lengths round up to the same powers of two. A recording builds no further
graph, because its few tokens are in the smallest buckets; it declares larger lengths as upper
bounds.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_epp.layers.attention.layer_attention import Attention, Heads
from megatron_epp.layers.attention.te import DOCUMENTS, bucket
from megatron_epp.layers.attention.varlen import CuSeqlens, Operands, VarlenAttention
from megatron_epp.mcore.kinds.registry import heads_of, layers_see
from megatron_epp.mcore.patching import emulated_engine

logger = logging.getLogger(__name__)

SECONDS = 60.0  # limit of the warm-up; remaining graphs are built when first needed
FIRST, DOUBLES_TO = 1024, 32768
# Numbers of documents per pack, one for each bucket, and the size of the largest usual chunks.
PACKED, PACKS_TO = (DOCUMENTS, 2 * DOCUMENTS, 4 * DOCUMENTS), 32768
ROWS = 16  # of a recording; its lengths are said to be larger


def buckets(most: int) -> list[int]:
    """Return the upper limits of all buckets smaller than ``most`` tokens, then ``most``."""
    sizes, size = [], FIRST
    while size < most:
        sizes.append(size)
        size += size if size < DOUBLES_TO else DOUBLES_TO
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class WarmUpCall:
    """Sizes of one attention call over packed documents.

    Attributes:
        queries: Number of queries of all documents.
        keys: Number of keys of all documents.
        alone: Whether a single context-parallel rank computes the documents, with all heads of the
            tensor-parallel rank; otherwise the context-parallel ranks share these heads.
        documents: Number of documents.
        most: Upper bounds of a document's queries and keys; None for the lengths themselves.
    """

    queries: int
    keys: int
    alone: bool = False
    documents: int = 1
    most: tuple[int, int] | None = None

    @property
    def graph(self) -> tuple[int, int, int]:
        """Buckets of documents, queries and keys; calls with equal buckets share a graph."""
        most = bucket(self.documents, PACKED[0])
        return most, _bucket(self.queries), _bucket(self.keys)

    def cu_seqlens(self, device: torch.device) -> CuSeqlens:
        """Return the lengths of the documents, which are as equal as possible."""
        queries, keys = (_assigned(size, self.documents) for size in (self.queries, self.keys))
        lengths = CuSeqlens.of(queries, keys, device)
        if self.most is None:
            return lengths
        return replace(lengths, most_queries=self.most[0], most_keys=self.most[1])


def _bucket(tokens: int) -> int:
    if tokens > DOUBLES_TO:
        return -(-tokens // DOUBLES_TO) * DOUBLES_TO
    return bucket(tokens, FIRST)


def calls(
    context: int, alone: bool, before: int | None = None, packs_to: int | None = None
) -> Iterator[WarmUpCall]:
    """Yield one call for every graph that documents of up to ``context`` tokens may need.

    The order of the calls is:

    1. unsliced documents, and packs of them that exceed ``context`` tokens,
    2. with ``alone``, the same sizes on a single context-parallel rank,
    3. slices, from short to long contexts,
    4. packs of very many documents.

    Args:
        context: Largest number of tokens of a document.
        alone: Whether a single context-parallel rank may compute a document.
        before: Number of earlier tokens in the sliding window of each token; None: all tokens.
        packs_to: Number of tokens of the largest pack; None for ``PACKS_TO``.
    """
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


def recordings(
    context: int, alone: bool, before: int | None = None, packs_to: int | None = None
) -> Iterator[WarmUpCall]:
    """Yield one call for each recording that may be needed; see :func:`calls` for the arguments.

    Packs hold at least ROWS tokens per document on average.
    """
    sizes = [size for size in (2 * ROWS << n for n in range(32)) if size < 2 * context]
    for count in (1 << n for n in range(PACKED[-1].bit_length())):
        if count * ROWS > (PACKS_TO if packs_to is None else packs_to):
            break
        for size in sizes:
            call = WarmUpCall(ROWS, ROWS, documents=count, most=(size, size))
            yield from (call, replace(call, alone=True)) if alone else (call,)
    for keys in sizes:
        for queries in sizes:
            if queries <= keys and (before is None or keys < 2 * (queries + before)):
                # More keys than queries, as behind any context: such calls have their own mask.
                yield WarmUpCall(ROWS, 2 * ROWS, most=(queries - 1, keys))


def warm_up_layers(attention: Attention, config: Any, context: int, device: torch.device) -> None:
    """Run :func:`warm_up` for every variant of the attention in layers of the model ``config``."""
    heads, all_heads = heads_of(config), heads_of(config, context=1)
    # Emulated kernels compile nothing, and need seconds for large packs.
    packs_to = context if emulated_engine.is_started() else None
    for before, sinks in layers_see(config):
        seeing = attention.of_layer(before, (lambda: torch.zeros(1)) if sinks else lambda: None)
        warm_up(seeing, heads, all_heads, context, device, packs_to)


def warm_up(
    attention: Attention,
    heads: Heads,
    all_heads: Heads,
    context: int,
    device: torch.device,
    packs_to: int | None = None,
) -> int:
    """Run forward and backward of the attention calls of :func:`calls` and :func:`recordings`.

    Only Transformer Engine's attention is warmed up. The warm-up ends after ``SECONDS``, or when
    the device runs out of memory. Rank 0 logs the number of calls and the time. The device's random
    state is restored, because Transformer Engine draws from it in every call.

    Args:
        attention: The attention, with its sliding window and sinks (``of_layer``).
        heads: Heads of this rank.
        all_heads: Heads of all context-parallel ranks of this tensor-parallel rank.
        context: Largest number of tokens of a document.
        device: Device of this rank.
        packs_to: Number of tokens of the largest pack; None for ``PACKS_TO``.

    Returns:
        The number of calls that ran.
    """
    if not isinstance(attention, VarlenAttention) or attention.name != "te":
        return 0
    began, done, random = time.monotonic(), 0, torch.cuda.get_rng_state()
    sizes = context, all_heads != heads, attention.before, packs_to
    wanted = [*calls(*sizes), *recordings(*sizes)]
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
        # Training needs less memory, because plans slice the longest documents.
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

    q, k = zeros(call.queries, heads.query), zeros(call.keys, heads.key)
    v = zeros(call.keys, heads.key, heads.value)
    sinks = None if attention.sinks() is None else zeros(1, heads.query, 1).flatten()
    operands = Operands(q, k, v, call.cu_seqlens(device), sinks)
    _, kept = attention.kernel.forward(operands, True)
    attention.kernel.backward(zeros(call.queries, heads.query, heads.value), operands, kept)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _assigned(tokens: int, documents: int) -> list[int]:
    """Return ``documents`` lengths that sum to ``tokens`` and differ by at most 1."""
    return [tokens // documents + (number < tokens % documents) for number in range(documents)]
