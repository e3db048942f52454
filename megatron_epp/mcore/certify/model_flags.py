"""Reader of the user's model flags: Megatron's args for a small model in the certified dtype."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.training.arguments import parse_args, validate_args

from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import BF16, FLOAT64
from megatron_epp.ir.placement import EVENLY
from megatron_epp.mcore.capabilities import refusals
from megatron_epp.mcore.certify.scale_down import small
from megatron_epp.mcore.flags.config import (
    AUTO,
    FUSED_LINEARS,
    OFF,
    PLACING_FLAGS,
    elastic_defaults,
)
from megatron_epp.mcore.hybrid.pattern import mtp_part_of, symbols_of_layers
from megatron_epp.mcore.hybrid.segments import layout_symbols
from megatron_epp.mcore.job.read_flags import prepare_parser, refusals_as_value_errors
from megatron_epp.mcore.kinds.base import query_groups
from megatron_epp.mcore.kinds.certificates import LAYER_CERTIFICATES
from megatron_epp.mcore.kinds.registry import kind_defaults
from megatron_epp.mcore.model.quantisation import per_tensor_scales
from megatron_epp.mcore.model.shape import with_mtp
from megatron_epp.mcore.patching import cpu_host, emulated_engine
from megatron_epp.mcore.placing.requested import PLACE, place_of

# Flags of data, checkpoints, logging and speed, which do not change the model.
_OFF = """
    bf16 fp16 accumulate_allreduce_grads_in_fp32 use_precision_aware_optimizer optimizer_cpu_offload
    ddp_average_in_collective use_flash_attn cross_entropy_loss_fusion tp_comm_overlap
    enable_cuda_graph external_cuda_graph mock_data async_save log_throughput profile
    moe_permute_fusion gradient_accumulation_fusion moe_router_fusion
"""  # fused cross entropy rounds its gradient to bf16 (fused_cross_entropy.py)
_NONE = """
    fp4 spec data_path rampup_batch_size iterations_to_skip dataloader_save save load
    train_iters train_samples lr_decay_iters lr_decay_samples lr_warmup_fraction
    recompute_granularity recompute_method recompute_num_layers moe_router_dtype
"""  # routers' number format: float64
_NOT_THE_MODEL: dict[str, Any] = {
    **dict.fromkeys(_OFF.split(), False),
    **dict.fromkeys(_NONE.split()),
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "main_grads_dtype": torch.float32,
    "cuda_graph_impl": "none",
    "calculate_per_token_loss": True,
    "dataloader_type": "external",
    "micro_batch_size": 1,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "skip_train": True,
    "eval_iters": 0,
}
# Of the flags above, values that --dtype bf16 sets as in training.
_IN_BF16: dict[str, Any] = {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}
# Values that --overlap adds: gradients reduced in buckets during backward, sharded like the
# optimizer.
OVERLAP: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    # So small that even a tiny model has several buckets.
    "ddp_bucket_size": 4000,
}
# The weights of the reference model are not stored in fp8.
_UNHELD: dict[str, Any] = {"fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False}
# Features that Megatron's local layers lack; the reference model has only these layers.
_LOCAL: dict[str, Any] = {
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "apply_rope_fusion": False,
    "fp8": None,
    **_UNHELD,
}
# In fp8, the reference model has Transformer Engine's layers in fp8. Their transpose cache must be
# disabled, because no trainer reports to it that weights have changed.
_QUANTISED: dict[str, Any] = {"disable_parameter_transpose_cache": True, **_UNHELD}
_NOT_REFERENCE: dict[str, Any] = {
    "pipeline_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "epp_vocab_parallel": OFF,
    PLACE: [],
    **PLACING_FLAGS,
}


def parsed(flags: Sequence[str], pp: int) -> Namespace:
    """Return the args that Megatron parses from ``flags``, with --epp and ``pp`` pipeline ranks.

    Raises:
        ValueError: A flag is invalid, or training with --epp does not support it.
    """
    one_each = ["--epp-placement", EVENLY]  # unless the flags say another
    stages = ["--pipeline-model-parallel-size", str(pp)]
    with refusals_as_value_errors(), _command_line([*one_each, *flags, *stages, "--epp"]):
        args = parse_args(prepare_parser)
        refusals.refuse_by_name(parse_args(partial(_as_in_training, args)))
    if args.epp_vocab_parallel == AUTO:  # a certificate is for explicit values
        args.epp_vocab_parallel = OFF
    return args


def _as_in_training(wanted: Namespace, parser: ArgumentParser) -> ArgumentParser:
    """Return the parser of training on GPUs, with Transformer Engine's layers by default."""
    parser = prepare_parser(parser)
    defaults = elastic_defaults(wanted) | kind_defaults(wanted)
    parser.set_defaults(**defaults, transformer_impl="transformer_engine")
    return parser


@dataclass(frozen=True, slots=True)
class ScaledArgs:
    """Megatron's args of the small model, for the ranks and for the reference model."""

    layers: tuple[int, ...]  # number of layers of every stage
    elastic: Namespace
    reference: Namespace
    # Reference model whose errors are the unit of the elastic model's errors: in the elastic
    # model's dtype if that is not float64; without fp8 if fp8 scales cover full tensors.
    own: Namespace | None


def scaled(
    raw: Namespace, degrees: Degrees, overlap: bool, lora_rank: int = 0, dtype: str = FLOAT64
) -> ScaledArgs:
    """Return Megatron's args of a small model with the structure of the user's model.

    Args:
        raw: The user's flags, parsed.
        degrees: Parallel degrees.
        overlap: Whether to overlap gradient reduction with backward, with a distributed optimizer.
        lora_rank: Rank of the LoRA adapters; 0 for no adapters.
        dtype: Dtype of the model on the ranks under test, ``float64`` or ``bf16``.

    Raises:
        ValueError: ``certify`` does not support the flags.
    """
    if lora_rank and refusals.vocabulary_parallel(raw):
        raise ValueError(
            "--lora-rank: adapters do not run with --epp-vocab-parallel on; leave one of them out"
        )
    _require_engine(raw, lora_rank)
    layout = raw.pipeline_model_parallel_layout
    tiny = small(raw, degrees, None if layout is None else layout_symbols(layout))
    extra = OVERLAP if overlap else {}
    for kind in LAYER_CERTIFICATES if dtype == BF16 or per_tensor_scales(raw) else ():
        tiny.values.update(kind.without_ties(tiny.values))
    elastic = _validated(raw, tiny.values | extra, degrees.ranks, dtype)
    refusals.refuse(elastic)
    reference_flags = tiny.values | _NOT_REFERENCE
    if pattern := reference_flags.get("hybrid_layer_pattern"):  # of one stage
        reference_flags["hybrid_layer_pattern"] = symbols_of_layers(pattern) + mtp_part_of(pattern)
    layers = with_mtp(elastic, tiny.layers)
    known, own = reference_flags | (_QUANTISED if elastic.fp8 else _LOCAL), None
    if per_tensor_scales(elastic):
        own = _validated(raw, reference_flags | _LOCAL, 1)
    elif dtype != FLOAT64:
        own = _validated(raw, known, 1, dtype)
    return ScaledArgs(layers, elastic, _validated(raw, known, 1), own)


def _require_engine(raw: Namespace, lora_rank: int) -> None:
    asked = raw.transformer_impl == "transformer_engine"
    if asked and lora_rank:
        raise ValueError(
            "--lora-rank: adapters are put around Megatron's local linears here; leave "
            "--transformer-impl transformer_engine out"
        )
    if asked and cpu_host.is_cpu_host() and not emulated_engine.is_started():
        raise ValueError(
            "--transformer-impl transformer_engine: this process was started without an emulation "
            f"of its kernels; set {emulated_engine.VARIABLE}={emulated_engine.OF_CHECKOUT} before "
            "it starts"
        )
    known = {"mxfp8": "is_mxfp8_available", "blockwise": "is_fp8_block_scaling_available"}
    if asked and raw.fp8 and emulated_engine.is_started() and raw.fp8_recipe in known:
        state: Any = fp8_utils.FP8GlobalStateManager
        available, why = getattr(state, known[raw.fp8_recipe])()
        if not available:
            raise ValueError(f"--fp8-recipe {raw.fp8_recipe}: {why} ({emulated_engine.in_words()})")


def describe(layers: tuple[int, ...], args: Namespace, lora_rank: int) -> str:
    """Return a one-line description of the small model."""
    groups = query_groups(args)
    words = [
        f"layers {' '.join(map(str, layers))}",
        f"hidden {args.hidden_size}",
        f"{args.num_attention_heads} heads in {groups} groups",
        args.normalization,
        "swiglu" if args.swiglu else "gelu" if not args.squared_relu else "squared relu",
        args.position_embedding_type,
        "biases" if args.add_bias_linear else "no biases",
        "untied" if args.untie_embeddings_and_output_weights else "tied",
    ]
    if args.hybrid_layer_pattern is not None:
        words.insert(0, f"HybridModel {args.hybrid_layer_pattern}")
    words += ["qk-layernorm"] * args.qk_layernorm + ["qk-l2-norm"] * args.qk_l2_norm
    words += ["zero-centred norms"] * args.layernorm_zero_centered_gamma
    words += [word for kind in LAYER_CERTIFICATES for word in kind.small_words(args)]
    words += [f"fp8 ({args.fp8}), {args.fp8_recipe}"] * bool(args.fp8)
    words += ["weights held in it"] * bool(args.fp8_param_gather)
    words += ["sequence parallel"] * args.sequence_parallel
    if place := place_of(args):
        words.append(f"stages on ranks {' '.join(map(str, place))}")
    words += ["vocabulary over the stages"] * refusals.vocabulary_parallel(args)
    words += ["distributed optimizer"] * args.use_distributed_optimizer
    words += ["overlapped reduction"] * args.overlap_grad_reduce
    words += [f"frozen, with adapters of rank {lora_rank}"] * bool(lora_rank)
    return ", ".join(words)


def _validated(
    raw: Namespace, changed: dict[str, Any], ranks: int, dtype: str = FLOAT64
) -> Namespace:
    args = deepcopy(raw)
    by_engine = emulated_engine.is_started() and args.transformer_impl == "transformer_engine"
    known = {name: value for name, value in _NOT_THE_MODEL.items() if hasattr(args, name)}
    known |= {} if by_engine else _LOCAL
    known |= kind_defaults(args)  # as in training
    known |= _IN_BF16 if dtype == BF16 else {}
    vars(args).update(known | cpu_host.cpu_defaults() | changed)
    args.rank, args.world_size = 0, ranks
    args.global_batch_size = None
    with refusals_as_value_errors():
        validate_args(args)
    if dtype == FLOAT64:
        args.params_dtype = torch.float64
    choose_layers(args, args.transformer_impl)
    return args


def choose_layers(args: Namespace, implementation: str) -> None:
    """Set the layers' implementation in ``args``, and whether linears fuse weight gradients."""
    args.transformer_impl = implementation
    setattr(args, FUSED_LINEARS, implementation == "transformer_engine")


@contextmanager
def _command_line(flags: Sequence[str]) -> Iterator[None]:
    arguments = sys.argv
    sys.argv = ["certify", *flags]
    try:
        yield
    finally:
        sys.argv = arguments
