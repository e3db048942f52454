"""Blends of corpora, built by Megatron's builder, with weights that count tokens or documents."""

from collections.abc import Callable
from typing import Any

import numpy
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megatron_epp.corpus.blend import TOKENS, order_by_tokens
from megatron_epp.mcore.data.documents import DocumentConfig


class TokenBlend(BlendedDataset):
    """Megatron's blended dataset, in an order with tokens in proportion to the weights."""

    def _build_indices(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        lengths = [part.first_lengths for part in self.datasets]
        return order_by_tokens(lengths, self.weights, self.size)


class DocumentBuilder(BlendedMegatronDatasetBuilder):
    """Megatron's dataset builder; it builds a :class:`TokenBlend` if weights count tokens."""

    @staticmethod
    def build_generic_dataset(cls: Any, is_built: Callable[[], bool], *args: Any) -> Any:
        """Build a dataset of class ``cls``, or a TokenBlend if the weights count tokens."""
        if cls is BlendedDataset and _weighs_tokens(*args[1:]):
            cls = TokenBlend
        return BlendedMegatronDatasetBuilder.build_generic_dataset(cls, is_built, *args)


def _weighs_tokens(parts: list, weights: list, size: int | None, config: DocumentConfig) -> bool:
    """Return whether the user gives weights, and they count tokens.

    Without weights, Megatron weights each corpus by its number of documents, so the tokens of all
    corpora are mixed evenly.
    """
    blend = config.blend or config.blend_per_split[parts[0].index_split.value]
    return config.blend_by == TOKENS and size is not None and blend[1] is not None
