"""Features of Megatron that cannot run through elastic pipelines: refused at start, by name."""

import argparse

from megatron_epp.layers.attention.ulysses import refuse_heads
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.config import AUTO, OFF, ON, PLACING_FLAGS
from megatron_epp.mcore.model.kinds.registry import MEGATRON_PARTS, lockstep_of

_PLACES = (*PLACING_FLAGS, "hybrid_layer_pattern", "hybrid_override_pattern")


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


def require_parts(args: argparse.Namespace) -> None:
    """Raise a ValueError where sizes of layers make no sense; of flags as they are given."""
    for part in MEGATRON_PARTS:
        part.require(args, args.tensor_model_parallel_size)


def refuse_gpu_flags(args: argparse.Namespace) -> None:
    """Refuse, by name, Megatron flags that need a GPU. ValueError: one line."""
    if (said := limit_for("no_gpu", args)) is not None:
        raise ValueError(said)


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
    if (said := limit_for("epp", args)) is not None:
        raise ValueError(said)
    for part in MEGATRON_PARTS:
        part.refuse(args)
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
