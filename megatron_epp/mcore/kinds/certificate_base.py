"""Base class of a layer kind in certificates: its small model, and fixes of the reference model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_epp.certify.allowed_collectives import AllowedCollective
from megatron_epp.mcore.kinds.base import LayerKind

if TYPE_CHECKING:
    from torch import Tensor


class LayerCertificate:
    """A layer kind in a certificate; by default its methods do nothing.

    Attributes:
        KIND: Its flags.
        COLLECTIVES: Collectives that its layers issue.
    """

    KIND: LayerKind
    COLLECTIVES: tuple[AllowedCollective, ...] = ()

    # -------------------------------------------------------------- the small model

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        """Return values by destination that make the model small.

        Args:
            args: Megatron's arguments of the full model.
            hidden: Hidden size of the small model.
            tp: Tensor-parallel ranks.
            head_size: Size of a head of the small model.
            step: Rows and columns of a rank's matrix must be a multiple of it.

        Raises:
            ValueError: The sizes are inconsistent.
        """
        return {}

    def without_ties(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """Return changes of ``small`` after which rounding decides no discrete choice."""
        return {}

    def small_words(self, args: Any) -> list[str]:
        """Return words on the kind for readers of a certificate."""
        return []

    def read_pattern(self, args: Any, symbols: str) -> None:
        """Set on ``args`` what Megatron derives from the pattern."""

    def splits(self, args: Any) -> bool:
        """Return whether plans may split the backward of its layers."""
        return True

    def shrink_blocks(self) -> None:
        """Reduce the blocks of rows that are computed at a time to the small model's size."""

    # -------------------------------------------------------------- the reference model

    def fix_reference(self, layer: Any, by_engine: bool) -> None:
        """Fix errors of Megatron's ``layer``; ``by_engine``: give it Transformer Engine's keys."""

    def make_double(self, args: Any) -> None:
        """Make what Megatron casts to float32 by name compute in float64."""

    def adds_losses(self, holder: Any) -> bool:
        """Return whether its layers add losses that depend on all that is computed together.

        ``holder`` is the flags or the model's configuration.
        """
        return False

    def weigh_losses(self, scale: Tensor) -> None:
        """Multiply the losses that its layers add by ``scale``."""

    def forget_losses(self) -> None:
        """Clear the losses of its layers in Megatron's log."""

    def finish_reference(self, model: Any, config: Any) -> None:
        """Do for the reference ``model`` what finalize_model_grads does after an iteration."""
