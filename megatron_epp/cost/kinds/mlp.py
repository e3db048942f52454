"""The dense MLP."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import Part, RecomputedModule, Sizes


@dataclass(frozen=True)
class MLPSizes(Sizes):
    """mlp: whether the layer has an MLP, dense or experts; ffn_hidden: of a dense one, 0: the
    model's."""

    mlp: bool = True
    ffn_hidden: int = 0


class MLPPart(Part):
    """Two matrices, or three with a gate."""

    MIXER, DEFAULT, WORD, ALONE = False, True, "dense", "mlp"

    @classmethod
    def there(cls, shape: Any) -> bool:
        return shape.mlp and not shape.experts

    @property
    def dense_hidden(self) -> int:
        """Hidden size of the MLP that every token goes through."""
        return self.shape.ffn_hidden or self.model.ffn_hidden

    @property
    def matrices(self) -> int:
        return 3 if self.model.gated else 2

    @property
    def parameters(self) -> int:
        return self.model.hidden * (self.dense_hidden * self.matrices + 1)

    @property
    def _inside(self) -> int:
        """Channels that it saves, its norm apart."""
        return self.dense_hidden * self.matrices

    @property
    def saved(self) -> int:
        return 2 * self.model.hidden + self._inside

    @property
    def weight_inputs(self) -> int:
        return 2 * self.model.hidden + self.dense_hidden * self.matrices

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        norm = RecomputedModule(self.model.hidden, light=True)
        products = self.parameters - self.model.hidden + self.routed.active
        return {"mlp": RecomputedModule(self._inside, products), "layernorm": norm}

    @property
    def gathers(self) -> bool:
        return self.dense_hidden > 0
