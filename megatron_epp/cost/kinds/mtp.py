"""Prediction of a further token: what comes in front of a layer that predicts one."""

from dataclasses import dataclass

from megatron_epp.cost.kinds.base import Part, Sizes


@dataclass(frozen=True)
class MTPSizes(Sizes):
    """predicts: whether the layer begins the prediction of a further token, and the output layer
    runs once more for it."""

    predicts: bool = False


class MTPPart(Part):
    """A projection of the hidden state and the next token's embedding, and three norms: theirs, and
    the one behind the layer. No recompute letter of the layer runs it again.

    The output layer that runs once more is the output layer's (cost/output_layer.py), wherever that
    lies; the norm in front of it counts with it.
    """

    MIXER, BEFORE_LAYER, WORD, ALONE = False, True, "further", "further"

    @classmethod
    def there(cls, shape: MTPSizes) -> bool:
        return shape.predicts

    @property
    def parameters(self) -> int:
        hidden = self.model.hidden
        return 2 * hidden * hidden + 3 * hidden

    @property
    def saved(self) -> int:
        """Inputs of two norms, and of the projection."""
        return 4 * self.model.hidden

    @property
    def weight_inputs(self) -> int:
        return 3 * self.model.hidden

    @property
    def heads(self) -> int:
        return 1

    @property
    def gathers(self) -> bool:
        return True
