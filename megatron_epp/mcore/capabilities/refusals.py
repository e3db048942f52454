"""Checks at a job's start that refuse Megatron features without support in elastic pipelines."""

import argparse
import os
from contextlib import suppress

from megatron_epp.layers.attention.ulysses import refuse_heads
from megatron_epp.mcore.capabilities.table import TABLE, limit_for
from megatron_epp.mcore.flags.config import OFF, ON, PLACING_FLAGS, placement_by_time
from megatron_epp.mcore.kinds.base import query_groups
from megatron_epp.mcore.kinds.registry import LAYER_KINDS, lockstep_of
from megatron_epp.mcore.placing.requested import asked_placement, stages_of

_FLOAT_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # read by Transformer Engine's recipe
_PLACES = (*PLACING_FLAGS, "hybrid_layer_pattern", "hybrid_override_pattern")


def require_equal_stages(args: argparse.Namespace) -> None:
    """Raise a ValueError if stages cannot get equal numbers of layers and no flag places layers."""
    layers, stages = args.num_layers, args.pipeline_model_parallel_size
    if not layers or layers < stages or layers % stages == 0:
        return
    if any(getattr(args, name, None) for name in _PLACES):
        return
    if not placement_by_time(args) and asked_placement(args, stages) is None:
        raise ValueError(
            f"--num-layers {layers}: not divisible by --pipeline-model-parallel-size {stages}; "
            "expected a multiple, or --decoder-first-pipeline-num-layers and "
            "--decoder-last-pipeline-num-layers, or --pipeline-model-parallel-layout, to place the "
            "layers"
        )


def require_parts(args: argparse.Namespace) -> None:
    """Raise a ValueError if a layer kind's flags in unvalidated ``args`` are inconsistent."""
    for part in LAYER_KINDS:
        part.require(args, args.tensor_model_parallel_size)


def refuse_gpu_flags(args: argparse.Namespace) -> None:
    """Raise a ValueError if ``args`` contain flags of Megatron that need a GPU."""
    if (reason := limit_for("no_gpu", args)) is not None:
        raise ValueError(reason)


def vocabulary_parallel(args: argparse.Namespace) -> bool:
    """Return whether ``args`` enable vocabulary parallelism."""
    return getattr(args, "epp_vocab_parallel", OFF) == ON


def vocabulary_refusal(args: argparse.Namespace) -> tuple[str, str] | None:
    """Return (reason, remedy) if ``args`` exclude vocabulary parallelism, else None."""
    stages, ranks = stages_of(args), args.tensor_model_parallel_size
    if stages == 1:
        return "there is one stage, which has the whole vocabulary", "leave it out"
    if lockstep_of(args) > 1:
        return (
            "experts are sharded over replicas",
            "give an --expert-model-parallel-size that divides --tensor-model-parallel-size times "
            "--context-parallel-size",
        )
    if getattr(args, "use_mup", False):
        return "it does not run scaled logits (--use-mup)", "leave these out"
    saves = args.save or args.load
    if saves and getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        return (
            f"--ckpt-format {args.ckpt_format} cannot save the LM head in parts",
            "give torch_dist",
        )
    words = getattr(args, "padded_vocab_size", None)
    if words and words % (stages * ranks):
        return (
            f"{words} words, padded, do not divide over {stages} stages times {ranks} "
            "tensor-parallel ranks",
            "give a --make-vocab-size-divisible-by that the stages divide",
        )
    return None


def require_vocabulary_parallel(args: argparse.Namespace) -> None:
    """Raise a ValueError if ``args`` enable vocabulary parallelism but other flags exclude it."""
    if vocabulary_parallel(args) and (refused := vocabulary_refusal(args)) is not None:
        why, instead = refused
        raise ValueError(
            f"--epp-vocab-parallel on: {why}; {instead}, or give --epp-vocab-parallel off"
        )


def refuse_by_name(args: argparse.Namespace) -> None:
    """Raise a ValueError if ``args``, before validation, use an unsupported feature (table.py)."""
    for row in TABLE:
        with suppress(AttributeError, TypeError):  # validation would set missing attributes
            if (reason := row.reason("training", args)) is not None:
                raise ValueError(reason)


def refuse(args: argparse.Namespace) -> None:
    """Raise a ValueError that names the first unsupported feature that ``args`` use."""
    context = getattr(args, "seq_length", None)
    if context is not None and context < 1:
        raise ValueError(f"--seq-length {context}: expected a context of at least 1 token")
    if (reason := limit_for("training", args)) is not None:
        raise ValueError(reason)
    for part in LAYER_KINDS:
        part.refuse(args)
    require_vocabulary_parallel(args)
    if getattr(args, "fp8", None) and os.environ.get(_FLOAT_SCALES) == "1":
        raise ValueError(
            f"{_FLOAT_SCALES}=1: with --epp fp8's scales are powers of two, so that a plan changes "
            "nothing but the smallest numbers; unset it"
        )
    if args.context_parallel_size > 1:
        ranks = args.tensor_model_parallel_size
        groups = query_groups(args)
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
