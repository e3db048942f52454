"""Random prefixes, and random chunks of documents that continue other documents."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from megatron_epp.ir import Chunk, Prefixes, Span


def arbitrary_prefixes(
    lengths: Sequence[int], random: Random, context: int | None = None, whole: bool = False
) -> Prefixes:
    """Return random prefixes: some documents continue the start of an earlier document.

    Several documents may continue the same document. Documents with a prefix may be continued, too.

    Args:
        lengths: tokens of each document.
        random: source of random numbers.
        context: maximum number of tokens of a document with its prefixes; None: no limit.
        whole: whether documents continue others from their ends, as those of a step do.
    """
    prefixes: list[Span | None] = [None]
    begins = [0]
    for number in range(1, len(lengths)):
        # Sometimes the last document, for deep trees, and sometimes the first, for wide ones.
        parent = random.choice((0, number - 1, random.randrange(number)))
        length = lengths[parent]
        stop = length if whole or random.random() < 0.6 else random.randint(1, length)
        position = begins[parent] + stop
        fits = context is None or position + lengths[number] <= context
        if random.random() < 0.25 or not fits:
            prefixes.append(None)
            begins.append(0)
        else:
            prefixes.append(Span(parent, 0, stop))
            begins.append(position)
    return tuple(prefixes)


def tree_chunks(
    lengths: Sequence[int], prefixes: Prefixes, random: Random, first: int = 0
) -> tuple[Chunk, ...]:
    """Return random chunks of documents, some of which continue other documents.

    Documents are cut where another document continues them, and also at random tokens. Each span
    goes to a new chunk, the chunk with the tokens before it, or a chunk that can run after that
    chunk.

    Args:
        lengths: tokens of each document.
        prefixes: the span that each document continues, or None.
        random: source of random numbers.
        first: number of the first document.
    """
    chunks: list[list[Span]] = []
    before: list[int] = []  # the chunk that each chunk continues, or -1
    cut_in: list[bool] = []  # whether each chunk has a slice of a document that is cut
    lies: dict[Span, int] = {}

    def descends(chunk: int, other: int) -> bool:
        while chunk >= 0 and chunk != other:
            chunk = before[chunk]
        return chunk == other

    def place(span: Span, after: int, cut: bool) -> None:
        able = [
            c
            for c, held in enumerate(chunks)
            if len(held) < 5
            and span.document not in {one.document for one in held}
            and not (cut and cut_in[c])
            and (after in (-1, c, before[c]) or (before[c] < 0 and not descends(after, c)))
        ]
        if able and random.random() < 0.6:
            chunk = random.choice(able)
            chunks[chunk].append(span)
            cut_in[chunk] |= cut
        else:
            chunk = len(chunks)
            chunks.append([span])
            before.append(-1)
            cut_in.append(cut)
        if after not in (-1, chunk):
            before[chunk] = after
        lies[span] = chunk

    for document in _parents_first(prefixes or (None,) * len(lengths)):
        length = lengths[document]
        wanted = {p.stop for p in prefixes if p is not None and p.document == document} - {length}
        more = random.randint(0, 2) if length >= 8 and random.random() < 0.4 else 0
        inner = sorted(wanted | set(random.sample(range(1, length), min(more, length - 1))))
        prefix = prefixes[document] if prefixes else None
        after = -1
        if prefix is not None:
            after = next(
                c for s, c in lies.items() if (s.document, s.stop) == (prefix.document, prefix.stop)
            )
        for boundary in pairwise([0, *inner, length]):
            span = Span(document, *boundary)
            place(span, after, bool(inner))
            after = lies[span]
    names = random.sample(range(len(chunks)), len(chunks))
    return tuple(
        Chunk(tuple(replace(span, document=first + span.document) for span in chunks[name]))
        for name in names
    )


def _parents_first(prefixes: Prefixes) -> list[int]:
    order: list[int] = []

    def add(document: int) -> None:
        prefix = prefixes[document]
        if prefix is not None and prefix.document not in order:
            add(prefix.document)
        if document not in order:
            order.append(document)

    for document in range(len(prefixes)):
        add(document)
    return order


def arbitrary_tree(
    lengths: Sequence[int], random: Random, context: int | None = None, whole: bool = False
) -> dict[str, Any]:
    """Return random prefixes and chunks, as arguments of ``arbitrary_plan``."""
    prefixes = arbitrary_prefixes(lengths, random, context, whole)
    if not any(prefixes):
        return {"prefixes": prefixes}
    return {"prefixes": prefixes, "chunks": tree_chunks(lengths, prefixes, random)}
