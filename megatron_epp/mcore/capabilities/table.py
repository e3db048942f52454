"""Table of unsupported features: where each feature does not run, and what to do instead.

docs/reference/refused_flags.md and the answers of support.md are generated from this table. Layer
kinds add their limits (mcore/kinds/). Some flags have no effect under a plan. If the command
line sets such a flag, replaced.py resets it. If a checkpoint's arguments or a script set it, a row
of this table refuses it.
"""

import re
from collections.abc import Iterable
from typing import Any, Literal

from megatron_epp.mcore.kinds.base import LayerKind
from megatron_epp.mcore.kinds.limit import Limit, Reason, any_of, not_computed, of_config, settings
from megatron_epp.mcore.kinds.registry import LAYER_KINDS, limits_of_kinds
from megatron_epp.mcore.patching import emulated_engine

_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
_LOOPS = "use Megatron's own schedule (no attach)"
_SHARD = "use --use-distributed-optimizer"
_FLOATS = "train in --bf16 or float32"
_LOCAL = "leave the flag out (local is taken)"
_VARIANT = "experimental_attention_variant"
_POSITIONS = ("rope", "learned_absolute", "none")
# Classes of Megatron whose new fields may be features without a row in the table;
# scripts/upstream/canary.py prints new fields.
RELIES_ON = (
    "megatron.core.model_parallel_config.ModelParallelConfig",
    "megatron.core.transformer.transformer_config.MLATransformerConfig",
    "megatron.core.transformer.transformer_config.TransformerConfig",
)


def _needs_gpu(
    flag: str, instead: str = "leave the flag out", *runs: Any, setting: str | None = None
) -> Reason:
    """Return a function that takes args and returns why ``flag`` needs a GPU, or None.

    The returned function has the result None if the flag is not given, or if its value is in
    ``runs``. ``setting`` is the attribute of args that holds the value, by default the flag's name.
    """

    def reason(args: Any) -> str | None:
        value = getattr(args, setting or flag.removeprefix("--").replace("-", "_"), None)
        if value in (runs or (None, False)):
            return None
        shown = flag if value is True else f"{flag} {value}"
        return f"{shown}: this host has no CUDA GPU; {instead}"

    return reason


def _any_of(*each: Reason) -> Reason:
    return lambda asked_of: next(filter(None, (reason(asked_of) for reason in each)), None)


def _gpu_only(flag: str, instead: str = "leave the flag out", *runs: Any) -> Limit:
    what = f"{flag} other than {runs[0]}" if runs else flag
    return Limit(what, instead, no_gpu=_needs_gpu(flag, instead, *runs))


def _needs_engine(flag: str, *others: Any, **named: Any) -> Reason:
    """Return a function like that of :func:`_needs_gpu`, for flags that need Transformer Engine.

    The function also returns None if the CPU emulates Transformer Engine.
    """
    reason = _needs_gpu(flag, *others, **named)
    return lambda args: None if emulated_engine.is_wanted() else reason(args)


def _fp8(args: Any) -> bool:
    return bool(getattr(args, "fp8", None))


def _positions(model: Any) -> str | None:
    kind = model.position_embedding_type
    if kind == "mrope" and model.config.context_parallel_size > 1:
        return "positions of several axes (mrope) are not spread over context-parallel ranks"
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


def _groups_by_size(call: Any) -> str | None:
    """Return a reason if the size of context-parallel groups varies by micro-batch, else None.

    Such groups span replicas, so the plan of one replica cannot order their collectives. If
    frameworks shard micro-batches themselves (verl), Megatron's configuration does not show this
    feature, but Megatron's process groups do.
    """
    from megatron.core import parallel_state as mpu

    for name in ("_HYBRID_DP_CP_GROUPS", "_DYNAMIC_DP_CP_GROUPS"):  # the later name
        if getattr(mpu, name, None):
            return "context parallelism by micro-batch (its process groups are there)"
    return None


def _variants(kinds: Iterable[LayerKind]) -> tuple[str, ...]:
    return tuple(variant for kind in kinds for variant in kind.VARIANTS)


def _streams(holder: Any) -> bool:
    """Return whether a configuration of Megatron or ms-swift sets several residual streams."""
    if any_of("enable_mhc_connections", "enable_hyper_connections")(holder):
        return True
    return (getattr(holder, "hc_count", None) or 0) > 1


def _wide_messages(call: Any) -> str | None:
    if not _streams(call.config) or call.config.pipeline_model_parallel_size == 1:
        return None
    return "several residual streams (mHC), whose messages are wider than hidden_size"


TABLE: tuple[Limit, ...] = (
    Limit(
        "interleaved pipelines (--num-layers-per-virtual-pipeline-stage, "
        "--num-virtual-stages-per-pipeline-rank)",
        "use --epp-placement flags, which takes the stages of a rank from them, or leave them out",
        any_of(
            "virtual_pipeline_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
        ),
        typed=False,
    ),
    Limit(
        "hybrid context parallelism (--hybrid-context-parallel)",
        "leave it out: the plan cuts long documents; --context-parallel-size N spreads each chunk",
        any_of("hybrid_context_parallel"),
        calls=_any_of(
            settings(
                hybrid_context_parallel="context parallelism by sample",
                dynamic_context_parallel="context parallelism by micro-batch",  # its later name
            ),
            _groups_by_size,
        ),
    ),
    Limit(
        "fully sharded data parallelism (--use-megatron-fsdp, --use-torch-fsdp2)",
        "give --use-distributed-optimizer, which shards the optimizer's state",
        any_of("use_megatron_fsdp", "use_torch_fsdp2"),
        calls=_fully_sharded,
        no_gpu=_any_of(
            _needs_gpu("--use-megatron-fsdp", _SHARD), _needs_gpu("--use-torch-fsdp2", _SHARD)
        ),
    ),
    Limit(
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph)",
        "leave them out: chunks have a new shape in every iteration",
        any_of("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", harmless=("none",)),
        calls=_graphs,
        no_gpu=_any_of(
            _needs_gpu("--cuda-graph-impl", "leave the flag out", None, "none"),
            _needs_gpu("--enable-cuda-graph"),
        ),
        typed=False,
    ),
    Limit(
        "fp4 (--fp4-format): its second scale is a whole tensor's",
        "give --fp8-format with --fp8-recipe blockwise or mxfp8, or train in bf16",
        any_of("fp4"),
        slices=not_computed(fp4="fp4"),
        no_gpu=_needs_gpu("--fp4-format", _FLOATS, setting="fp4"),
    ),
    Limit(
        "fp8 whose scales follow from what was computed before, in an order that a plan changes "
        "(--fp8-recipe delayed, which is the default; custom: from what, nobody knows)",
        "give --fp8-recipe blockwise, mxfp8 or tensorwise",
        lambda args: _fp8(args) and args.fp8_recipe in ("delayed", "custom"),
    ),
    Limit(
        "fp8 in Megatron's local layers (--transformer-impl local)",
        "give --transformer-impl transformer_engine",
        lambda args: _fp8(args) and args.transformer_impl == "local",
    ),
    Limit(
        "fp8 beyond linears of layers (--fp8-output-proj; fp8_dot_product_attention, "
        "fp8_multi_head_attention)",
        "leave it out",
        any_of(
            "fp8_dot_product_attention",
            "fp8_multi_head_attention",
            "fp8_output_proj",
        ),
    ),
    Limit(
        "slices in fp8 in loops (--fp8-format)",
        _LOOPS,
        slices=not_computed(fp8="fp8"),
        no_gpu=_needs_engine("--fp8-format", _FLOATS, setting="fp8"),
    ),
    _gpu_only("--fp16", _FLOATS),
    Limit(
        "static recompute (--recompute-granularity, --recompute-activations)",
        "give --epp-memory-budget-gib: the plan says what each stage recomputes for each chunk",
        any_of("recompute_granularity"),
        typed=False,
    ),
    Limit(
        "recompute of some micro-batches (num_microbatches_with_partial_activation_checkpoints)",
        "leave it out",
        calls=settings(
            num_microbatches_with_partial_activation_checkpoints="recompute for some "
            "micro-batches only"
        ),
    ),
    Limit(
        "offloading of activations (--cpu-offloading-num-layers, "
        "--fine-grained-activation-offloading)",
        "leave it out and give --epp-memory-budget-gib",
        any_of(
            "cpu_offloading",
            "cpu_offloading_num_layers",
            "fine_grained_activation_offloading",
            harmless=(0,),
        ),
        calls=settings(fine_grained_activation_offloading="offloaded activations"),
        typed=False,
    ),
    Limit(
        "overlapped tensor-parallel communication (--tp-comm-overlap)",
        "leave it out: its buffers have one fixed shape",
        any_of("tp_comm_overlap"),
        no_gpu=_needs_gpu("--tp-comm-overlap"),
        typed=False,
    ),
    Limit(
        "deferred embedding gradients (--defer-embedding-wgrad-compute)",
        "leave it out",
        any_of("defer_embedding_wgrad_compute"),
        calls=settings(
            defer_embedding_wgrad_compute="deferred weight gradients of the output layer"
        ),
        typed=False,
    ),
    Limit(
        "position embeddings other than rope, yarn, learned_absolute, none "
        "(--position-embedding-type; in slices of loops also mrope, but not over context-parallel "
        "ranks)",
        "use one of these",
        lambda args: args.position_embedding_type not in (*_POSITIONS, "yarn"),
        slices=_positions,
    ),
    Limit(
        "rotary embeddings that follow a call's length (rope_type dynamic or longrope, in models "
        "of ms-swift)",
        _LOOPS,
        slices=_follows_length,
    ),
    Limit(
        "micro-batches of several samples (--micro-batch-size above 1)",
        "leave --micro-batch-size out: the planner decides what is computed together",
        any_of("micro_batch_size", harmless=(1,)),
        typed=False,
    ),
    Limit(
        "loss averaged per micro-batch (--no-calculate-per-token-loss, with --eod-mask-loss)",
        "leave it out: chunks of different sizes must weigh by their tokens",
        lambda args: not args.calculate_per_token_loss,
    ),
    Limit(
        "documents within a sample (--dataloader-inter-document-masking, --reset-position-ids, "
        "--reset-attention-mask)",
        "leave them out: a document is a sample, and attends to itself alone",
        any_of("dataloader_inter_document_masking", "reset_position_ids", "reset_attention_mask"),
        typed=False,
    ),
    Limit(
        "fill-in-the-middle (--fim-data, and with it --fim-rate, --fim-spm-rate and the others)",
        "leave it out: write the rewritten documents into the corpus before, or run without --epp",
        any_of("fim_data"),
    ),
    Limit(
        "Megatron's own reinforcement learning (--perform-rl-step)",
        "leave --epp out: its micro-batches come from rollouts, and no lengths are known ahead",
        any_of("perform_rl_step"),
    ),
    Limit(
        "skipped iterations, saved data loaders (--iterations-to-skip; argument dataloader_save)",
        "leave them out: the documents of an iteration follow from the samples consumed",
        any_of("iterations_to_skip", "dataloader_save", harmless=([],)),
    ),
    Limit(
        "several validation sets (--multiple-validation-sets)",
        "evaluate on one (--valid-data-path), with or without --full-validation",
        any_of("multiple_validation_sets"),
    ),
    Limit(
        "frozen layers (--freeze-all-layers)",
        "leave --epp out",
        any_of("freeze_all_layers"),
    ),
    Limit(
        "another data loader (--dataloader-type)",
        "leave it out: documents come in Megatron's order of samples",
        any_of("dataloader_type", harmless=("external",)),
    ),
    Limit(
        "heterogeneous models (--heterogeneous-layers-config-path, -encoded-json)",
        "use a GPT model, or a HybridModel (megatron_epp.pretrain_hybrid)",
        any_of("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    ),
    Limit(
        "other attention variants (--experimental-attention-variant)",
        "use plain softmax attention, or run without --epp",
        any_of(_VARIANT, harmless=_variants(LAYER_KINDS)),
        slices=of_config(
            any_of(_VARIANT, harmless=_variants(kind for kind in LAYER_KINDS if kind.SLICED))
        ),
    ),
    Limit(
        "several residual streams (mHC: --enable-mhc-connections)",
        "leave it out: layers mix streams that chunks and messages do not have",
        _streams,
        slices=of_config(_streams),
        calls=_wide_messages,
    ),
    Limit(
        "logits of another type than hidden states (--output-logit-dtype)",
        "leave it out: the loss is computed in float32 anyway",
        any_of("logit_dtype"),
        slices=any_of("logit_dtype"),
    ),
    *limits_of_kinds(),
    _gpu_only("--distributed-backend", "leave the flag out (gloo is taken)", "gloo"),
    Limit(
        "--transformer-impl other than local",
        _LOCAL,
        no_gpu=_needs_engine("--transformer-impl", _LOCAL, "local"),
    ),
    _gpu_only("--use-flash-attn"),
    _gpu_only("--optimizer-cpu-offload"),
    _gpu_only(
        "--use-precision-aware-optimizer", "leave the flag out (it needs Transformer Engine)"
    ),
    _gpu_only("--ddp-average-in-collective", "leave the flag out (gloo cannot average)"),
    _gpu_only("--async-save"),
)


def limit_for(place: Literal["epp", "slices", "calls", "no_gpu"], asked_of: Any) -> str | None:
    """Return the error message for the first feature in ``asked_of`` that ``place`` does not run.

    ``asked_of`` is args for ``epp`` and ``no_gpu``, a training loop's model for ``slices``,
    and a training loop's call for ``calls``. The result is None if there is no such feature.
    """
    for limit in TABLE:
        asked = getattr(limit, place)
        if asked is not None and (reason := asked(asked_of)):
            runs = "slices do not compute" if place == "slices" else "--epp does not run"
            text = reason if isinstance(reason, str) else f"{runs} {limit.what}: {limit.instead}"
            return in_settings(text) if place in ("slices", "calls") else text
    return None


def in_settings(text: str) -> str:
    """Return ``text`` with each flag replaced by the name of a setting.

    External training loops have no flags; they set fields of the model's configuration.
    """
    named = {"epp": "slices", "disable-bias-linear": "add_bias_linear=False"}
    return _FLAG.sub(lambda flag: named.get(flag[1], flag[1].replace("-", "_")), text)
