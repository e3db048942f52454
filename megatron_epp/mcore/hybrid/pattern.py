"""The layer pattern of Megatron's HybridModel (--hybrid-layer-pattern).

The pattern has one symbol per layer and ``|`` between pipeline stages. A layer is one sublayer:
attention, MLP, MoE or SSM. Without ``|``, all stages have equal numbers of layers. Exceptions are
stages with --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers.

    *-*-|*E*-      stage 0: attention, MLP, attention, MLP
                   stage 1: attention, MoE, attention, MLP
"""

from argparse import Namespace
from collections.abc import Sequence
from itertools import islice

from megatron_epp.mcore.flags.config import placement_by_time

BOUNDARY, MTP_SEPARATOR = "|", "/"  # between stages; before each MTP module
FLAG = "--hybrid-layer-pattern"


def pattern_of(args: Namespace) -> str | None:
    """Return the layer pattern in parsed flags; None if the model is not a HybridModel.

    The pattern may also be the value of the flag's former name, --hybrid-override-pattern.
    """
    pattern = getattr(args, "hybrid_layer_pattern", None)
    return getattr(args, "hybrid_override_pattern", None) if pattern is None else pattern


def symbols_of_layers(pattern: str) -> str:
    """Return the symbols of all decoder layers, from first to last, without ``|`` and MTP."""
    return pattern.partition(MTP_SEPARATOR)[0].replace(BOUNDARY, "")


def mtp_part_of(pattern: str) -> str:
    """Return the part of the pattern that describes MTP modules; "" without MTP.

    The part contains a / and the symbols of a module's layers, once per MTP module. All modules
    have the same symbols.
    """
    return "".join(pattern.partition(MTP_SEPARATOR)[1:])


def mtp_symbols(pattern: str) -> str:
    """Return the symbols of the layers of one MTP module; "" without MTP."""
    return pattern.partition(MTP_SEPARATOR)[2].partition(MTP_SEPARATOR)[0]


def placed_by_time(args: Namespace) -> bool:
    """Return whether the planner divides the pattern into stages.

    The result is True with --epp-placement auto, if there are several stages and the pattern
    contains no |.
    """
    pattern = pattern_of(args)
    if pattern is None or not placement_by_time(args):
        return False
    return args.pipeline_model_parallel_size > 1 and BOUNDARY not in pattern


def layers_of_stages(args: Namespace) -> tuple[int, ...]:
    """Return the number of layers of every segment of the pattern.

    Without interleaving, a segment is a stage.

    Raises:
        ValueError: The pattern cannot be divided into the stages of the flags.
    """
    pattern, stages = pattern_of(args), args.pipeline_model_parallel_size
    assert pattern is not None, "asked of a HybridModel"
    segments = pattern.partition(MTP_SEPARATOR)[0].split(BOUNDARY)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    ends = [count for count in (first, last) if count is not None]
    flag_text = f"{FLAG} {pattern}"
    if len(segments) > 1:
        if ends:
            raise ValueError(
                f"{flag_text}: its | say where stages end; leave "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers out"
            )
        if len(segments) % stages:
            raise ValueError(
                f"{flag_text}: {len(segments)} segments for --pipeline-model-parallel-size "
                f"{stages}; expected {stages}, one for each stage"
            )
        return tuple(map(len, segments))
    layers, middle = len(segments[0]), stages - len(ends)
    rest = layers - sum(ends)
    if middle < 0 or rest < 0 or (rest % middle if middle else rest):
        raise ValueError(
            f"{flag_text}: {layers} layers, of which {rest} are left for {middle} of "
            f"--pipeline-model-parallel-size {stages} stages; expected the same number for each, "
            "or | between the stages in the pattern"
        )
    each = [rest // middle] * middle if middle else []
    return (*([first] * (first is not None)), *each, *([last] * (last is not None)))


def joined(segments: Sequence[str]) -> str:
    """Return a pattern: ``segments`` (layer symbols of each stage), with ``|`` between them."""
    return BOUNDARY.join(segments)


def with_boundaries(pattern: str, layers: Sequence[int]) -> str:
    """Return ``pattern`` with new boundaries ``|``: stage i gets ``layers[i]`` layers."""
    symbols = iter(symbols_of_layers(pattern))
    return joined(["".join(islice(symbols, count)) for count in layers]) + mtp_part_of(pattern)
