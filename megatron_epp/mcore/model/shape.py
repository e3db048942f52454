"""Shape of the model that Megatron's flags describe, layer by layer."""

import copy
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.kinds.layer import LayerShape, kind_names
from megatron_epp.cost.layer_kinds import format_kinds
from megatron_epp.ir.placement import Placement
from megatron_epp.mcore.hybrid.pattern import layers_of_stages, mtp_symbols, pattern_of
from megatron_epp.mcore.hybrid.segments import layout_symbols
from megatron_epp.mcore.kinds.registry import LAYER_KINDS, kind_sizes, model_sizes
from megatron_epp.mcore.placing.requested import STAGE_LAYERS, place_of


def model_shape(args: Any) -> Model:
    """Return the cost model's description of the model that Megatron's ``args`` define.

    Raises:
        ValueError: A pattern of layer kinds does not fit the number of layers.
    """
    shapes = (*layer_shapes(args), *mtp_shapes(args))
    names = kind_names(shapes)
    return Model(
        name="megatron",
        layers=len(shapes),
        hidden=args.hidden_size,
        ffn_hidden=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        **model_sizes(args),
        vocabulary=args.padded_vocab_size,
        gated=bool(args.swiglu or getattr(args, "quick_geglu", False)),
        tied=not args.untie_embeddings_and_output_weights,
        kinds={names[shape]: shape for shape in shapes} if names else {},
        pattern=format_kinds([names[shape] for shape in shapes]) if names else "",
    )


def layer_shapes(args: Any) -> tuple[LayerShape, ...]:
    """Return the LayerShape of each decoder layer, in the order of the layers."""
    there = [(part, part.layers(args)) for part in LAYER_KINDS]
    return tuple(
        LayerShape(**kind_sizes(args, [part for part, layers in there if layers[at]]))
        for at in range(args.num_layers)
    )


def mtp_shapes(args: Any) -> tuple[LayerShape, ...]:
    """Return the LayerShape of each layer of the MTP modules; () without MTP.

    An MTP module has the layers of its pattern, or one layer like the decoder's last layer. Layer
    numbers restart at 1 in MTP modules, as in Megatron. The layer number determines whether the
    layer has a sliding window.
    """
    depths = getattr(args, "mtp_num_layers", None) or 0
    if not depths:
        return ()
    pattern = mtp_symbols(getattr(args, "hybrid_layer_pattern", None) or "")
    result = []
    for depth in range(depths):
        if pattern:
            inner = copy.copy(args)
            inner.num_layers, inner.hybrid_layer_pattern = len(pattern), pattern
            shapes = list(layer_shapes(inner))
        else:
            number = 0 if getattr(args, "mtp_use_repeated_layer", False) else depth
            masks = {kind: kind.layers(args) for kind in LAYER_KINDS}
            there = [kind for kind, mask in masks.items() if mask[number if kind.NUMBERED else -1]]
            shapes = [LayerShape(**kind_sizes(args, there))]
        result += [replace(shapes[0], predicts=True), *shapes[1:]]
    return tuple(result)


def with_mtp(args: Any, layers: Sequence[int]) -> tuple[int, ...]:
    """Return ``layers``, the decoder layers per stage, plus the MTP layers on the last stage."""
    *others, last = layers
    return (*others, last + len(mtp_shapes(args)))


def placement_of(args: Any) -> Placement:
    """Return the rank and the number of decoder layers of every stage of a job.

    ``args`` are Megatron's validated args, with or without --epp.
    """
    place, layers = place_of(args), getattr(args, STAGE_LAYERS, None)
    if not layers:  # without --epp, Megatron may have interleaved stages
        times = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
        place = tuple(range(args.pipeline_model_parallel_size)) * times
        text = args.pipeline_model_parallel_layout
        layers = stage_layers(args, len(place), None if text is None else layout_symbols(text))
    return Placement(place, tuple(layers))


def stage_layers(args: Namespace, pp: int, layout: Sequence[Sequence[str]] | None) -> list[int]:
    """Return the number of transformer layers of every stage, as Megatron's flags place them.

    Args:
        args: Megatron's arguments.
        pp: Number of stages.
        layout: Symbols of each stage in --pipeline-model-parallel-layout, where t is a transformer
            layer; None without this flag.

    Raises:
        ValueError: The flags do not divide the layers over the stages.
    """
    if pattern_of(args) is not None:
        return list(layers_of_stages(args))
    layers = args.num_layers
    if layout is not None:
        if len(layout) != pp:
            raise ValueError(
                f"--pipeline-model-parallel-layout: {len(layout)} stages where --pp is {pp}; "
                "expected one stage each"
            )
        counts = [list(stage).count("t") for stage in layout]
        if sum(counts) != layers:
            raise ValueError(
                f"--pipeline-model-parallel-layout: {sum(counts)} layers; expected --num-layers, "
                f"{layers}"
            )
        return counts
    if layers < pp:
        raise ValueError(
            f"--pp {pp}: more stages than the {layers} layers; expected at most one stage per layer"
        )
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        ends = [count for count in (first, last) if count is not None]
        middle = pp - len(ends)
        rest = layers - sum(ends)
        if pp < 2 or rest < 0 or (rest % middle if middle else rest):
            raise ValueError(
                f"--num-layers {layers}: {rest} layers are left for {middle} stages after those of "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers; "
                "expected the same number for each"
            )
        inner = [rest // middle] * middle if middle else []
        return [*([first] * (first is not None)), *inner, *([last] * (last is not None))]
    before = int(bool(args.account_for_embedding_in_pipeline_split))
    after = int(bool(args.account_for_loss_in_pipeline_split))
    counted = layers + before + after
    if counted % pp:
        raise ValueError(
            f"--num-layers {layers}: does not divide over --pp {pp}; expected a multiple, or "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers, or "
            "--pipeline-model-parallel-layout, to place the layers"
        )
    counts = [counted // pp] * pp
    counts[0] -= before
    counts[-1] -= after
    return counts
