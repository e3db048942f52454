"""Experts in the place of the dense MLP, in Megatron."""

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any, ClassVar

from megatron_epp.cost.kinds.moe import MoEPart
from megatron_epp.mcore.kinds.base import LayerKind, LayerPlace, mask_of_layers
from megatron_epp.mcore.kinds.mlp.kind import MLPKind
from megatron_epp.mcore.kinds.moe.limits import (
    MOE_LIMITS,
    MOE_REPLACED,
    SINKHORN,
    balancing_types,
    expert_ranks,
    has_experts,
    lockstep_width,
)

SMALL_EXPERTS = 8
MOST_CHOSEN = 4
MOST_GROUPS = 4


class MoEKind(LayerKind):
    """--num-experts, --moe-layer-freq or the pattern.

    Scaled down are experts (to 8, or twice what a token chooses), experts of a token (to 4) and
    widths. Kept: groups of experts and how many a token may reach, experts per rank of expert
    parallelism at least two where the model has them, shared experts, how an expert's width, the
    shared experts' and the latents' compare with the hidden size.
    """

    PRICED, NAME, LETTER, SLOT = MoEPart, "experts", "E", "mlp"
    TIMED: ClassVar = MLPKind.TIMED
    STACK = "moe_layer"
    FLAGS: ClassVar = {"num_experts": None}
    LIMITS, REPLACED = MOE_LIMITS, MOE_REPLACED

    def layers(self, args: Any) -> tuple[bool, ...]:
        if not args.num_experts:
            return (False,) * args.num_layers
        every = args.moe_layer_freq
        if getattr(args, "hybrid_layer_pattern", None):
            return super().layers(args)
        if isinstance(every, int):
            return tuple(layer % every == 0 for layer in range(args.num_layers))
        return mask_of_layers("--moe-layer-freq", every, args.num_layers)

    def sizes(self, args: Any) -> dict[str, Any]:
        return {
            "experts": args.num_experts,
            "active_experts": args.moe_router_topk,
            "expert_hidden": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "shared_hidden": args.moe_shared_expert_intermediate_size or 0,
            "expert_latent": args.moe_latent_size or 0,
        }

    def cost_sizes(self, args: Any) -> dict[str, Any]:
        return {"ep": expert_ranks(args)} if args.num_experts else {}

    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        if not args.num_experts or getattr(args, "hybrid_layer_pattern", None) is not None:
            return {}
        return {"moe_layer_freq": 1 if all(mask) else [int(there) for there in mask]}

    def words(self, args: Any) -> list[str]:
        if not args.num_experts:
            return []
        hidden = args.moe_ffn_hidden_size or args.ffn_hidden_size
        words = [f"{args.moe_router_topk} of {args.num_experts} experts of {hidden}"]
        if args.moe_shared_expert_intermediate_size:
            words.append(f"shared {args.moe_shared_expert_intermediate_size}")
        if args.moe_latent_size:
            words.append(f"on latents of {args.moe_latent_size}")
        if args.expert_model_parallel_size > 1:
            words.append(f"ep {args.expert_model_parallel_size}")
        if args.expert_tensor_parallel_size > 1:
            words.append(f"etp {args.expert_tensor_parallel_size}")
        return [*words, f"exchanged by {args.moe_token_dispatcher_type}"]

    def require(self, args: Any, tp: int) -> None:
        """Every rank must hold as many of the experts as any other, and a token can choose no more
        than there are."""
        experts = getattr(args, "num_experts", None)
        if not experts:
            return
        ranks, chosen = args.expert_model_parallel_size, args.moe_router_topk
        if experts % ranks:
            raise ValueError(
                f"--num-experts {experts}: does not divide over --expert-model-parallel-size "
                f"{ranks}; expected a multiple of it"
            )
        if not 1 <= chosen <= experts:
            raise ValueError(
                f"--moe-router-topk {chosen}: expected 1 to {experts}, the number of --num-experts"
            )
        groups = getattr(args, "moe_router_num_groups", None)
        if groups and experts % groups:
            raise ValueError(
                f"--num-experts {experts}: does not divide into --moe-router-num-groups {groups}; "
                "expected a multiple of it"
            )

    def refuse(self, args: Any) -> None:
        blocks, replicas = lockstep_width(args), getattr(args, "data_parallel_size", None)
        if replicas is not None and replicas % blocks:
            raise ValueError(
                f"--expert-model-parallel-size {args.expert_model_parallel_size}: with "
                f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} experts are "
                f"spread over {blocks} replicas; expected that to divide the {replicas} of the job"
            )

    def wants_whole(self, args: Any) -> bool:
        return has_experts(args) and SINKHORN in balancing_types(args)

    def unfit_pattern(self, args: Any, letters: str) -> str | None:
        there = self.LETTER in letters
        if there == bool(args.num_experts):
            return None
        return (
            f"{'layers' if there else 'no layer'} of experts ({self.LETTER}), and --num-experts "
            f"{args.num_experts or 'is not given'}; expected both or neither"
        )

    def active(self, config: Any) -> int:
        return (getattr(config, "moe_router_topk", None) or 1) if has_experts(config) else 1

    def replays(self, config: Any) -> bool:
        return has_experts(config)  # what routers recorded

    def lockstep(self, args: Any) -> int:
        """More than 1 where a layer's experts lie over several replicas: Megatron spreads them over
        the ranks of a stage in order."""
        return lockstep_width(args)

    def layer_groups(self, holder: Any) -> list[Any]:
        from megatron.core import parallel_state as mpu

        if not has_experts(holder):
            return []
        groups = [mpu.get_expert_model_parallel_group(), mpu.get_expert_tensor_parallel_group()]
        return [*groups, mpu.get_expert_tensor_and_model_parallel_group()]

    def trainer_groups(self, args: Any) -> list[Any]:
        from megatron.core import parallel_state as mpu

        if not has_experts(args):
            return []
        return [
            mpu.get_expert_data_parallel_group(),
            mpu.get_expert_tensor_model_pipeline_parallel_group(),
            mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        ]

    def meets_others(self, config: Any, replica: Sequence[int]) -> bool:
        """Experts that are spread over replicas, or balanced over all of them."""
        import torch.distributed as dist
        from megatron.core import parallel_state as mpu

        if has_experts(config):
            group = mpu.get_expert_tensor_and_model_parallel_group()
            if not set(dist.get_process_group_ranks(group)) <= set(replica):
                return True
        several = mpu.get_data_parallel_world_size() > 1
        return several and "global_aux_loss" in balancing_types(config)

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        if not args.num_experts:
            return {}
        self.require(args, tp)
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
        for name in (
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
            "moe_latent_size",
        ):
            if getattr(args, name):
                share = min(getattr(args, name) / args.hidden_size, 4.0)
                unit = tp * max(8, step)
                changed[name] = max(1, round(share * hidden / unit)) * unit
        return changed

    def without_ties(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """Every token goes to every expert: of two that are about as good, rounding chooses."""
        changed = {"moe_router_topk": small["num_experts"]} if small.get("num_experts") else {}
        if groups := small.get("moe_router_num_groups"):
            changed["moe_router_group_topk"] = groups
        return changed

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
        return words

    def splits(self, args: Any) -> bool:
        """Not where products of experts are in groups, as a HybridModel's are."""
        groups = args.moe_grouped_gemm or args.hybrid_layer_pattern is not None
        return args.transformer_impl == "local" or not has_experts(args) or not groups

    def mend_plain(self, layer: Any, by_engine: bool) -> None:
        from megatron_epp.mcore.kinds.local_layers import norm_as_engines
        from megatron_epp.mcore.kinds.moe.biases import fix_expert_biases

        fix_expert_biases(layer.mlp)
        router = layer.mlp.router
        count = router._apply_expert_bias  # which fails where it is given a mask

        def count_tokens(routing_map_TE: Any, padding_mask: Any = None) -> None:
            if padding_mask is not None:
                routing_map_TE = routing_map_TE & ~padding_mask[:, None]
            count(routing_map_TE)

        router._apply_expert_bias = count_tokens
        if by_engine:
            norm_as_engines(layer)

    def weighs_besides(self, holder: Any) -> bool:
        balanced = {*balancing_types(holder)} - {"none"}
        return has_experts(holder) and bool(holder.moe_z_loss_coeff or balanced)

    def unshared(self, holder: Any) -> str:
        return "experts, whose routers count the tokens of documents" if has_experts(holder) else ""

    def weigh_losses(self, scale: Any) -> None:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.set_loss_scale(scale)

    def finish_plain(self, model: Any, config: Any) -> None:
        from megatron.core.distributed.finalize_model_grads import (
            _update_router_expert_bias,
            reset_model_temporary_tensors,
        )

        if config.moe_router_enable_expert_bias:
            _update_router_expert_bias([model], config)
        if has_experts(config):
            reset_model_temporary_tensors(config, [model])

    def mend_local(self, layer: Any, config: Any) -> None:
        if getattr(config, "moe_latent_size", None):
            from megatron_epp.mcore.kinds.moe.local import fix_latent_experts

            layer.mlp = fix_latent_experts(layer.mlp)

    def local_layer(self, config: Any) -> Any:
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.transformer.spec_utils import ModuleSpec
        from megatron.core.transformer.transformer_layer import MoETransformerLayer

        from megatron_epp.mcore.kinds.local_layers import feed_forward

        experts = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts or 1)
        return ModuleSpec(module=MoETransformerLayer, submodules=feed_forward(config, experts))

    def holds(self, module: Any) -> bool:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        return isinstance(module, MoELayer)

    def prepare(self, config: Any) -> None:
        from megatron_epp.mcore.kinds.moe.router import prepare_log

        if has_experts(config):
            prepare_log(config)

    def keep_outside(self, model: Any) -> None:
        if has_experts(model.config):
            from megatron_epp.mcore.kinds.moe.router import keep_routers_outside

            keep_routers_outside(model)

    def install(self, place: LayerPlace) -> None:
        from megatron_epp.mcore.kinds.moe.router import install_in_moe

        install_in_moe(place.layer, place.index, place.dropped)

    def changed(self, model: Any) -> list[Any]:
        from megatron_epp.mcore.kinds.moe.router import routing_tensors

        return routing_tensors(model)
