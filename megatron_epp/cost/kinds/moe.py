"""Experts in the place of the dense MLP, and one that every token goes to besides."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import MOVED, RecomputedModule, RoutedExperts
from megatron_epp.cost.kinds.mlp import MLPPart, MLPSizes

# Grouped products of experts of so many channels take twice as long as wide ones', others by the
# square of their channels: fitted to `vllm-experts-h200` and the steps of Qwen3.
NARROW_EXPERT = 500.0


@dataclass(frozen=True)
class MoESizes(MLPSizes):
    """The sizes of experts.

    experts           in the place of the dense MLP; 0: none
    active_experts    of them that a token goes to
    expert_hidden     of each
    shared_hidden     of an expert that every token goes to besides; 0: none
    expert_latent     channels that a token's hidden state is projected to for experts, and back
                      from behind them; 0: they take the hidden state
    """

    experts: int = 0
    active_experts: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    expert_latent: int = 0

    def require(self) -> None:
        for name in ("active_experts", "expert_hidden", "shared_hidden", "expert_latent"):
            if getattr(self, name) and not self.experts:
                raise ValueError(f"{name} {getattr(self, name)}: expected experts beside it")
        if self.experts and not 1 <= self.active_experts <= self.experts:
            raise ValueError(
                f"active_experts {self.active_experts}: expected 1 to {self.experts}, the experts"
            )
        if self.experts and not self.expert_hidden:
            raise ValueError("expert_hidden 0: expected the hidden size of an expert")
        if not self.mlp and (self.experts or self.ffn_hidden):
            raise ValueError("mlp false: experts and ffn_hidden have no effect; leave them out")
        super().require()


class MoEPart(MLPPart):
    """A router, experts, a shared expert where there is one, and where experts take latents two
    linears around them.

    Assumed: tokens go to all alike. A chunk's constant is five times a dense layer's, for the
    router, the exchanges and the wait for their sizes: fitted to public measurements.
    """

    DEFAULT, WORD, ALONE, MODES, LAUNCHES = False, "experts", "experts", "e", 5

    @classmethod
    def there(cls, shape: Any) -> bool:
        return shape.mlp and shape.experts > 0

    @property
    def dense_hidden(self) -> int:
        return self.shape.shared_hidden

    @property
    def parameters(self) -> int:
        router_and_projections = self.shape.experts + 2 * self.shape.expert_latent
        return super().parameters + self.model.hidden * router_and_projections

    @property
    def _width(self) -> int:
        """Channels of what goes to an expert, and comes back."""
        return self.shape.expert_latent or self.model.hidden

    @property
    def _one_expert(self) -> int:
        return self._width * self.shape.expert_hidden * self.matrices

    @property
    def routed(self) -> RoutedExperts:
        """Copies of a token are sorted by expert: written before the experts, read after them."""
        copies, narrow = self.shape.active_experts, NARROW_EXPERT / self.shape.expert_hidden
        sent, active = copies * self._width, copies * self._one_expert
        return RoutedExperts(
            parameters=self.shape.experts * self._one_expert,
            active=active,
            copies=copies,
            exchanged=sent,
            permuted=2.0 * sent,
            narrow_flops=2.0 * active * narrow**2,
        )

    @property
    def _inside(self) -> int:
        """The experts' inputs and insides, the router's outputs, and the latent that comes back,
        beside the shared one's."""
        each = self._width + self.shape.expert_hidden * self.matrices
        once = self.shape.experts + self.shape.expert_latent
        return super()._inside + self.shape.active_experts * each + once

    @property
    def moved(self) -> float:
        """Experts' inputs are only what ``routed.permuted`` counts."""
        return MOVED * (self.saved - self.shape.active_experts * self._width)

    @property
    def weight_inputs(self) -> int:
        inputs_and_gradients = 2 * self._width + self.shape.expert_hidden * self.matrices
        active = self.shape.active_experts * inputs_and_gradients
        once = self.shape.experts + 2 * self.shape.expert_latent
        return super().weight_inputs + active + once

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        activation = self.shape.active_experts * self.shape.expert_hidden
        return {**super().recomputed, "moe_act": RecomputedModule(activation, light=True)}
