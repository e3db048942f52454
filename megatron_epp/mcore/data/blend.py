"""Blends of corpora, built by Megatron's builder; weights are fractions of tokens or documents."""

from collections.abc import Callable
from typing import Any

import numpy
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megatron_epp.corpus.blend import TOKENS, order_by_tokens
from megatron_epp.mcore.data.documents import DocumentConfig


class TokenBlend(BlendedDataset):
    """Megatron's blended dataset, in which each corpus's number of tokens follows its weight."""

    def _build_indices(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        lengths = [part.first_lengths for part in self.datasets]
        return order_by_tokens(lengths, self.weights, self.size)


class DocumentBuilder(BlendedMegatronDatasetBuilder):
    """Megatron's dataset builder, which builds a :class:`TokenBlend` if weights are by tokens."""

    @staticmethod
    def build_generic_dataset(cls: Any, is_built: Callable[[], bool], *args: Any) -> Any:
        """Build a dataset of class ``cls``, or a TokenBlend if weights are by tokens."""
        if cls is BlendedDataset and _weighs_tokens(*args[1:]):
            cls = TokenBlend
        return BlendedMegatronDatasetBuilder.build_generic_dataset(cls, is_built, *args)


def _weighs_tokens(parts: list, weights: list, size: int | None, config: DocumentConfig) -> bool:
    """Return whether the user gives weights, which are fractions of tokens, and ``size`` is given.

    Without weights given by the user, Megatron weights each corpus by its number of documents. The
    corpora are then used up at the same rate.
    """
    blend = config.blend or config.blend_per_split[parts[0].index_split.value]
    return config.blend_by == TOKENS and size is not None and blend[1] is not None
