"""Prefixes that documents of a batch share in training (corpus/token_prefixes.py)."""

from functools import lru_cache, partial
from typing import Any

import numpy

from megatron_epp.control.step_source import SharingLengths
from megatron_epp.corpus.shared_prefixes import PrefixForest, sharing_text
from megatron_epp.corpus.token_prefixes import token_prefixes
from megatron_epp.mcore.data.global_batches import Batch, BatchDocument, GlobalBatches

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
        forests = [self.forest(batches.documents, batch) for batch in ahead]
        where = f"the first {len(ahead)} batches"
        shared = sharing_text(forests, where, "document of the batch")
        return f"--epp-share-from {self.least}: {shared}"

    def forest(self, documents: Any, batch: Batch) -> PrefixForest:
        """Return the documents of the batch, with the prefixes that they share."""
        return self._cached(documents, tuple(map(batch.sample, range(len(batch.samples)))))

    def _find(self, documents: Any, samples: tuple[BatchDocument, ...]) -> PrefixForest:
        def read(place: int, stop: int, end: int) -> tuple[numpy.ndarray, numpy.ndarray]:
            number = samples[place].number
            labels, _ = documents.targets(number, 0, end)
            return documents.inputs(number, 0, stop), labels

        lengths = [sample.length for sample in samples]
        return token_prefixes(lengths, read, self.least, self.depths)
