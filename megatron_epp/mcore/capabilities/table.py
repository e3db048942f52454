"""Table of unsupported features: where each feature does not run, and what to do instead.

docs/reference/refused_flags.md and the answers in support.md are generated from this table. Layer
kinds add their limits (mcore/kinds/). Some flags have no effect under a plan. If the command
line sets such a flag, replaced.py resets it. If a checkpoint's arguments or a script set it, a row
of this table refuses it.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from megatron_epp.mcore.kinds.base import LayerKind
from megatron_epp.mcore.kinds.limit import Column, Limit, gpu_only, is_set
from megatron_epp.mcore.kinds.registry import LAYER_KINDS, limits_of_kinds

_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
_LEAVE_OUT = "leave the flag out"
_LOOPS = "use Megatron's own schedule, without attach"
_SHARD = "use --use-distributed-optimizer"
_FLOATS = "train in --bf16 or float32"
_POSITIONS = ("rope", "learned_absolute", "none")


def _positions(model: Any) -> str | None:
    kind = model.position_embedding_type
    if kind == "mrope" and model.config.context_parallel_size > 1:
        return "positions of several axes (mrope) are not sharded over context-parallel ranks"
    known = kind in (*_POSITIONS, "yarn", "mrope")
    return None if known else f"slices do not compute positions of type {kind}"


def _follows_length(model: Any) -> str | None:
    """Return a reason if rotary embeddings depend on a forward's length (ms-swift), else None."""
    scaling = getattr(model.config, "rope_scaling", None)
    kind = scaling.get("rope_type") if isinstance(scaling, dict) else None
    if kind not in ("dynamic", "longrope"):
        return None
    return f"slices do not compute rotary embeddings that follow a call's length (rope_type {kind})"


def _graphs(call: Any) -> str | None:
    local = getattr(call.config, "cuda_graph_impl", "none") == "local"
    return "CUDA graphs (cuda_graph_impl local)" if local else None


def _fully_sharded(call: Any) -> str | None:
    ddp = getattr(call.one_model, "ddp_config", None)
    return "Megatron FSDP" if getattr(ddp, "use_megatron_fsdp", False) else None


def _ranks_by_size(call: Any) -> str | None:
    """Return a reason if the size of context-parallel groups varies by micro-batch, else None.

    Such groups span replicas, so the plan of one replica cannot order their collectives. If
    frameworks shard micro-batches themselves (verl), Megatron's configuration does not show this
    feature, but Megatron's process groups do.
    """
    from megatron.core import parallel_state as mpu

    if is_set(call.config, "hybrid_context_parallel"):
        return "context parallelism by sample (hybrid_context_parallel)"
    if is_set(call.config, "dynamic_context_parallel"):  # its later name
        return "context parallelism by micro-batch (dynamic_context_parallel)"
    for name in ("_HYBRID_DP_CP_GROUPS", "_DYNAMIC_DP_CP_GROUPS"):  # the later name
        if getattr(mpu, name, None):
            return "context parallelism by micro-batch (its process groups are there)"
    return None


def _other_variants(kinds: Iterable[LayerKind]) -> Callable[[Any], bool]:
    """Return a test of a variant of attention that none of ``kinds`` has."""
    known = (None, *(variant for kind in kinds for variant in kind.VARIANTS))
    return lambda holder: getattr(holder, "experimental_attention_variant", None) not in known


_unsliced = _other_variants(kind for kind in LAYER_KINDS if kind.SLICED)


def _streams(holder: Any) -> bool:
    """Return whether a configuration of Megatron or ms-swift sets several residual streams."""
    if is_set(holder, "enable_mhc_connections", "enable_hyper_connections"):
        return True
    return (getattr(holder, "hc_count", None) or 0) > 1


TABLE: tuple[Limit, ...] = (
    Limit(
        "interleaved pipelines (--num-layers-per-virtual-pipeline-stage, "
        "--num-virtual-stages-per-pipeline-rank)",
        "use --epp-placement auto, which reads the number of stages per rank from these flags, or "
        "leave them out",
        "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
        "num_virtual_stages_per_pipeline_rank",
        typed=False,
    ),
    Limit(
        "hybrid context parallelism, CP by sample (--hybrid-context-parallel)",
        "leave it out: plans cut long documents, and --context-parallel-size N shards each chunk",
        "hybrid_context_parallel",
        _ranks_by_size,
        of_call=True,
    ),
    Limit(
        "fully sharded data parallelism, FSDP (--use-megatron-fsdp, --use-torch-fsdp2)",
        "use --use-distributed-optimizer, which shards the optimizer states",
        "use_megatron_fsdp use_torch_fsdp2",
        _fully_sharded,
        {"use_megatron_fsdp": _SHARD, "use_torch_fsdp2": _SHARD},
        of_call=True,
    ),
    Limit(
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph)",
        "leave them out: chunks have new shapes in every iteration",
        "cuda_graph_impl enable_cuda_graph external_cuda_graph",
        _graphs,
        {"cuda_graph_impl": _LEAVE_OUT, "enable_cuda_graph": _LEAVE_OUT},
        typed=False,
        of_call=True,
    ),
    Limit(
        "fp4 (--fp4-format), whose second scale belongs to a full tensor",
        "give --fp8-format with --fp8-recipe blockwise or mxfp8, or train in bf16",
        "fp4",
        {"fp4": "fp4"},
        {"fp4": _FLOATS},
    ),
    Limit(
        "fp8 with scales of earlier tensors (--fp8-recipe delayed, the default, or custom)",
        "give --fp8-recipe blockwise, mxfp8 or tensorwise, because plans change the order of "
        "tensors",
        lambda args: is_set(args, "fp8") and args.fp8_recipe in ("delayed", "custom"),
    ),
    Limit(
        "fp8 in Megatron's local layers (--transformer-impl local)",
        "give --transformer-impl transformer_engine",
        lambda args: is_set(args, "fp8") and args.transformer_impl == "local",
    ),
    Limit(
        "fp8 outside the linears of layers (--fp8-output-proj; fp8_dot_product_attention, "
        "fp8_multi_head_attention)",
        "leave it out",
        "fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj",
    ),
    Limit(
        "fp8 in slices of external loops (--fp8-format)",
        _LOOPS,
        slices={"fp8": "fp8"},
        no_gpu={"fp8": _FLOATS},
    ),
    gpu_only("fp16", _FLOATS),
    Limit(
        "static recompute (--recompute-granularity, --recompute-activations)",
        "give --epp-memory-budget-gib: the planner chooses what each stage recomputes for each "
        "chunk",
        "recompute_granularity",
        typed=False,
    ),
    Limit(
        "recompute of some micro-batches (num_microbatches_with_partial_activation_checkpoints)",
        "leave it out",
        slices={
            "num_microbatches_with_partial_activation_checkpoints": "recompute for some "
            "micro-batches only"
        },
        of_call=True,
    ),
    Limit(
        "offloading of activations (--cpu-offloading-num-layers, "
        "--fine-grained-activation-offloading)",
        "leave it out and give --epp-memory-budget-gib",
        "cpu_offloading cpu_offloading_num_layers fine_grained_activation_offloading",
        {"fine_grained_activation_offloading": "offloaded activations"},
        typed=False,
        of_call=True,
    ),
    Limit(
        "overlapped tensor-parallel communication (--tp-comm-overlap)",
        "leave it out: its buffers have a fixed shape",
        "tp_comm_overlap",
        no_gpu={"tp_comm_overlap": _LEAVE_OUT},
        typed=False,
    ),
    Limit(
        "deferred embedding gradients (--defer-embedding-wgrad-compute)",
        "leave it out",
        "defer_embedding_wgrad_compute",
        {"defer_embedding_wgrad_compute": "deferred weight gradients of the LM head"},
        typed=False,
        of_call=True,
    ),
    Limit(
        "position embeddings other than rope, yarn, learned_absolute and none "
        "(--position-embedding-type; slices of external loops also support mrope, but not over "
        "context-parallel ranks)",
        "use one of these",
        lambda args: args.position_embedding_type not in (*_POSITIONS, "yarn"),
        _positions,
    ),
    Limit(
        "rotary embeddings that depend on the length of a call (rope_type dynamic or longrope, in "
        "models of ms-swift)",
        _LOOPS,
        slices=_follows_length,
    ),
    Limit(
        "micro-batches of several samples (--micro-batch-size above 1)",
        "leave --micro-batch-size out: the planner forms the chunks",
        "micro_batch_size",
        typed=False,
    ),
    Limit(
        "loss averaged per micro-batch (--no-calculate-per-token-loss, with --eod-mask-loss)",
        "leave it out: chunks of different sizes must be weighted by their numbers of tokens",
        lambda args: not args.calculate_per_token_loss,
    ),
    Limit(
        "documents within a sample (--dataloader-inter-document-masking, --reset-position-ids, "
        "--reset-attention-mask)",
        "leave them out: each document is a sample, and its tokens attend only to it",
        "dataloader_inter_document_masking reset_position_ids reset_attention_mask",
        typed=False,
    ),
    Limit(
        "fill-in-the-middle (--fim-data, --fim-rate, --fim-spm-rate)",
        "leave it out: write the rewritten documents to the corpus beforehand",
        "fim_data",
    ),
    Limit(
        "Megatron's own reinforcement learning (--perform-rl-step)",
        "leave --epp out: the lengths of rollouts are not known in advance",
        "perform_rl_step",
    ),
    Limit(
        "skipped iterations, saved data loaders (--iterations-to-skip; argument dataloader_save)",
        "leave them out: the consumed samples determine the documents of an iteration",
        "iterations_to_skip dataloader_save",
    ),
    Limit(
        "several validation sets (--multiple-validation-sets)",
        "evaluate on one set (--valid-data-path), with or without --full-validation",
        "multiple_validation_sets",
    ),
    Limit(
        "frozen layers (--freeze-all-layers)",
        "leave --epp out",
        "freeze_all_layers",
    ),
    Limit(
        "another data loader (--dataloader-type)",
        "leave it out: documents are read in Megatron's order of samples",
        "dataloader_type",
    ),
    Limit(
        "heterogeneous models (--heterogeneous-layers-config-path, -encoded-json)",
        "use a GPT model, or a HybridModel (megatron_epp.pretrain_hybrid)",
        "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json",
    ),
    Limit(
        "other attention variants (--experimental-attention-variant)",
        "use softmax attention, or train without --epp",
        _other_variants(LAYER_KINDS),
        lambda model: _unsliced(model.config),
    ),
    Limit(
        "several residual streams (mHC: --enable-mhc-connections)",
        "leave it out: chunks and messages have a single residual stream",
        _streams,
        slices=True,
    ),
    Limit(
        "logits in a dtype other than that of the hidden states (--output-logit-dtype)",
        "leave it out: the loss is computed in float32 in any case",
        "logit_dtype",
        slices=True,
    ),
    Limit(
        "residual connections in float32 (--fp32-residual-connection)",
        "leave it out: the linears of layers expect inputs in the dtype of their weights",
        "fp32_residual_connection",
        slices=True,
    ),
    *limits_of_kinds(),
    gpu_only("distributed_backend", "leave the flag out (gloo is used)"),
    gpu_only("transformer_impl", "leave the flag out (local is used)"),
    gpu_only("use_flash_attn"),
    gpu_only("optimizer_cpu_offload"),
    gpu_only("use_precision_aware_optimizer", "leave the flag out (it needs Transformer Engine)"),
    gpu_only("ddp_average_in_collective", "leave the flag out (gloo cannot average)"),
    gpu_only("async_save"),
)


def limit_for(column: Column, holder: Any, of_call: bool = False) -> str | None:
    """Return the error message for the first unsupported feature that ``holder`` uses, or None.

    Args:
        column: The kind of job: ``training``, training on a CPU-only host (``no_gpu``), or the
            slicing mode of external loops (``slices``).
        holder: Megatron's args; for ``slices``, the model of an external loop, or a call of the
            loop.
        of_call: Whether ``holder`` is a call.
    """
    rows = (row for row in TABLE if column != "slices" or row.of_call == of_call)
    text = next(filter(None, (row.reason(column, holder) for row in rows)), None)
    return in_settings(text) if text is not None and column == "slices" else text


def in_settings(text: str) -> str:
    """Return ``text`` with each flag replaced by the name of a setting.

    External training loops have no flags; they set fields of the model's configuration.
    """
    named = {"epp": "slices", "disable-bias-linear": "add_bias_linear=False"}
    return _FLAG.sub(lambda flag: named.get(flag[1], flag[1].replace("-", "_")), text)
