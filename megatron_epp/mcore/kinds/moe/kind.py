"""Mixture of experts (MoE) in Megatron's flags."""

from collections.abc import Sequence
from typing import Any, ClassVar, override

from megatron_epp.cost.kinds.moe import MoEPart
from megatron_epp.mcore.kinds.base import LayerKind, mask_of_layers
from megatron_epp.mcore.kinds.mlp.kind import MLPKind
from megatron_epp.mcore.kinds.moe.limits import (
    MOE_LIMITS,
    MOE_REPLACED,
    balancing_types,
    expert_ranks,
    halves_chunks,
    has_experts,
    lockstep_width,
)


class MoEKind(LayerKind):
    """MoE: --num-experts with --moe-layer-freq or --hybrid-layer-pattern."""

    PRICED, NAME, SYMBOL, SLOT = MoEPart, "experts", "E", "mlp"
    TIMED: ClassVar = MLPKind.TIMED
    STACK = "moe_layer"
    FLAGS: ClassVar = {"num_experts": None}
    PRICED_FLAGS = ("moe_token_dispatcher_type",)
    LIMITS, REPLACED = MOE_LIMITS, MOE_REPLACED

    @override
    def layers(self, args: Any) -> tuple[bool, ...]:
        if not args.num_experts:
            return (False,) * args.num_layers
        every = args.moe_layer_freq
        if getattr(args, "hybrid_layer_pattern", None):
            return super().layers(args)
        if isinstance(every, int):
            return tuple(layer % every == 0 for layer in range(args.num_layers))
        return mask_of_layers("--moe-layer-freq", every, args.num_layers)

    @override
    def sizes(self, args: Any) -> dict[str, Any]:
        return {
            "experts": args.num_experts,
            "active_experts": args.moe_router_topk,
            "expert_hidden": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "shared_hidden": args.moe_shared_expert_intermediate_size or 0,
            "expert_latent": args.moe_latent_size or 0,
        }

    @override
    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        if not args.num_experts or getattr(args, "hybrid_layer_pattern", None) is not None:
            return {}
        return {"moe_layer_freq": 1 if all(mask) else [int(there) for there in mask]}

    @override
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
        """Raise a ValueError if --num-experts does not fit the ranks, groups or top-k."""
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

    @override
    def refuse(self, args: Any) -> None:
        blocks, replicas = lockstep_width(args), getattr(args, "data_parallel_size", None)
        if replicas is not None and replicas % blocks:
            raise ValueError(
                f"--expert-model-parallel-size {args.expert_model_parallel_size}: with "
                f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} experts are "
                f"sharded over {blocks} replicas; expected that to divide the {replicas} of the job"
            )

    @override
    def unfit_pattern(self, args: Any, symbols: str) -> str | None:
        there = self.SYMBOL in symbols
        if there == bool(args.num_experts):
            return None
        return (
            f"{'layers' if there else 'no layer'} of experts ({self.SYMBOL}), and --num-experts "
            f"{args.num_experts or 'is not given'}; expected both or neither"
        )

    @override
    def active(self, config: Any) -> int:
        return (getattr(config, "moe_router_topk", None) or 1) if has_experts(config) else 1

    @override
    def left_out_of_loops(self, config: Any) -> str:
        unsplit = has_experts(config) and halves_chunks(config)
        return "; experts do not compute chunks in halves" * unsplit

    @override
    def replays(self, config: Any) -> bool:
        return has_experts(config)  # what routers recorded

    @override
    def expert_ranks(self, args: Any) -> int:
        return expert_ranks(args) if has_experts(args) else 1

    @override
    def layer_groups(self, holder: Any) -> list[Any]:
        from megatron.core import parallel_state as mpu

        if not has_experts(holder):
            return []
        groups = [mpu.get_expert_model_parallel_group(), mpu.get_expert_tensor_parallel_group()]
        if "global_aux_loss" in balancing_types(holder):
            groups.append(mpu.get_tensor_and_data_parallel_group(with_context_parallel=True))
        return [*groups, mpu.get_expert_tensor_and_model_parallel_group()]

    @override
    def trainer_groups(self, args: Any) -> list[Any]:
        from megatron.core import parallel_state as mpu

        if not has_experts(args):
            return []
        return [
            mpu.get_expert_data_parallel_group(),
            mpu.get_expert_tensor_model_pipeline_parallel_group(),
            mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        ]
