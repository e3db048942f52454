"""Small model with the structure of the user's model, for comparisons with a reference model.

The small model has fewer heads, fewer layers per stage, a smaller head size, a smaller vocabulary
and a shorter context. The following properties are those of the user's model:

- the number of query heads per key/value head (at most 8);
- the ratio of attention width (heads times head size) to the hidden size;
- the ratio of feed-forward size to the hidden size (at most 4);
- norms, activation, biases, tied embeddings and position embeddings;
- the layout over the stages and the parallel degrees.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from megatron_epp.certify.batches import CONTEXT
from megatron_epp.certify.degrees import Degrees
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.certify.layer_selection import small_kinds
from megatron_epp.mcore.hybrid.pattern import pattern_of, symbols_of_layers
from megatron_epp.mcore.kinds.base import query_groups
from megatron_epp.mcore.kinds.certificates import LAYER_CERTIFICATES
from megatron_epp.mcore.kinds.registry import model_sizes, require_pattern
from megatron_epp.mcore.model.shape import stage_layers
from megatron_epp.mcore.placing.requested import asked_placement, layers_of_placement, placed_values

HEAD_SIZE = 8
VOCABULARY = 61  # rounded up to a multiple of the ranks that share it
GROUPS_PER_RANK = 2  # key/value heads
LEAST_HEADS_PER_RANK = 4  # query heads
MOST_HEADS_PER_GROUP = 8
UNEVEN_LAYERS = 3  # limit per stage if the stages differ; else 2
HALF_LAYERS = 6  # limit per stage of a HybridModel, whose layer is about half a GPTModel's layer


def _of_pattern(args: Namespace, pattern: str, stages: int) -> Namespace:
    """Return parsed ``args``, plus the values that Megatron derives from a hybrid ``pattern``."""
    small = Namespace(**vars(args))
    small.num_layers = len(symbols_of_layers(pattern))
    small.hybrid_layer_pattern, small.hybrid_override_pattern = pattern, None
    for kind in LAYER_CERTIFICATES:
        kind.read_pattern(small, pattern)
    small.pipeline_model_parallel_size = stages
    require_pattern(small)
    return small


def fewer(counts: Sequence[int]) -> list[int]:
    """Return a small number of layers (0 to 3) for every stage, given the full numbers.

    Stages with different full numbers get different small numbers if at most 3 different full
    numbers above 0 occur. Empty stages stay empty.
    """
    sizes = sorted({count for count in counts if count})
    if len(sizes) == 1:
        return [min(count, 2) for count in counts]
    return [min(1 + sizes.index(count), UNEVEN_LAYERS) if count else 0 for count in counts]


def step_of(args: Namespace, tp: int) -> int:
    """Return a number that must divide the rows and columns of a rank's shard of a matrix.

    The number is 1 without fp8, 32 with mxfp8, and 16 with other fp8 recipes, because fp8 GEMMs
    require such multiples. If ``tp`` ranks share a matrix, it is 128 instead of 16. A block with
    one scale has this size, so shards have the same scales as the full matrix.
    """
    if not getattr(args, "fp8", None) or args.transformer_impl == "local":
        return 1
    return 32 if args.fp8_recipe == "mxfp8" else 16 if tp == 1 else 128


def heads(query: int, key: int, tp: int, cp: int = 1) -> tuple[int, int]:
    """Return small numbers of (query heads, key/value heads) in the ratio of the user's model.

    The ratio is at most 8, unless ``tp`` ranks that share key/value heads need a larger ratio. If
    no small numbers can be split over the context-parallel ranks, the function keeps the number of
    key/value heads. A later check then refuses the model.

    Args:
        query: Number of query heads of the user's model.
        key: Number of key/value heads of the user's model.
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.

    Raises:
        ValueError: A number of heads is less than 1, or the query heads are not a multiple of the
            key/value heads.
    """
    if query < 1 or key < 1 or query % key:
        raise ValueError(f"--num-attention-heads {query}: no multiple of --num-query-groups {key}")
    ratio = min(query // key, MOST_HEADS_PER_GROUP)
    if key < tp:  # ranks share a key/value head
        ratio = max(ratio, tp // gcd(key, tp))
        return key * ratio, key
    wanted = min(max(GROUPS_PER_RANK, LEAST_HEADS_PER_RANK // ratio), key // tp)
    fits = (g for g in range(wanted, key // tp + 1) if _divides(g * ratio, g, cp))
    groups = next(fits, key // tp) * tp
    return groups * ratio, groups


def _divides(query: int, key: int, cp: int) -> bool:
    """Return whether a rank's query and key/value heads can be split over ``cp`` ranks."""
    return not query % cp and not (key % cp and cp % key)


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Small model: number of layers of every stage, and values of args by name."""

    layers: tuple[int, ...]
    values: dict[str, Any]


def small(args: Namespace, degrees: Degrees, layout: Sequence[Sequence[str]] | None) -> SmallModel:
    """Return the scaled-down model for Megatron's parsed ``args``.

    ``layout`` contains the symbols of --pipeline-model-parallel-layout for each stage; None without
    this flag.

    Raises:
        ValueError: Flags are missing or inconsistent.
    """
    pattern = pattern_of(args)
    if pattern is not None:
        args = _of_pattern(args, pattern, degrees.pp)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is missing among the model flags; expected at least {flag} 1")
    args = Namespace(**{**vars(args), "context_parallel_size": degrees.cp})
    tp = degrees.tp
    placement = asked_placement(args, degrees.pp)
    if placement is None:
        stages = stage_layers(args, degrees.pp, layout)
    else:
        stages = list(layers_of_placement(placement, args.num_layers))
    counts = fewer(stages) if pattern is None else [min(count, HALF_LAYERS) for count in stages]
    wanted = args.num_attention_heads
    groups = query_groups(args)
    query, key = heads(wanted, groups, tp, degrees.cp)
    channels = model_sizes(args)["head_size"]
    width = channels * wanted / args.hidden_size if channels else 1.0
    step = step_of(args, tp)
    head_size = max(HEAD_SIZE, step // LEAST_HEADS_PER_RANK)
    grain = tp * max(1, step // head_size)
    hidden = max(1, round(query / width / grain)) * grain * head_size
    unit = tp * max(HEAD_SIZE, step)
    ffn = 4.0 if args.ffn_hidden_size is None else args.ffn_hidden_size / args.hidden_size
    if args.ffn_hidden_size is None and args.swiglu:
        ffn = 8 / 3  # Megatron's default
    parts = tp * len(stages) if vocabulary_parallel(args) else tp
    vocabulary = -(-VOCABULARY // parts) * parts
    changed = {
        "num_layers": sum(counts),
        "encoder_num_layers": None,
        "hidden_size": hidden,
        "ffn_hidden_size": max(1, round(min(ffn, 4.0) * hidden / unit)) * unit,
        "num_attention_heads": query,
        "num_query_groups": key if args.group_query_attention else 1,
        "kv_channels": head_size,
        "seq_length": CONTEXT,
        "encoder_seq_length": None,
        "max_position_embeddings": CONTEXT,
        "vocab_size": vocabulary,
        "padded_vocab_size": vocabulary,
        # Queries and keys of about unit size, so that the softmax is neither flat nor a maximum.
        "init_method_std": hidden**-0.5,
        "pipeline_model_parallel_size": degrees.pp,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": degrees.cp,
    }
    changed |= small_kinds(args, stages, counts)
    for kind in LAYER_CERTIFICATES:
        changed |= kind.small(args, hidden, tp, head_size, step)
    first = args.decoder_first_pipeline_num_layers
    if first is not None and pattern is None:
        changed["decoder_first_pipeline_num_layers"] = counts[0]
    if args.decoder_last_pipeline_num_layers is not None and pattern is None:
        changed["decoder_last_pipeline_num_layers"] = counts[-1]
    if placement is not None:
        pattern = changed.get("hybrid_layer_pattern")
        changed |= placed_values(placement, counts, args.mtp_num_layers or 0, pattern)
    if layout is not None:
        changed["pipeline_model_parallel_layout"] = "|".join(
            "E" * stage.count("E") + "t" * count + "m" * stage.count("m") + "L" * stage.count("L")
            for stage, count in zip(map(list, layout), counts, strict=True)
        )
    return SmallModel(tuple(counts), changed)
