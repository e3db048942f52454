"""Prefixes that documents of a batch share, read from their tokens.

Two rows are equal if their tokens are, and the 1 + D tokens after each, which the row predicts (D
MTP layers). So a prefix ends 1 + D tokens before its documents part:

    a b c d e        D = 0: the rows of a and b are shared, as both predict the same
    a b c x
"""

from functools import lru_cache, partial
from typing import Any

import numpy

from megatron_epp.control.step_source import SharingLengths
from megatron_epp.corpus.shared_prefixes import PrefixForest, SharedSpan, shared_prefixes
from megatron_epp.mcore.data.global_batches import Batch, GlobalBatches, Sample, TokenSource

_SHOWN = 3  # batches
_BATCHES = 8  # whose forests are cached: those that are planned ahead are needed again


class SharedTokens:
    """Finder of the prefixes of at least ``least`` tokens that documents of a batch share.

    Args:
        least: Minimum number of tokens of a shared prefix.
        depths: Number of MTP layers.
    """

    def __init__(self, least: int, depths: int = 0):
        self.least, self.depths = least, depths
        self._cached = lru_cache(_BATCHES)(self._find)

    def lengths(self, documents: Any, batch: Batch) -> SharingLengths:
        """Return the lengths of the batch's documents, whose tokens are read when needed."""
        return SharingLengths(batch.lengths.tolist(), partial(self.forest, documents, batch))

    def first_line(self, batches: GlobalBatches) -> str:
        """Return a line on the tokens that documents of the first batches share."""
        ahead = [one for n in range(_SHOWN) if (one := batches.peek(n)) is not None]
        tokens = sum(int(batch.lengths.sum()) for batch in ahead)
        saved = tokens - sum(self.forest(batches.documents, batch).tokens for batch in ahead)
        return (
            f"--epp-share-from {self.least}: of {tokens:,} tokens in the first {len(ahead)} "
            f"batches, {saved:,} ({saved / max(1, tokens):.0%}) repeat the beginning of another "
            "document of the batch; a replica computes them once"
        )

    def forest(self, documents: Any, batch: Batch) -> PrefixForest:
        """Return the documents of the batch, with the prefixes that they share."""
        return self._cached(documents, tuple(map(batch.sample, range(len(batch.samples)))))

    def _find(self, documents: Any, samples: tuple[Sample, ...]) -> PrefixForest:
        # Documents that begin alike are read whole; the others up to ``least``.
        alike: dict[bytes | int, list[int]] = {}
        for number, sample in enumerate(samples):
            known = sample.length >= self.least
            key = self._rows(documents, sample, self.least).tobytes() if known else number
            alike.setdefault(key, []).append(number)
        nodes: list[SharedSpan] = []
        last = [0] * len(samples)
        for group in alike.values():
            held = [samples[number] for number in group]
            trees = PrefixForest.apart([sample.length for sample in held])
            if len(group) > 1:
                rows = [self._rows(documents, sample, sample.length) for sample in held]
                trees = shared_prefixes(rows, self.least)
            first = len(nodes)
            for node in trees.nodes:
                parent = node.parent if node.parent < 0 else node.parent + first
                nodes.append(SharedSpan(group[node.sequence], node.start, node.stop, parent))
            for number, end in zip(group, trees.last, strict=True):
                last[number] = first + end
        return PrefixForest(tuple(nodes), tuple(last))

    def _rows(self, documents: TokenSource, sample: Sample, stop: int) -> numpy.ndarray:
        """Return tokens [0, stop) and the 1 + D tokens after each: [stop, 2 + D] int32."""
        rows = numpy.full((stop, 2 + self.depths), -1, numpy.int32)  # -1 after the document
        rows[:, 0] = documents.inputs(sample.number, 0, stop)
        end = min(stop + self.depths, sample.length)
        labels, _ = documents.targets(sample.number, 0, end)
        for depth in range(1 + self.depths):
            after = labels[depth : depth + stop]
            rows[: len(after), 1 + depth] = after
        return rows
