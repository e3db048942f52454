"""Base class that adapts certificates (comparisons with a reference model) to a layer kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_epp.mcore.kinds.base import LayerKind

if TYPE_CHECKING:
    from torch import Tensor


class LayerCertificate:
    """Adaptation of certificates to a layer kind; by default, the methods change nothing.

    Attributes:
        KIND: Properties of the layer kind.
    """

    KIND: LayerKind

    # -------------------------------------------------------------- the small model

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        """Return the values of args, by name, that make layers of this kind small.

        Args:
            args: Megatron's arguments of the full model.
            hidden: Hidden size of the small model.
            tp: Number of tensor-parallel ranks.
            head_size: Channels of an attention head of the small model.
            step: Number that must divide the rows and the columns of each rank's matrices.

        Raises:
            ValueError: The sizes are inconsistent.
        """
        return {}

    def without_ties(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """Return changes to the flags ``small`` that make top-k independent of rounding errors."""
        return {}

    def small_words(self, args: Any) -> list[str]:
        """Return the words that describe this kind's small model in a certificate."""
        return []

    def read_pattern(self, args: Any, symbols: str) -> None:
        """Set the fields of ``args`` that Megatron derives from the layer symbols of a pattern."""

    def mix_paths(self, models: Sequence[Any], args: Any) -> None:
        """Make some chunks of ``models`` take each of the paths that can compute a layer."""

    def shrink_blocks(self) -> None:
        """Reduce block sizes of this package's layers, so that small models have several blocks."""

    # -------------------------------------------------------------- the reference model

    def fix_reference(self, layer: Any, by_engine: bool) -> None:
        """Fix errors of ``layer``; if ``by_engine``, set Transformer Engine's checkpoint keys."""

    def make_double(self, args: Any) -> None:
        """Patch computations that Megatron casts to float32, so that they run in float64."""

    def weigh_losses(self, scale: Tensor) -> None:
        """Set ``scale`` as the factor of the losses that layers of this kind add."""

    def forget_losses(self) -> None:
        """Clear the losses of layers of this kind in Megatron's log."""

    def finish_reference(self, model: Any, config: Any) -> None:
        """Run this kind's part of finalize_model_grads for the reference ``model``."""
