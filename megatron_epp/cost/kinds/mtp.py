"""Multi-token prediction (MTP): an MTP layer's projection and norms."""

from dataclasses import dataclass

from megatron_epp.cost.kinds.base import Decoder, Part, Sizes, Sublayer


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

    @classmethod
    def of(cls, model: Decoder, shape: MTPSizes) -> Sublayer:
        """Return the quantities of the projection and the norms, and a run of the LM head."""
        hidden = model.hidden
        return Sublayer(
            parameters=2 * hidden * hidden + 3 * hidden,
            saved=4 * hidden,  # inputs of two norms, and of the projection
            weight_inputs=3 * hidden,
            recomputed={},
            heads=1,
            gathers=1,
        )
