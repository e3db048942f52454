"""Mixture of experts (MoE) instead of the dense MLP, optionally with a shared expert."""

from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import MOVED, RecomputedModule, RoutedExperts
from megatron_epp.cost.kinds.mlp import MLPPart, MLPSizes

# Grouped products of experts with this many channels take twice as long per flop as wide ones. The
# excess falls with the square of the channels. Fitted to `vllm-experts-h200` and the step times of
# Qwen3.
NARROW_EXPERT = 500.0
# Host time to issue the products of one expert, as a fraction of that of a dense layer. The host
# of a layer with 128 experts takes 4.7 times as long forward and 6.1 times as long backward
# (scripts/bench/results/2026-11-27-h200.md).
HOST_OF_EXPERT = 0.034


@dataclass(frozen=True)
class MoESizes(MLPSizes):
    """Sizes of experts.

    Attributes:
        experts: number of experts; 0: the MLP is dense.
        active_experts: number of experts of a token (top-k).
        expert_hidden: hidden size of an expert.
        shared_hidden: hidden size of the shared expert; 0: none.
        expert_latent: channels to which a token's hidden state is projected before the experts, and
            from which it is projected back; 0: experts process the hidden state itself.
    """

    experts: int = 0
    active_experts: int = 0
    expert_hidden: int = 0
    shared_hidden: int = 0
    expert_latent: int = 0

    def require(self) -> None:
        """Raise a ValueError if the sizes are inconsistent."""
        for name in ("active_experts", "expert_hidden", "shared_hidden", "expert_latent"):
            if getattr(self, name) and not self.experts:
                raise ValueError(f"{name} {getattr(self, name)}: expected experts with it")
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
    """Router, experts, optional shared expert, and optional latent projections around them.

    Tokens are assumed to be distributed evenly over the experts. The constant time per chunk is
    five times that of a dense layer, because of the router, the all-to-all and the wait for its
    sizes. The factor is fitted to public measurements.
    """

    DEFAULT, WORD, ALONE, MODES, LAUNCHES = False, "experts", "experts", "e", 5

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has experts."""
        return shape.mlp and shape.experts > 0

    @property
    def dense_hidden(self) -> int:
        """Hidden size of the shared expert, which processes every token."""
        return self.shape.shared_hidden

    @property
    def parameters(self) -> int:
        """Number of parameters, without those of routed experts."""
        router_and_projections = self.shape.experts + 2 * self.shape.expert_latent
        return super().parameters + self.model.hidden * router_and_projections

    @property
    def _width(self) -> int:
        """Channels that are sent to an expert and back."""
        return self.shape.expert_latent or self.model.hidden

    @property
    def _one_expert(self) -> int:
        return self._width * self.shape.expert_hidden * self.matrices

    @property
    def routed(self) -> RoutedExperts:
        """Routed experts; tokens are sorted by expert before them and unsorted after them."""
        copies, narrow = self.shape.active_experts, NARROW_EXPERT / self.shape.expert_hidden
        sent, active = copies * self._width, copies * self._one_expert
        return RoutedExperts(
            parameters=self.shape.experts * self._one_expert,
            active=active,
            copies=copies,
            weight_inputs=copies * (2 * self._width + self.shape.expert_hidden * self.matrices),
            exchanged=sent,
            permuted=2.0 * sent,
            narrow_flops=2.0 * active * narrow**2,
            issue=HOST_OF_EXPERT * self.shape.experts,
        )

    @property
    def _inside(self) -> int:
        """Channels that the sublayer saves in addition to those of its norm.

        These are inputs and inner channels of the experts, the router's outputs, the latents that
        experts return, and the shared expert's channels.
        """
        each = self._width + self.shape.expert_hidden * self.matrices
        once = self.shape.experts + self.shape.expert_latent
        return super()._inside + self.shape.active_experts * each + once

    @property
    def moved(self) -> float:
        """Channels that kernels read or write, except experts' inputs, which ``routed`` counts."""
        return MOVED * (self.saved - self.shape.active_experts * self._width)

    @property
    def weight_inputs(self) -> int:
        """Channels saved from I to W; I computes the router's weight gradient."""
        latent = self.shape.expert_latent
        dense = super().weight_inputs if self.dense_hidden or latent else 0
        return self.routed.weight_inputs + dense + 2 * latent

    @property
    def recomputed(self) -> dict[str, RecomputedModule]:
        """Modules that selective recomputation supports."""
        activation = self.shape.active_experts * self.shape.expert_hidden
        return {**super().recomputed, "moe_act": RecomputedModule(activation, light=True)}
