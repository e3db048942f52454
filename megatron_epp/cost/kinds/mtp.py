"""Multi-token prediction (MTP): projection and norms around the layers of an MTP layer."""

from dataclasses import dataclass

from megatron_epp.cost.kinds.base import Part, Sizes


@dataclass(frozen=True)
class MTPSizes(Sizes):
    """Size of an MTP layer.

    Attributes:
        predicts: whether the layer starts an MTP layer, for which the LM head runs once more.
    """

    predicts: bool = False


class MTPPart(Part):
    """Projection of the hidden state and the next token's embedding, and three norms.

    Two norms precede the projection, one for each input; one norm follows the layer. The layer's
    recompute modes do not apply to the projection and the norms. The additional run of the LM head
    and the norm before it are part of the LM head (cost/ends.py).
    """

    MIXER, BEFORE_LAYER, WORD, ALONE = False, True, "further", "further"

    @classmethod
    def there(cls, shape: MTPSizes) -> bool:
        """Return whether a layer of ``shape`` starts an MTP layer."""
        return shape.predicts

    @property
    def parameters(self) -> int:
        """Parameters of the projection and the norms."""
        hidden = self.model.hidden
        return 2 * hidden * hidden + 3 * hidden

    @property
    def saved(self) -> int:
        """Channels saved from F to B: inputs of two norms, and of the projection."""
        return 4 * self.model.hidden

    @property
    def weight_inputs(self) -> int:
        """Channels saved from I to W."""
        return 3 * self.model.hidden

    @property
    def heads(self) -> int:
        """One additional run of the LM head."""
        return 1

    @property
    def gathers(self) -> bool:
        """Whether the hidden state is gathered within a TP group."""
        return True
