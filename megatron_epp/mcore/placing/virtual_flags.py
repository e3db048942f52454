"""Translation of Megatron's flags of interleaved pipelines, with ``--epp-placement flags``.

    --num-virtual-stages-per-pipeline-rank 2            interleaved 2
    --num-layers-per-virtual-pipeline-stage 2           interleaved N, N = layers / ranks / 2
    --pipeline-model-parallel-layout 'Et|t|t|ttL'       on two ranks: interleaved 2, with 1 1 1 2
                                                        layers per stage
    --hybrid-layer-pattern 'M*|M-|M*|M-'                on two ranks: interleaved 2, with 2 2 2 2
                                                        layers per stage

With other values of --epp-placement, the first two flags have no effect, and the segments of a rank
are joined to one stage.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from megatron_epp.ir.placement import EVENLY, INTERLEAVED
from megatron_epp.mcore.flags.config import PLACEMENT_FLAGS
from megatron_epp.mcore.hybrid.pattern import BOUNDARY, MTP_SEPARATOR, pattern_of
from megatron_epp.mcore.hybrid.segments import layout_symbols

_LAYERS, _TIMES = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
_LAYOUT = "pipeline_model_parallel_layout"


def watch_virtual_stages(parser: ArgumentParser) -> ArgumentParser:
    """Make ``parser`` translate Megatron's flags of interleaved pipelines; return ``parser``.

    The parser translates them if --epp-placement is ``flags``, before other flags are checked.
    """
    parse = parser.parse_args

    def parse_args(words: Sequence[str] | None = None, namespace: Any = None) -> Any:
        args = parse(words, namespace)
        if args.epp and args.epp_placement == PLACEMENT_FLAGS:
            _obey(args)
        return args

    parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    return parser


def _obey(args: Namespace) -> None:
    """Set --epp-placement in ``args`` to the placement of Megatron's flags, and clear these flags.

    Raises:
        ValueError: The flags do not describe a valid placement.
    """
    ranks, pattern = args.pipeline_model_parallel_size, pattern_of(args)
    placement = EVENLY
    if args.num_layers_per_virtual_pipeline_stage or args.num_virtual_stages_per_pipeline_rank:
        placement = f"{INTERLEAVED} {_times(args, ranks)}"
    elif (text := getattr(args, _LAYOUT)) is not None:
        segments = layout_symbols(text)
        if len(segments) > ranks:
            placement = _assigned([segment.count("t") for segment in segments], ranks, text)
            setattr(args, _LAYOUT, None)
    elif pattern is not None:
        layers, *mtp_segments = pattern.split(MTP_SEPARATOR)
        segments = layers.split(BOUNDARY)
        if len(segments) > ranks:
            placement = _assigned(list(map(len, segments)), ranks, pattern)
            joined = MTP_SEPARATOR.join(["".join(segments), *mtp_segments])
            names = "hybrid_layer_pattern", "hybrid_override_pattern"
            vars(args).update((name, joined) for name in names if getattr(args, name, None))
    setattr(args, _LAYERS, None)
    setattr(args, _TIMES, None)
    args.epp_placement = EVENLY if ranks == 1 else placement


def _times(args: Namespace, ranks: int) -> int:
    """Return the number of stages per rank."""
    times = args.num_virtual_stages_per_pipeline_rank
    each = args.num_layers_per_virtual_pipeline_stage
    if times is not None:
        return int(times)
    layers = args.num_layers or 0
    if layers % (ranks * each):
        raise ValueError(
            f"--num-layers-per-virtual-pipeline-stage {each}: {layers} layers on {ranks} pipeline "
            f"ranks; expected a divisor of {layers / ranks:g}, the layers of a rank"
        )
    return int(layers // (ranks * each))


def _assigned(layers: Sequence[int], ranks: int, text: str) -> str:
    """Return the value of --epp-placement for stages of ``layers``, on ranks in round-robin order.

    ``text`` is the layout or pattern, named in the error message.
    """
    if len(layers) % ranks or min(layers) < 1:
        raise ValueError(
            f"--epp-placement flags: {text} has {len(layers)} segments for {ranks} pipeline ranks; "
            "expected as many for each, with a layer in every one"
        )
    place = " ".join(str(stage % ranks) for stage in range(len(layers)))
    return f"place {place} layers {' '.join(map(str, layers))}"
