"""Segments of interleaved pipelines: with --epp, those of a stage are joined.

Megatron's layouts may have several segments per stage, assigned round-robin. Here a stage gets as
many of them, next to each other, and computes them as one.

    Et|tt|tt|tL on two stages      Ettt|tttL
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
    """Return the symbols of every segment of a --pipeline-model-parallel-layout, expanded.

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
    """Return the text with segments joined to ``stages``.

    None means that there are as many already, or that they do not divide over the stages.
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
