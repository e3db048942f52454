"""Segments of interleaved pipelines, which --epp joins to one segment per stage.

Megatron's layouts may have several segments per rank, assigned in round-robin order. With --epp, a
rank gets as many segments, but consecutive ones, and computes them as one stage.

    Et|tt|tt|tL on two ranks      becomes Ettt|tttL
"""

from argparse import Namespace
from collections.abc import Sequence

from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.hybrid.pattern import (
    BOUNDARY,
    MTP_SEPARATOR,
    joined,
    mtp_part_of,
    pattern_of,
)

_SYMBOLS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout_symbols(text: str) -> list[str]:
    """Return the symbols of every segment of a --pipeline-model-parallel-layout.

    The function expands repeats: ``t*3`` becomes ``ttt``.

    Raises:
        ValueError: The layout is invalid.
    """
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        segments = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError as error:
        raise ValueError(f"--pipeline-model-parallel-layout {text}: {error}") from error
    return ["".join(_SYMBOLS[layer.name] for layer in segment) for segment in segments]


def _one_a_stage(segments: Sequence[str], stages: int) -> str | None:
    """Join consecutive ``segments`` to one segment per stage, and return the layout's text.

    The result is None if each stage already has one segment, or if the number of segments is not a
    multiple of the number of stages.
    """
    each, rest = divmod(len(segments), stages)
    if rest or each == 1:
        return None
    return joined(["".join(segments[at : at + each]) for at in range(0, len(segments), each)])


def _layout(args: Namespace) -> dict[str, str]:
    name = "pipeline_model_parallel_layout"
    text = getattr(args, name, None)
    if text is None:
        return {}
    return {name: _one_a_stage(layout_symbols(text), args.pipeline_model_parallel_size) or text}


def _pattern(args: Namespace) -> dict[str, str]:
    pattern = pattern_of(args)
    if pattern is None:
        return {}
    segments = pattern.partition(MTP_SEPARATOR)[0].split(BOUNDARY)
    one = _one_a_stage(segments, args.pipeline_model_parallel_size)
    text = pattern if one is None else one + mtp_part_of(pattern)
    names = "hybrid_layer_pattern", "hybrid_override_pattern"
    return {name: text for name in names if getattr(args, name, None) is not None}


_BY = (
    "a stage computes its segments as one, so they are those next to each other; slices of long "
    "documents shrink the warm-up"
)
SEGMENTS = (
    ReplacedFlags("pipeline_model_parallel_layout", _BY, _layout),
    ReplacedFlags("hybrid_layer_pattern hybrid_override_pattern", _BY, _pattern),
)
