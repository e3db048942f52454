"""A layer kind in certificates: how it is made small, and what the reference model does for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_epp.certify.allowed_collectives import AllowedCollective
from megatron_epp.mcore.kinds.base import LayerKind

if TYPE_CHECKING:
    from torch import Tensor


class LayerCertificate:
    """A layer kind in a certificate. By default a hook has nothing to say.

    KIND         its flags
    COLLECTIVES  that its layers issue
    """

    KIND: LayerKind
    COLLECTIVES: tuple[AllowedCollective, ...] = ()

    # -------------------------------------------------------------- the small model

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        """Return values by destination that make it small. ``step``: a rank's part of a matrix has
        a multiple of it of rows and columns. ValueError: one line."""
        return {}

    def without_ties(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """Return changes to values by destination of the ``small`` model with which no rounding
        decides what it computes."""
        return {}

    def small_words(self, args: Any) -> list[str]:
        """Return words on it for readers of a certificate."""
        return []

    def read_pattern(self, args: Any, symbols: str) -> None:
        """Set in ``args`` what Megatron takes from the pattern."""

    def splits(self, args: Any) -> bool:
        """Return whether plans may split the backward of its layers."""
        return True

    def shrink_blocks(self) -> None:
        """Make blocks of rows that are computed at a time as small as the small model wants."""

    # -------------------------------------------------------------- the reference model

    def fix_reference(self, layer: Any, by_engine: bool) -> None:
        """Fix Megatron's ``layer`` where it computes wrongly, and, ``by_engine``, has other keys
        than Transformer Engine's."""

    def make_double(self, args: Any) -> None:
        """Have what Megatron casts to float32 by name compute in float64."""

    def adds_losses(self, holder: Any) -> bool:
        """Return whether its layers add losses of their own, of all that is computed together;
        ``holder``: flags, or a model's configuration."""
        return False

    def weigh_losses(self, scale: Tensor) -> None:
        """Have the losses that its layers add count ``scale`` times."""

    def forget_losses(self) -> None:
        """Forget the losses of its layers that Megatron's log holds."""

    def finish_reference(self, model: Any, config: Any) -> None:
        """Do for the reference ``model`` what finalize_model_grads does after an iteration."""
