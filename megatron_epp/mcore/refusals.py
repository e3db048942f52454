"""Features of Megatron that cannot run through elastic pipelines: refused at start, by name.

Flags whose job a plan does are taken out on the command line before (replaced.py). Where they come
another way, as from a checkpoint's arguments or from a script's own, they are refused here.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_epp.layers.attention.ulysses import refuse_heads
from megatron_epp.mcore.config import AUTO, OFF, ON
from megatron_epp.mcore.model.hybrid.pattern import LETTERS, UNSUPPORTED_LETTERS


@dataclass(frozen=True, slots=True)
class Refusal:
    """``asked(args)`` tells whether the user wants ``what``; ``instead`` says what to do."""

    what: str
    instead: str
    asked: Callable[[argparse.Namespace], bool]


def _given(name: str, *harmless: object) -> Callable[[argparse.Namespace], bool]:
    """Whether flag ``name`` has a value other than None, False and the harmless ones."""

    def asked(args: argparse.Namespace) -> bool:
        value = getattr(args, name, None)
        return value is not None and value is not False and value not in harmless

    return asked


def _experts(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "num_experts", None))


def lockstep_of(args: argparse.Namespace) -> int:
    """Replicas whose ranks hold one layer's experts together, and run in lockstep; 1: each replica
    has them all. Neighbours, as Megatron spreads experts over the ranks of a stage in order."""
    if not _experts(args):
        return 1
    return max(1, _expert_ranks(args) // _dense_ranks(args))


def _expert_ranks(args: argparse.Namespace) -> int:
    return int(args.expert_model_parallel_size * args.expert_tensor_parallel_size)


def _dense_ranks(args: argparse.Namespace) -> int:
    return int(args.tensor_model_parallel_size * args.context_parallel_size)


def _experts_share_parts_of_replicas(args: argparse.Namespace) -> bool:
    if not _experts(args):
        return False
    experts, dense = _expert_ranks(args), _dense_ranks(args)
    return bool(experts % dense and dense % experts)


def _has_layers(letter: str, args: argparse.Namespace) -> bool:
    return letter in (getattr(args, "hybrid_layer_pattern", None) or "")


_POSITIONS = frozenset({"rope", "yarn", "learned_absolute", "none"})
_PER_DOCUMENT = frozenset({"aux_loss", "seq_aux_loss", "none"})


def _balancing(args: argparse.Namespace) -> list[str]:
    kinds = args.moe_router_load_balancing_type
    return [kinds] if isinstance(kinds, str) else list(kinds)


REFUSALS = (
    Refusal(
        "interleaved pipelines (--virtual-pipeline-model-parallel-size and its kin)",
        "leave them out: slices of long documents shrink the warm-up instead",
        lambda args: bool(
            args.virtual_pipeline_model_parallel_size
            or args.num_layers_per_virtual_pipeline_stage
            or args.num_virtual_stages_per_pipeline_rank
        ),
    ),
    Refusal(
        "experts spread over parts of replicas (--expert-model-parallel-size times "
        "--expert-tensor-parallel-size neither divides the tensor times the context ranks nor is a "
        "multiple of them)",
        "give --expert-tensor-parallel-size 1 and an --expert-model-parallel-size that divides "
        "--tensor-model-parallel-size times --context-parallel-size, or is a multiple of it",
        _experts_share_parts_of_replicas,
    ),
    Refusal(
        "experts spread over replicas that exchange by gathering "
        "(--moe-token-dispatcher-type allgather)",
        "give --moe-token-dispatcher-type alltoall: replicas have chunks of different sizes",
        lambda args: lockstep_of(args) > 1 and args.moe_token_dispatcher_type == "allgather",
    ),
    Refusal(
        "experts spread over replicas whose matrices are split, too "
        "(--expert-tensor-parallel-size above 1, by default the tensor ranks)",
        "give --expert-tensor-parallel-size 1, and spread whole experts by "
        "--expert-model-parallel-size",
        lambda args: lockstep_of(args) > 1 and args.expert_tensor_parallel_size > 1,
    ),
    Refusal(
        "experts spread over replicas whose ranks are not neighbours (--use-tp-pp-dp-mapping)",
        "leave it out, or give an --expert-model-parallel-size that divides "
        "--tensor-model-parallel-size times --context-parallel-size",
        lambda args: lockstep_of(args) > 1 and _given("use_tp_pp_dp_mapping")(args),
    ),
    Refusal(
        "experts over tensor-parallel ranks that all hold the same rows",
        "give --sequence-parallel, as Megatron asks in training",
        lambda args: bool(
            _experts(args) and args.tensor_model_parallel_size > 1 and not args.sequence_parallel
        ),
    ),
    Refusal(
        "biases of experts whose matrices are split (--expert-tensor-parallel-size above 1, by "
        "default the tensor ranks)",
        "give --expert-tensor-parallel-size 1, or --disable-bias-linear, as Megatron asks",
        lambda args: bool(
            _experts(args)
            and getattr(args, "add_bias_linear", False)
            and args.expert_tensor_parallel_size > 1
        ),
    ),
    Refusal(
        "balancing that depends on what is computed together (--moe-router-load-balancing-type "
        "global_aux_loss, sinkhorn, quantile_balancing)",
        "give aux_loss or seq_aux_loss, which are per document here, or none and "
        "--moe-router-enable-expert-bias",
        lambda args: _experts(args) and not set(_balancing(args)) <= _PER_DOCUMENT,
    ),
    Refusal(
        "experts of limited capacity (--moe-expert-capacity-factor, "
        "--moe-pad-expert-input-to-capacity)",
        "leave them out: which tokens are dropped would depend on the plan; "
        "--moe-aux-loss-coeff or --moe-router-enable-expert-bias keep experts balanced",
        lambda args: bool(
            _experts(args)
            and (
                (getattr(args, "moe_expert_capacity_factor", None) or -1) >= 0
                or getattr(args, "moe_pad_expert_input_to_capacity", False)
                or getattr(args, "moe_token_dropping", False)
                or getattr(args, "moe_expert_rank_capacity_factor", None) is not None
            )
        ),
    ),
    Refusal(
        "routing at random (--moe-input-jitter-eps, --moe-router-force-load-balancing, "
        "--moe-router-force-biased)",
        "leave it out: a recomputed layer would choose other experts",
        lambda args: bool(
            getattr(args, "moe_input_jitter_eps", None) is not None
            or getattr(args, "moe_router_force_load_balancing", False)
            or getattr(args, "moe_router_force_biased", None) is not None
        ),
    ),
    Refusal(
        "routing replay (--moe-enable-routing-replay)",
        "leave it out: it replays first in, first out, and slices run backward in reverse",
        _given("moe_enable_routing_replay"),
    ),
    Refusal(
        "other exchanges of tokens (--moe-token-dispatcher-type flex)",
        "give --moe-token-dispatcher-type alltoall or allgather",
        lambda args: bool(
            _experts(args)
            and getattr(args, "moe_token_dispatcher_type", None) not in ("allgather", "alltoall")
        ),
    ),
    Refusal(
        "exchanges of tokens that overlap with computing (--moe-shared-expert-overlap, "
        "--overlap-moe-expert-parallel-comm, --delay-wgrad-compute)",
        "leave them out: chunks of other documents keep the device busy",
        lambda args: bool(
            getattr(args, "moe_shared_expert_overlap", False)
            or getattr(args, "overlap_moe_expert_parallel_comm", False)
            or getattr(args, "delay_wgrad_compute", False)
            or getattr(args, "overlap_dispatch_backward_with_experts_wgrad", False)
        ),
    ),
    Refusal(
        "experts on latents (--moe-latent-size)",
        "leave it out: experts then take the hidden states",
        _given("moe_latent_size"),
    ),
    Refusal(
        "a dense model made one of experts at start (--moe-use-upcycling)",
        "upcycle once without --epp, and load the checkpoint that it saves",
        _given("moe_use_upcycling"),
    ),
    Refusal(
        "multi-token prediction (--mtp-num-layers, / in --hybrid-layer-pattern)",
        "leave it out: it reads tokens behind the end of a slice",
        _given("mtp_num_layers", 0),
    ),
    Refusal(
        "one product for both latents, and latents cached (--mla-down-proj-fusion, "
        "--cache-mla-latents)",
        "leave them out: the first saves one launch a chunk, the second is for inference",
        lambda args: bool(
            getattr(args, "mla_down_proj_fusion", False)
            or getattr(args, "cache_mla_latents", False)
        ),
    ),
    Refusal(
        "windows that are not W inputs in front of each, fewer than the context (--window-size)",
        "give --window-size W,0 with W from 1 to --seq-length less 1, or leave it out",
        lambda args: bool(
            getattr(args, "window_size", None)
            and not (
                len(args.window_size) == 2
                and 1 <= args.window_size[0] < args.seq_length
                and args.window_size[1] == 0
            )
        ),
    ),
    Refusal(
        "other attention variants (--experimental-attention-variant)",
        "use plain softmax attention, or run without --epp",
        _given("experimental_attention_variant"),
    ),
    Refusal(
        "clipping and logging of attention logits (--qk-clip, --log-max-attention-logit)",
        "leave them out: the attention of slices keeps no largest logit",
        lambda args: (
            _given("qk_clip")(args) or bool(getattr(args, "log_max_attention_logit", False))
        ),
    ),
    Refusal(
        "dropout in attention (--attention-dropout above 0)",
        "give --attention-dropout 0: how a document is cut must not change its loss",
        lambda args: args.attention_dropout > 0,
    ),
    Refusal(
        "hybrid context parallelism (--hybrid-context-parallel)",
        "leave it out: the plan cuts long documents; --context-parallel-size N spreads each chunk",
        _given("hybrid_context_parallel"),
    ),
    Refusal(
        "fully sharded data parallelism (--use-megatron-fsdp, --use-torch-fsdp2)",
        "give --use-distributed-optimizer, which shards the optimizer's state",
        lambda args: bool(args.use_megatron_fsdp or args.use_torch_fsdp2),
    ),
    Refusal(
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph)",
        "leave them out: chunks have a new shape in every iteration",
        lambda args: (
            getattr(args, "cuda_graph_impl", "none") not in (None, "none")
            or bool(getattr(args, "enable_cuda_graph", False))
            or bool(getattr(args, "external_cuda_graph", False))
        ),
    ),
    Refusal(
        "fp8 and fp4 (--fp8-format, --fp4-format)",
        "train in bf16",
        lambda args: bool(getattr(args, "fp8", None) or getattr(args, "fp4", None)),
    ),
    Refusal(
        "batch-size ramp-up (--rampup-batch-size, --step-batch-size-schedule)",
        "give one --global-batch-size: the number of documents in every iteration",
        lambda args: bool(
            getattr(args, "rampup_batch_size", None)
            or getattr(args, "step_batch_size_schedule", None)
        ),
    ),
    Refusal(
        "static recompute (--recompute-granularity, --recompute-activations)",
        "give --epp-memory-budget-gib: the plan says what each stage recomputes for each chunk",
        lambda args: bool(args.recompute_granularity),
    ),
    Refusal(
        "offloading of activations (--cpu-offloading-num-layers, --fine-grained-...-offloading)",
        "leave it out and give --epp-memory-budget-gib",
        lambda args: bool(
            getattr(args, "cpu_offloading", False)
            or getattr(args, "cpu_offloading_num_layers", 0)
            or getattr(args, "fine_grained_activation_offloading", False)
        ),
    ),
    Refusal(
        "overlapped tensor-parallel communication (--tp-comm-overlap)",
        "leave it out: its buffers have one fixed shape",
        _given("tp_comm_overlap"),
    ),
    Refusal(
        "deferred embedding gradients (--defer-embedding-wgrad-compute)",
        "leave it out",
        _given("defer_embedding_wgrad_compute"),
    ),
    Refusal(
        "position embeddings other than rope, yarn, learned_absolute, none "
        "(--position-embedding-type)",
        "use one of these four",
        lambda args: args.position_embedding_type not in _POSITIONS,
    ),
    Refusal(
        "micro-batches of several samples (--micro-batch-size above 1)",
        "leave --micro-batch-size out: the planner decides what is computed together",
        lambda args: args.micro_batch_size not in (None, 1),
    ),
    Refusal(
        "loss averaged per micro-batch (--no-calculate-per-token-loss, with --eod-mask-loss)",
        "leave it out: chunks of different sizes must weigh by their tokens",
        lambda args: not args.calculate_per_token_loss,
    ),
    Refusal(
        "data paths with a layout of their own (--fim-data, --mock-data, ...)",
        "give --data-path with a .bin/.idx corpus (scripts/prepare_corpus.py makes one)",
        lambda args: bool(
            getattr(args, "fim_data", False)
            or args.mock_data
            or getattr(args, "dataloader_inter_document_masking", False)
            or getattr(args, "reset_position_ids", False)
            or getattr(args, "reset_attention_mask", False)
        ),
    ),
    Refusal(
        "skipped iterations and saved data loaders (--iterations-to-skip, --dataloader-save)",
        "leave them out: the documents of an iteration follow from the samples consumed",
        lambda args: bool(
            getattr(args, "iterations_to_skip", None) or getattr(args, "dataloader_save", None)
        ),
    ),
    Refusal(
        "another data loader (--dataloader-type)",
        "leave it out: documents come in Megatron's order of samples",
        lambda args: args.dataloader_type not in (None, "external"),
    ),
    Refusal(
        "heterogeneous models (--heterogeneous-layers-config-path, -encoded-json)",
        "use a GPT model, or a HybridModel (megatron_epp.pretrain_hybrid)",
        lambda args: bool(
            getattr(args, "heterogeneous_layers_config_path", None)
            or getattr(args, "heterogeneous_layers_config_encoded_json", None)
        ),
    ),
    *(
        Refusal(
            f"{what} ({letter} in --hybrid-layer-pattern)",
            f"use layers of {' '.join(LETTERS)} (attention, latent attention, MLP, experts), or "
            "run without --epp",
            partial(_has_layers, letter),
        )
        for letter, what in UNSUPPORTED_LETTERS.items()
    ),
)


_PLACES = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)


def require_equal_stages(args: argparse.Namespace) -> None:
    """Raise a ValueError that names the flags, where stages would have other numbers of layers and
    none of these says which; of flags as they are given."""
    layers, stages = args.num_layers, args.pipeline_model_parallel_size
    if not layers or layers < stages or layers % stages == 0:
        return
    if any(getattr(args, name, None) for name in _PLACES):
        return
    if getattr(args, "epp_partition", None) != "auto":
        raise ValueError(
            f"--num-layers {layers}: not divisible by --pipeline-model-parallel-size {stages}; "
            "expected a multiple, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers, or --pipeline-model-parallel-layout, to place the "
            "layers"
        )


def require_whole_experts(args: argparse.Namespace) -> None:
    """Raise a ValueError unless every rank can hold as many of the experts as any other, and a
    token can choose as many as it is to; of flags as they are given."""
    experts = getattr(args, "num_experts", None)
    if not experts:
        return
    ranks, chosen = args.expert_model_parallel_size, args.moe_router_topk
    if experts % ranks:
        raise ValueError(
            f"--num-experts {experts}: does not divide over --expert-model-parallel-size {ranks}; "
            "expected a multiple of it"
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


def require_whole_latents(args: argparse.Namespace, ranks: int) -> None:
    """Raise a ValueError unless the latents' sizes make sense, and Megatron's own linears can make
    as many channels of them on each of ``ranks`` tensor-parallel ranks."""
    if not args.multi_latent_attention:
        return
    names = ["kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
    names += ["q_lora_rank"] * (args.q_lora_rank is not None)
    for name in names:
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(args, name)}: expected at least 1")
    rotary, both = args.qk_pos_emb_head_dim, args.kv_lora_rank + args.qk_pos_emb_head_dim
    if rotary % 2:
        raise ValueError(f"--qk-pos-emb-head-dim {rotary}: expected a multiple of 2")
    if args.transformer_impl != "local":  # Transformer Engine's make all of them on every rank
        return
    over = f"over --tensor-model-parallel-size {ranks}; expected a multiple of it"
    if both % ranks:
        raise ValueError(
            f"--kv-lora-rank {args.kv_lora_rank} and --qk-pos-emb-head-dim {rotary}: {both} "
            f"channels do not divide {over}"
        )
    if (args.q_lora_rank or 0) % ranks:
        raise ValueError(f"--q-lora-rank {args.q_lora_rank}: does not divide {over}")


def vocabulary_parallel(args: argparse.Namespace) -> bool:
    """Whether the output layer's words are to lie over the stages."""
    return getattr(args, "epp_vocab_parallel", OFF) == ON


def require_whole_words(args: argparse.Namespace) -> None:
    """Raise a ValueError unless the output layer of ``args`` can lie where they say."""
    if getattr(args, "epp_vocab_parallel", OFF) == AUTO:
        raise ValueError(
            "--epp-vocab-parallel auto is for `python -m megatron_epp.pretrain_gpt`, which reads "
            "the corpus before the model is built; here give on or off"
        )
    if not vocabulary_parallel(args):
        return
    given, instead = "--epp-vocab-parallel on", "or give --epp-vocab-parallel off"
    stages, ranks = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    if stages == 1:
        raise ValueError(
            f"{given}: there is one stage, so its words have nowhere else to lie; leave it out"
        )
    if lockstep_of(args) > 1:
        raise ValueError(
            f"{given} does not run experts spread over replicas; give an "
            "--expert-model-parallel-size that divides --tensor-model-parallel-size times "
            f"--context-parallel-size, {instead}"
        )
    if getattr(args, "use_mup", False):
        raise ValueError(f"{given} does not run scaled logits (--use-mup); leave it out, {instead}")
    saves = args.save or args.load
    if saves and getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        raise ValueError(
            f"--ckpt-format {args.ckpt_format} knows no parts of an output layer; give torch_dist, "
            f"{instead}"
        )
    words = getattr(args, "padded_vocab_size", None)
    if words and words % (stages * ranks):
        raise ValueError(
            f"{given}: {words} words, padded, do not divide over {stages} stages times {ranks} "
            "tensor-parallel ranks; give a --make-vocab-size-divisible-by that the stages divide, "
            f"{instead}"
        )


def refuse(args: argparse.Namespace) -> None:
    """Raise a ValueError that names the first feature ``args`` ask for and EPP cannot run."""
    context = getattr(args, "seq_length", None)
    if context is not None and context < 1:
        raise ValueError(f"--seq-length {context}: expected a context of at least 1 token")
    for refusal in REFUSALS:
        if refusal.asked(args):
            raise ValueError(f"--epp does not run {refusal.what}: {refusal.instead}")
    blocks, replicas = lockstep_of(args), getattr(args, "data_parallel_size", None)
    if replicas is not None and replicas % blocks:
        raise ValueError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size}: with "
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} experts are spread "
            f"over {blocks} replicas; expected that to divide the {replicas} of the job"
        )
    if getattr(args, "multi_latent_attention", False):
        require_whole_latents(args, args.tensor_model_parallel_size)
    elif (keeps := getattr(args, "epp_mla_keeps", AUTO)) != AUTO:
        raise ValueError(
            f"--epp-mla-keeps {keeps}: the model has no multi-latent attention; leave the flag out"
        )
    require_whole_words(args)
    if args.context_parallel_size > 1:
        ranks = args.tensor_model_parallel_size
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        try:
            refuse_heads(
                args.num_attention_heads // ranks,
                max(1, groups // ranks),
                args.context_parallel_size,
            )
        except ValueError as refusal:
            raise ValueError(
                f"--context-parallel-size {args.context_parallel_size}: {refusal}"
            ) from refusal
