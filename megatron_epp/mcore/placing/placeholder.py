"""Megatron's flags that place layers: translations, and defaults that pass Megatron's checks.

With ``--epp-placement auto``, flags of interleaved pipelines are translated to a placement:

    --num-virtual-stages-per-pipeline-rank 2            interleaved 2
    --num-layers-per-virtual-pipeline-stage 2           interleaved N, N = layers / ranks / 2
    --pipeline-model-parallel-layout 'Et|t|t|ttL'       on two ranks: interleaved 2, with 1 1 1 2
                                                        layers per stage
    --hybrid-layer-pattern 'M*|M-|M*|M-'                on two ranks: interleaved 2, with 2 2 2 2
                                                        layers per stage

With other values of --epp-placement, or if the flags describe no valid placement, the first two
flags have no effect, and the segments of a rank are joined to one stage.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from math import lcm
from typing import Any

from megatron_epp.cost.build import even_layers
from megatron_epp.ir.placement import EVENLY, INTERLEAVED, Placement
from megatron_epp.mcore.flags.config import (
    DIVISIBLE_BY,
    ON,
    PLACED_BY,
    PLACING_FLAGS,
    placement_by_time,
)
from megatron_epp.mcore.hybrid.pattern import (
    BOUNDARY,
    FLAG,
    MTP_SEPARATOR,
    pattern_of,
    symbols_of_layers,
)
from megatron_epp.mcore.hybrid.segments import layout_symbols
from megatron_epp.mcore.placing.requested import asked_placement, layers_of_placement, placed_values

_LAYERS, _TIMES = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
_LAYOUT = "pipeline_model_parallel_layout"


def placeholder(wanted: Any) -> dict[str, Any]:
    """Return parser defaults that pass Megatron's checks before the layers per stage are chosen.

    Args:
        wanted: The flags as typed.

    Raises:
        ValueError: The placement is not valid, or there are more stages than layers.
    """
    stages = wanted.pipeline_model_parallel_size
    if (placement := asked_placement(wanted, stages)) is not None:
        return _placed(wanted, placement)
    if not placement_by_time(wanted) or stages == 1:
        return {}
    pattern = pattern_of(wanted)
    layers = wanted.num_layers if pattern is None else len(symbols_of_layers(pattern))
    if not layers:  # they may be the checkpoint's (--use-checkpoint-args)
        return {}
    if layers < stages:
        raise ValueError(
            f"--pipeline-model-parallel-size {stages}: more stages than the {layers} layers; "
            "expected at most one stage per layer"
        )
    if pattern is not None:  # Megatron does not check layers per stage in a pattern without |
        return {}
    even = Placement(tuple(range(stages)), even_layers(wanted.num_layers, stages))
    return placed_values(even, even.layers, wanted.mtp_num_layers or 0)


def _placed(wanted: Any, placement: Placement) -> dict[str, Any]:
    """Return parser defaults for ``placement``, which --epp-placement names."""
    pattern = pattern_of(wanted)
    if pattern is not None and BOUNDARY in pattern:
        raise ValueError(
            f"{FLAG} {pattern}: its | say what a rank has; with --epp-placement "
            "leave them out, and say with a line 'layers' of a file what each stage has"
        )
    layers = wanted.num_layers if pattern is None else len(symbols_of_layers(pattern))
    of_stages = layers_of_placement(placement, layers or 0)
    values = placed_values(placement, of_stages, wanted.mtp_num_layers or 0, pattern)
    if wanted.epp_vocab_parallel == ON:  # all stages need equal numbers of vocabulary rows
        values["make_vocab_size_divisible_by"] = lcm(DIVISIBLE_BY, placement.stages)
    return values


# ------------------------------------------------------------------ Megatron's flags


def watch_virtual_stages(parser: ArgumentParser) -> ArgumentParser:
    """Make ``parser`` translate Megatron's flags of interleaved pipelines; return ``parser``.

    If --epp-placement is ``auto``, flags that place layers replace its value, before other flags
    are checked.
    """
    parse = parser.parse_args

    def parse_args(words: Sequence[str] | None = None, namespace: Any = None) -> Any:
        args = parse(words, namespace)
        if args.epp and placement_by_time(args):
            _prefer_flags(args, parser)
        return args

    parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    return parser


def _prefer_flags(args: Namespace, parser: ArgumentParser) -> None:
    """Replace the value auto of --epp-placement in ``args`` if a flag places layers on stages."""
    by_file = args.epp_layouts is not None  # its lines say the number of ranks
    if getattr(args, "pipeline_model_parallel_size", 1) == 1 and not by_file:
        return
    virtual = () if by_file else (_TIMES, _LAYERS)
    if (flag := _placing_flag(args, parser, (*PLACING_FLAGS, *virtual))) is None:
        return
    typed, why = dict(vars(args)), f"{flag} says so"
    try:
        if not by_file:
            _obey(args, parser)
            typed_alone = {
                name: PLACING_FLAGS[name]
                for name in PLACING_FLAGS
                if getattr(args, name) == parser.get_default(name)  # may be of placeholder()
            }
            placeholder(Namespace(**vars(args) | typed_alone))
    except ValueError as invalid:  # the flags of virtual stages then have no effect
        by_file, why = True, str(invalid)
    if by_file:
        vars(args).update(typed, epp_placement=EVENLY)
    setattr(args, PLACED_BY, why)


def _placing_flag(args: Namespace, parser: ArgumentParser, names: Sequence[str]) -> str | None:
    """Return the first typed flag of the destinations ``names``, or a pattern with |, or None."""
    for name in names:
        neutral = parser.get_default(name)
        if getattr(args, name, neutral) != neutral:
            return f"--{name.replace('_', '-')}"
    pattern = pattern_of(args)
    return None if pattern is None or BOUNDARY not in pattern else f"| in {FLAG} {pattern}"


def _obey(args: Namespace, parser: ArgumentParser) -> None:
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
            placement = _round_robin([segment.count("t") for segment in segments], ranks, text)
            setattr(args, _LAYOUT, parser.get_default(_LAYOUT))  # that of placeholder()
    elif pattern is not None:
        layers, *mtp_segments = pattern.split(MTP_SEPARATOR)
        segments = layers.split(BOUNDARY)
        if len(segments) > ranks:
            placement = _round_robin(list(map(len, segments)), ranks, pattern)
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


def _round_robin(layers: Sequence[int], ranks: int, text: str) -> str:
    """Return the value of --epp-placement for stages of ``layers``, on ranks in round-robin order.

    ``text`` is the layout or pattern, named in the error message.
    """
    if len(layers) % ranks or min(layers) < 1:
        raise ValueError(
            f"{text} has {len(layers)} segments for {ranks} pipeline ranks; expected as many for "
            "each, with a layer in every one"
        )
    place = " ".join(str(stage % ranks) for stage in range(len(layers)))
    return f"place {place} layers {' '.join(map(str, layers))}"
