"""Dense MLP."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import Part, RecomputedModule, Sizes


@dataclass(frozen=True)
class MLPSizes(Sizes):
    """Sizes of an MLP.

    Attributes:
        mlp: whether the layer has an MLP, dense or MoE.
        ffn_hidden: hidden size of a dense MLP; 0: as in the model.
    """

    mlp: bool = True
    ffn_hidden: int = 0


class MLPPart(Part):
    """MLP of two matrices, or three with a gate."""

    MIXER, DEFAULT, WORD, ALONE = False, True, "dense", "mlp"

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has a dense MLP."""
        return shape.mlp and not shape.experts

    @property
    def dense_hidden(self) -> int:
        """Hidden size of the MLP that processes every token."""
        return self.shape.ffn_hidden or self.model.ffn_hidden

    @property
    def matrices(self) -> int:
        """Number of weight matrices."""
        return 3 if self.model.gated else 2

    @property
    def parameters(self) -> int:
        """Parameters of the matrices and of the norm."""
        return self.model.hidden * (self.dense_hidden * self.matrices + 1)

    @property
    def _inside(self) -> int:
        """Channels that the MLP saves in addition to those of its norm."""
        return self.dense_hidden * self.matrices

    @property
    def saved(self) -> int:
        """Channels saved from F to B."""
        return 2 * self.model.hidden + self._inside

    @property
    def weight_inputs(self) -> int:
        """Channels saved from I to W."""
        return 2 * self.model.hidden + self.dense_hidden * self.matrices

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        """Modules that selective recomputation supports."""
        norm = RecomputedModule(self.model.hidden, light=True)
        products = self.parameters - self.model.hidden + self.routed.active
        return {"mlp": RecomputedModule(self._inside, products), "layernorm": norm}

    @property
    def gathers(self) -> bool:
        """Whether the hidden state is gathered within a TP group."""
        return self.dense_hidden > 0
