"""Mixture of experts (MoE) instead of the dense MLP, optionally with a shared expert."""

from dataclasses import dataclass, replace
from typing import Any

from megatron_epp.cost.kinds.base import Decoder, RecomputedModule, RoutedExperts, Sublayer
from megatron_epp.cost.kinds.mlp import MLPPart, MLPSizes, matrices, mlp

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
    five times that of a dense layer, because of the router, the all-to-all and the wait for the
    sizes of its messages. The factor is fitted to public measurements.
    """

    DEFAULT, WORD, ALONE, MODES, LAUNCHES = False, "experts", "experts", "e", 5

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has experts."""
        return shape.mlp and shape.experts > 0

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of the experts, of the shared expert and of all around them."""
        hidden, latent, shared = model.hidden, shape.expert_latent, mlp(model, shape.shared_hidden)
        copies = shape.active_experts
        width = latent or hidden  # channels sent to an expert and back
        inner = shape.expert_hidden * matrices(model)
        active, narrow = copies * width * inner, NARROW_EXPERT / shape.expert_hidden
        routed = RoutedExperts(
            parameters=shape.experts * width * inner,
            active=active,
            copies=copies,
            weight_inputs=copies * (2 * width + inner),
            exchanged=copies * width,
            permuted=2.0 * copies * width,  # sorted by expert before them, unsorted after them
            narrow_flops=2.0 * active * narrow**2,
            issue=HOST_OF_EXPERT * shape.experts,
        )
        parameters = shared.parameters + hidden * (shape.experts + 2 * latent)
        # Besides the shared expert's: inputs and inner channels of the experts, the router's
        # outputs, and the latents that experts return.
        saved = shared.saved + copies * (width + inner) + shape.experts + latent
        all_mlp = RecomputedModule(saved - 2 * hidden, parameters - hidden + active)
        act = RecomputedModule(copies * shape.expert_hidden, light=True)
        # I computes the router's weight gradient.
        dense_inputs = shared.weight_inputs if shape.shared_hidden or latent else 0
        return replace(
            shared,
            parameters=parameters,
            saved=saved,
            weight_inputs=routed.weight_inputs + dense_inputs + 2 * latent,
            recomputed={**shared.recomputed, "mlp": all_mlp, "moe_act": act},
            unmoved=copies * width,  # experts' inputs, which ``routed`` counts
            routed=routed,
        )
