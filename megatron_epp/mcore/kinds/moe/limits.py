"""Limits of MoE: Megatron's flags that are refused, or replaced by equivalent flags."""

from typing import Any

from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.kinds.limit import Limit, Test, is_set

_PER_DOCUMENT = frozenset({"aux_loss", "seq_aux_loss", "none"})


def lockstep_width(args: Any) -> int:
    """Return the number of replicas that share experts and run in lockstep; 1 without lockstep."""
    return max(1, expert_ranks(args) // dense_ranks(args)) if has_experts(args) else 1


def _apart() -> bool:
    """Return whether the ranks that share experts are not those of neighbouring replicas."""
    from megatron.core import parallel_state as mpu
    from torch.distributed import get_process_group_ranks as ranks_of

    if not mpu.model_parallel_is_initialized():
        return False
    experts = ranks_of(mpu.get_expert_tensor_and_model_parallel_group())
    dense = ranks_of(mpu.get_tensor_and_context_parallel_group())
    replicas, width = ranks_of(mpu.get_data_parallel_group()), len(experts) // len(dense)
    first = mpu.get_data_parallel_rank() // width * width
    me = replicas[mpu.get_data_parallel_rank()]
    together = (rank + other - me for rank in dense for other in replicas[first : first + width])
    return sorted(together) != sorted(experts)


def has_experts(holder: Any) -> bool:
    """Return whether ``holder``, which is args or a model's configuration, selects experts."""
    names = "num_experts", "num_moe_experts"
    return any(getattr(holder, name, None) for name in names)


def _if_experts(asked: Test) -> Test:
    return lambda args: has_experts(args) and bool(asked(args))


def expert_ranks(args: Any) -> int:
    """Return the number of ranks over which the experts of a layer are sharded.

    By default, Megatron shards each expert's matrices over the tensor-parallel ranks.
    """
    split = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    return int(args.expert_model_parallel_size * split)


def dense_ranks(args: Any) -> int:
    """Return the number of ranks of a stage in one replica: TP times CP."""
    return int(args.tensor_model_parallel_size * args.context_parallel_size)


def halves_chunks(args: Any) -> bool:
    """Return whether the experts of ``args`` can process a chunk in two halves of rows."""
    return expert_ranks(args) > 1 and obstacle_to_halves(args) is None


def obstacle_to_halves(args: Any) -> str | None:
    """Return the reason why experts process whole chunks (halves.py); None if there is none."""
    dispatcher = args.moe_token_dispatcher_type
    obstacles = {
        f"token dispatcher {dispatcher}": dispatcher != "alltoall",
        "expert tensor parallelism": expert_ranks(args) > args.expert_model_parallel_size,
        "row counts padded for fp8 or fp4": is_set(args, "moe_router_padding_for_quantization"),
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


# Required packages, by the name of Megatron's variable that reports them (fused_a2a.py).
_BACKENDS = {"deepep": "HAVE_DEEP_EP", "hybridep": "HAVE_HYBRIDEP"}


def _cannot_flex(holder: Any) -> bool:
    """Return whether the flex dispatcher is selected, but is not installed or cannot run chunks.

    The backend ncclep requires equal sizes of all chunks; deepep and hybridep support only bf16.
    ``holder`` is args or a model's configuration.
    """
    if getattr(holder, "moe_token_dispatcher_type", None) != "flex":
        return False
    deprecated = "deepep" if getattr(holder, "moe_enable_deepep", False) else None
    backend = deprecated or getattr(holder, "moe_flex_dispatcher_backend", None)
    in_bf16 = getattr(holder, "bf16", False)
    if backend not in _BACKENDS or not in_bf16 or expert_ranks(holder) == 1:
        return True
    from megatron.core.transformer.moe import fused_a2a

    return not getattr(fused_a2a, _BACKENDS[backend], False)


def _cannot_exchange(holder: Any) -> bool:
    dispatcher = getattr(holder, "moe_token_dispatcher_type", None)
    return dispatcher not in (None, "allgather", "alltoall", "flex") or _cannot_flex(holder)


def _exchanges_alike(args: Any) -> bool:
    """Return whether alltoall replaces the dispatcher of ``args``, which cannot run chunks.

    These are flex (see :func:`_cannot_flex`), and allgather over replicas in lockstep. allgather
    requires equal row counts on all ranks, but the chunks of replicas differ.
    """
    gathers = getattr(args, "moe_token_dispatcher_type", None) == "allgather"
    return _cannot_flex(args) or (gathers and lockstep_width(args) > 1)


def balancing_types(holder: Any) -> list[str]:
    """Return the load-balancing types in ``holder``, which is args or a model's configuration."""
    types = getattr(holder, "moe_router_load_balancing_type", None) or ()
    return [types] if isinstance(types, str) else list(types)


def _drops_tokens(holder: Any) -> bool:
    names = (
        "moe_pad_expert_input_to_capacity",
        "moe_token_dropping",
        "moe_expert_rank_capacity_factor",
    )
    capacity = getattr(holder, "moe_expert_capacity_factor", None) or -1  # Megatron's none
    return capacity >= 0 or is_set(holder, *names)


def _two_pools(model: Any) -> bool:
    types = set(balancing_types(model.config))
    return has_experts(model.config) and {"aux_loss", "seq_aux_loss"} <= types


MOE_LIMITS = (
    Limit(
        "MoE: aux_loss together with seq_aux_loss, in slices of external loops "
        "(--moe-router-load-balancing-type)",
        "give one of aux_loss, seq_aux_loss and none, or use Megatron's own schedule, without "
        "attach",
        slices=_two_pools,
    ),
    Limit(
        "MoE: experts over parts of replicas (--expert-model-parallel-size times "
        "--expert-tensor-parallel-size must divide TP times CP, or be a multiple of it)",
        "give --expert-tensor-parallel-size 1 and another --expert-model-parallel-size",
        _if_experts(
            lambda args: (
                expert_ranks(args) % dense_ranks(args) != 0
                and dense_ranks(args) % expert_ranks(args) != 0
            )
        ),
        slices=True,
    ),
    Limit(
        "MoE: experts over several replicas with all-gathers (--moe-token-dispatcher-type "
        "allgather)",
        "give --moe-token-dispatcher-type alltoall: replicas have chunks of different sizes",
        lambda args: lockstep_width(args) > 1 and args.moe_token_dispatcher_type == "allgather",
        slices=True,
        typed=False,
    ),
    Limit(
        "MoE: experts over several replicas whose ranks are not adjacent (--use-tp-pp-dp-mapping)",
        "leave it out, or give an --expert-model-parallel-size that divides "
        "--tensor-model-parallel-size times --context-parallel-size",
        lambda args: lockstep_width(args) > 1 and is_set(args, "use_tp_pp_dp_mapping"),
        slices=lambda model: lockstep_width(model.config) > 1 and _apart(),
    ),
    Limit(
        "MoE: tensor parallelism without sequence parallelism",
        "give --sequence-parallel, which Megatron requires for training",
        _if_experts(
            lambda args: args.tensor_model_parallel_size > 1 and not args.sequence_parallel
        ),
        slices=True,
    ),
    Limit(
        "MoE: biases of experts with sharded weights (--expert-tensor-parallel-size above 1; its "
        "default is the tensor-parallel degree)",
        "give --expert-tensor-parallel-size 1 or --disable-bias-linear, as Megatron requires",
        _if_experts(
            lambda args: is_set(args, "add_bias_linear") and args.expert_tensor_parallel_size > 1
        ),
        slices=True,
    ),
    Limit(
        "MoE: load balancing over the tokens of a call (--moe-router-load-balancing-type "
        "global_aux_loss, quantile_balancing, sinkhorn)",
        "give aux_loss or seq_aux_loss, which are computed per document, or none with "
        "--moe-router-enable-expert-bias",
        _if_experts(lambda args: not set(balancing_types(args)) <= _PER_DOCUMENT),
        slices=True,
    ),
    Limit(
        "MoE: experts of limited capacity (--moe-expert-capacity-factor, "
        "--moe-pad-expert-input-to-capacity)",
        "leave them out: which tokens are dropped would depend on the plan; balance the experts "
        "with --moe-aux-loss-coeff or --moe-router-enable-expert-bias",
        _if_experts(_drops_tokens),
        slices=True,
    ),
    Limit(
        "MoE: random routing (--moe-input-jitter-eps, --moe-router-force-load-balancing, "
        "--moe-router-force-biased)",
        "leave it out: a recomputed layer would select other experts",
        "moe_input_jitter_eps moe_router_force_load_balancing moe_router_force_biased",
        slices=True,
    ),
    Limit(
        "MoE: routing replay (--moe-enable-routing-replay)",
        "leave it out: it replays in the order of the forwards, but slices run backward in "
        "reverse order",
        "moe_enable_routing_replay",
        slices=True,
    ),
    Limit(
        "MoE: other token dispatchers (--moe-token-dispatcher-type flex without deep_ep, in "
        "a dtype other than bf16, on one rank, or with ncclep)",
        "give --moe-token-dispatcher-type alltoall or allgather",
        _if_experts(_cannot_exchange),
        slices=True,
        typed=False,
    ),
    Limit(
        "MoE: token exchange overlapped with computation (--moe-shared-expert-overlap, "
        "--overlap-moe-expert-parallel-comm, --delay-wgrad-compute)",
        "leave them out: the token exchange of one half of a large chunk overlaps the computation "
        "of the other half",
        "moe_shared_expert_overlap overlap_moe_expert_parallel_comm delay_wgrad_compute "
        "overlap_dispatch_backward_with_experts_wgrad",
        slices=True,
        typed=False,
    ),
    Limit(
        "MoE: paged stash of activations (moe_paged_stash)",
        "leave it out",
        slices={"moe_paged_stash": "a paged stash of experts' activations"},
        of_call=True,
    ),
    Limit(
        "MoE: upcycling of a dense model at start (--moe-use-upcycling)",
        "upcycle once without --epp, and load the checkpoint that it saves",
        "moe_use_upcycling",
    ),
)

MOE_REPLACED = (
    ReplacedFlags(
        "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend "
        "moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms "
        "moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute "
        "moe_hybridep_num_blocks_unpermute moe_permute_fusion_into_hybridep "
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "if flex cannot run (not bf16, one rank, neither deepep nor hybridep, no deep_ep), or for "
        "allgather over several replicas, alltoall exchanges the tokens",
        neutral=lambda args: {"moe_token_dispatcher_type": "alltoall"},
        same=_exchanges_alike,
        default_too=True,
    ),
)
