"""MoE in certificates."""

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any, override

from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_epp.mcore.kinds.certificate_base import LayerCertificate
from megatron_epp.mcore.kinds.local_layers import norm_as_engines
from megatron_epp.mcore.kinds.moe.biases import fix_expert_biases
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from megatron_epp.mcore.kinds.moe.limits import (
    balancing_types,
    halves_chunks,
    has_experts,
    lockstep_width,
)
from megatron_epp.mcore.kinds.moe.router import halve_experts

SMALL_EXPERTS = 8
MOST_CHOSEN = 4
MOST_GROUPS = 4
HALVED_FROM = 16  # tokens of a chunk that experts process in halves


class MoECertificate(LayerCertificate):
    """Certificate of MoE layers.

    The small model has at least 8 experts, unless the full model has fewer. A token chooses at most
    4 experts. The small model has groups of experts, shared experts and latents if the full model
    has them. The widths of experts, shared experts and latents have the full model's ratio to the
    hidden size, or 4 if the ratio is larger. The widths are then rounded.
    """

    KIND = MoEKind()

    @override
    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not args.num_experts:
            return {}
        self.KIND.require(args, tp)
        ranks, chosen = args.expert_model_parallel_size, args.moe_router_topk
        changed: dict[str, Any] = {}
        if args.moe_router_num_groups:
            groups = min(args.moe_router_num_groups, MOST_GROUPS)
            reached = args.moe_router_group_topk or 1
            of_group = max(1, min(2, chosen // reached))  # of a token, in each group it reaches
            reached = max(1, min(reached, groups // 2))
            chosen = reached * of_group
            changed |= {"moe_router_num_groups": groups, "moe_router_group_topk": reached}
            multiple, least = lcm(groups, ranks), groups * (of_group + 2)
        else:
            chosen = min(chosen, MOST_CHOSEN)
            multiple, least = ranks, 2 * chosen
        experts = -(-max(least, SMALL_EXPERTS) // multiple) * multiple
        changed |= {"num_experts": min(experts, args.num_experts), "moe_router_topk": chosen}
        # flex runs in bf16 only, and on several ranks.
        if getattr(args, "moe_token_dispatcher_type", None) == "flex":
            changed["moe_token_dispatcher_type"] = "alltoall"
        for name in (
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "moe_latent_size",
        ):
            if getattr(args, name):
                fraction = min(getattr(args, name) / args.hidden_size, 4.0)
                unit = tp * max(8, step)
                changed[name] = max(1, round(fraction * hidden / unit)) * unit
        return changed

    def without_ties(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """Return a top-k that chooses all experts: rounding may decide between similar scores."""
        changed = {"moe_router_topk": small["num_experts"]} if small.get("num_experts") else {}
        if groups := small.get("moe_router_num_groups"):
            changed["moe_router_group_topk"] = groups
        return changed

    @override
    def mix_paths(self, models: Sequence[Any], args: Any) -> None:
        if has_experts(args) and halves_chunks(args):
            halve_experts(models, HALVED_FROM)

    @override
    def small_words(self, args: Any) -> list[str]:
        if not args.num_experts:
            return []
        ranks, lockstep = args.expert_model_parallel_size, lockstep_width(args)
        chosen = f"{args.num_experts} experts, {args.moe_router_topk} of a token"
        words = [f"{chosen}, over {ranks} ranks"]
        words += [f"{lockstep} replicas in lockstep"] * (lockstep > 1)
        words += [args.moe_router_score_function]
        words += ["shared experts"] * bool(args.moe_shared_expert_intermediate_size)
        words += [f"latents of {args.moe_latent_size}"] * bool(args.moe_latent_size)
        words += [f"{args.moe_router_num_groups} groups"] * bool(args.moe_router_num_groups)
        words += ["expert bias"] * args.moe_router_enable_expert_bias
        words += [" and ".join(balancing_types(args))]
        words += ["z-loss"] * bool(args.moe_z_loss_coeff)
        if isinstance(args.moe_layer_freq, list):
            words += ["layers " + "".join("de"[kind] for kind in args.moe_layer_freq)]
        words += ["large chunks in two halves of rows"] * halves_chunks(args)
        return words

    @override
    def fix_reference(self, layer: Any, by_engine: bool) -> None:
        fix_expert_biases(layer.mlp)
        router = layer.mlp.router
        count = router._apply_expert_bias  # it fails with a mask

        def count_tokens(routing_map_TE: Any, padding_mask: Any = None) -> None:
            if padding_mask is not None:
                routing_map_TE = routing_map_TE & ~padding_mask[:, None]
            count(routing_map_TE)

        router._apply_expert_bias = count_tokens
        if by_engine:
            norm_as_engines(layer)

    @override
    def weigh_losses(self, scale: Any) -> None:
        MoEAuxLossAutoScaler.set_loss_scale(scale)

    @override
    def forget_losses(self) -> None:
        get_moe_metrics_tracker().metrics.clear()

    @override
    def finish_reference(self, model: Any, config: Any) -> None:
        if config.moe_router_enable_expert_bias:
            _update_router_expert_bias([model], config)
        if has_experts(config):
            reset_model_temporary_tensors(config, [model])
