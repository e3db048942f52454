"""Order of the documents of one corpus: an endless sequence of epochs, each a permutation.

Item i of a corpus of n documents is document P[i % n]. P is drawn from the seed and the epoch
i // n, so a resumed run needs only the number of consumed items.
"""

from collections.abc import Sequence

import numpy as np


def epoch_order(documents: int, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of ``epoch``, drawn from ``seed`` and ``epoch``: [documents] int32.

    The generator is RandomState, because numpy guarantees its random stream. The stream of a
    numpy Generator may change between versions.
    """
    order = np.arange(documents, dtype=np.int32)
    np.random.RandomState([seed, epoch]).shuffle(order)
    return order


class Epochs:
    """Order of a corpus's documents: an endless sequence of epochs.

    Every epoch is a random permutation of the documents. Recently used epochs are cached.

    Args:
        documents: number of documents of an epoch.
        seed: seed of the permutations.
    """

    def __init__(self, documents: int, seed: int):
        self._documents, self._seed = documents, seed
        self._orders: dict[int, np.ndarray] = {}

    def order(self, epoch: int) -> np.ndarray:
        """Return the permutation of ``epoch``: [documents] int32."""
        if epoch not in self._orders:
            order = epoch_order(self._documents, self._seed, epoch)
            # A global batch and the batch planned ahead of it span at most two epochs.
            self._orders = {k: v for k, v in self._orders.items() if abs(k - epoch) <= 1}
            self._orders[epoch] = order
        return self._orders[epoch]

    def documents(self, items: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the document number of each item: [n] -> [n] int64."""
        epochs, places = np.divmod(np.asarray(items, dtype=np.int64), self._documents)
        numbers = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            numbers[of_epoch] = self.order(int(epoch))[places[of_epoch]]
        return numbers
