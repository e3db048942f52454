"""Layers and vocabulary of the stages by time: ``--epp-partition auto``, ``--epp-vocab-parallel
auto``.

It is chosen before Megatron builds the model. What is known then is the corpus's lengths, from its
``.idx`` files, and a cost model: the file of --epp-cost-model, or the device's figures by name.
Every rank reads the same and computes the same. The partition belongs to the run: it is kept beside
the checkpoint, and a run that resumes takes it from there, as weights and optimizer states lie in
files by stage.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.training.utils import get_blend_and_blend_per_split

from megatron_epp.control.files import write_whole
from megatron_epp.control.given_steps import first_given
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir.placement import Placement
from megatron_epp.mcore.capabilities.refusals import whole_words
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.data.global_batches import scheduled_sizes
from megatron_epp.mcore.flags.config import (
    ANALYTIC,
    AUTO,
    OFF,
    ON,
    PARTITION_AUTO,
    PLACING_FLAGS,
    Config,
    layers_by_time,
    placement_by_time,
)
from megatron_epp.mcore.job_cost import analytic, device_name, training_cost, training_levers
from megatron_epp.mcore.model.hybrid.pattern import (
    layers_of_stages,
    letters_of_layers,
    pattern_of,
    placed_by_time,
    with_borders,
)
from megatron_epp.mcore.model.shape import further_shapes, stage_layers, with_further
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.mcore.placing.asked import (
    PLACE,
    STAGE_LAYERS,
    asked_placement,
    layers_of_placement,
    place_of,
    placed_values,
)
from megatron_epp.planner.options import Options

KEPT = "epp-partition.json"  # layers by stage, beside the checkpoint
KEPT_VOCABULARY = "epp-vocab-parallel.json"  # on or off, there, too
AMPLE_BYTES = 1e15
BATCHES = 2  # that a partition is chosen on


def placeholder(wanted: Any) -> dict[str, Any]:
    """Parser defaults that let Megatron's checks pass before the partition is known; ``wanted`` is
    what was typed. ValueError: another flag says where layers lie, or none could."""
    stages = wanted.pipeline_model_parallel_size
    if (placement := asked_placement(wanted, stages)) is not None:
        return _placed(wanted, placement)
    if not layers_by_time(wanted) or stages == 1:
        return {}
    asked = "--epp-partition auto"
    if placement_by_time(wanted):
        asked = "--epp-placement auto"
        _require_cost_model(wanted)
    for name, silent in PLACING_FLAGS.items():
        if getattr(wanted, name) != silent:
            raise ValueError(
                f"--{name.replace('_', '-')} says where layers lie, and {asked} "
                "chooses that: leave one of the two out"
            )
    pattern = pattern_of(wanted)
    if pattern is not None and not placed_by_time(wanted):
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: its | say where stages end, and {asked} "
            "chooses that: leave one of the two out"
        )
    layers = wanted.num_layers if pattern is None else len(letters_of_layers(pattern))
    if not layers:
        raise ValueError(
            f"{asked} divides the layers of --num-layers or --hybrid-layer-pattern; "
            "expected one of them"
        )
    if layers < stages:
        raise ValueError(
            f"--pipeline-model-parallel-size {stages}: more stages than the {layers} layers; "
            "expected at most one stage per layer"
        )
    if pattern is not None:  # without | its layers are nowhere yet, to Megatron's checks, too
        return {}
    from megatron_epp.planner.partition import layout_text

    even = even_layers(wanted.num_layers, stages)
    return {"pipeline_model_parallel_layout": layout_text(even, wanted.mtp_num_layers or 0)}


def _placed(wanted: Any, placement: Placement) -> dict[str, Any]:
    """Parser defaults of a job whose ranks have several stages."""
    if wanted.epp_partition == PARTITION_AUTO:
        raise ValueError(
            "--epp-partition auto chooses layers of one stage a rank; with --epp-placement give a "
            "file with a line 'layers'"
        )
    _require_cost_model(wanted)
    pattern = pattern_of(wanted)
    if pattern is not None and "|" in pattern:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: its | say what a rank has; with --epp-placement "
            "leave them out, and say with a line 'layers' of a file what each stage has"
        )
    layers = wanted.num_layers if pattern is None else len(letters_of_layers(pattern))
    of_stages = layers_of_placement(placement, layers or 0)
    return placed_values(placement, of_stages, wanted.mtp_num_layers or 0, pattern)


def _require_cost_model(wanted: Any) -> None:
    if wanted.epp_plan is None and wanted.epp_cost_model is None:
        raise ValueError(
            f"--epp-placement {wanted.epp_placement}: parts of a model are not measured at start; "
            "give --epp-cost-model analytic, or the file that `python -m megatron_epp profile` "
            "writes"
        )


def chosen(args: Any) -> bool:
    """Whether layers are placed here, and not by Megatron's flags."""
    return args.epp and layers_by_time(args)


def choose_partition(args: Any) -> str | None:
    """Sets Megatron's layout on ``args``, which Megatron has validated, or the | in the pattern of
    a HybridModel; what rank 0 says of it.

    None where there is nothing to choose. ValueError: a corpus or a cost model cannot be read.
    """
    from megatron_epp.planner.partition import layout_text

    stages = args.pipeline_model_parallel_size
    if not chosen(args):
        return None
    both = placement_by_time(args)
    flag = f"--epp-{'placement' if both else 'partition'} auto"
    if stages == 1:
        return f"{flag} has no effect with one stage"
    even = even_layers(args.num_layers, stages)
    if _resumes(args):
        kept = _kept(args)
        placement = Placement(tuple(range(stages)), even) if kept is None else kept
        whence = "its flags made it even" if kept is None else f"kept in {KEPT}"
        said = f"the checkpoint's, as it resumes ({whence})"
    else:
        placement, said = _by_time(args, even, both)
    layers = placement.layers
    counts = " ".join(map(str, layers))
    if both and not placement.is_even:
        further, pattern = args.mtp_num_layers or 0, args.hybrid_layer_pattern
        vars(args).update(placed_values(placement, layers, further, pattern))
        return f"{flag}: stages on ranks {placement}, layers {counts}; {said}"
    if both:
        said = f"one on every rank; {said}"
    if args.hybrid_layer_pattern is None:
        further = args.mtp_num_layers or 0
        args.pipeline_model_parallel_layout = layout_text(layers, further)
        return f"{flag}: layers {counts} of the stages, {said}"
    args.hybrid_layer_pattern = with_borders(args.hybrid_layer_pattern, layers)
    where = f"layers {counts} of the stages, {args.hybrid_layer_pattern}"
    return f"{flag}: {where}, {said}"


def choose_vocabulary(args: Any, parts: Any = None) -> str | None:
    """Sets --epp-vocab-parallel on ``args``, which Megatron has validated, to on or off where it is
    auto; what rank 0 says of it. None where there is nothing to choose.

    ``parts``: what stands in for parts of the trainer (setup.py: TrainerHooks), if anything does.
    A run that resumes keeps its checkpoint's: weights load either way, but not the optimizer's
    states in every format. What cannot be had, or not be known, is off; ValueError: what was kept
    beside the checkpoint, or --epp-plan, cannot be read.
    """
    if args.epp_vocab_parallel != AUTO:
        return None
    args.epp_vocab_parallel = OFF
    if not args.epp or args.pipeline_model_parallel_size == 1:
        return None
    spread, why = _vocabulary_by_lengths(args, parts)
    args.epp_vocab_parallel = ON if spread else OFF
    return f"--epp-vocab-parallel auto: {args.epp_vocab_parallel}; {why}"


def _vocabulary_by_lengths(args: Any, parts: Any) -> tuple[bool, str]:
    """Whether the output layer goes over the stages, and why."""
    refused, unlike = whole_words(args), limit_for("epp", args)
    args.epp_vocab_parallel = ON
    if (said := limit_for("epp", args)) not in (None, unlike):
        refused = said, ""
    args.epp_vocab_parallel = OFF
    if parts is not None and parts.pre_wrap is not None:
        refused = "a script changes the model before it is wrapped, as adapters do", ""
    if refused is not None:
        return False, refused[0]
    if args.epp_plan is not None:
        return first_given(args.epp_plan).vocabulary_parallel, "as the plans of --epp-plan have it"
    if _resumes(args):
        path = Path(args.load) / KEPT_VOCABULARY
        kept = path.exists() and _kept_vocabulary(path) == ON
        return kept, "the checkpoint's, as it resumes"
    if args.pipeline_model_parallel_layout is not None and not layers_by_time(args):
        return False, "--pipeline-model-parallel-layout has placed the output layer"
    if place_of(args) or placement_by_time(args):
        return False, "ranks may have several stages; give on"
    if parts is not None and parts.items is not None:
        return False, "no lengths are known of documents from Python"
    from megatron_epp.planner.tuning.vocabulary import ruled_out, vocabulary_of

    layers = even_layers(args.num_layers, args.pipeline_model_parallel_size)
    if args.epp_partition != PARTITION_AUTO:
        layers = tuple(stage_layers(args, len(layers), None))
    try:
        cost, options = _cost_and_options(args, layers)
        if (refusal := ruled_out(cost)) is not None:
            return False, refusal
        planner = args.epp_planner
        found = vocabulary_of(cost, _batches(args, Config.of(args)), options, planner)
    except (OSError, ValueError) as unknown:
        return False, f"what it saves is not known: {str(unknown).split(';')[0]}"
    return found.cost.vocabulary_parallel, f"{found.said} by {_by(args)} (simulated)"


def keeper(args: Any, name: str) -> Callable[[list[Any]], list[Any]]:
    """Megatron's pre-wrap hook that keeps the partition (``KEPT``), or where the output layer lies
    (``KEPT_VOCABULARY``), beside the checkpoint to come, for the run that resumes. OSError: the
    folder cannot be written."""

    def keep(models: list[Any]) -> list[Any]:
        chosen: Any = args.epp_vocab_parallel
        if name == KEPT and place_of(args):
            chosen = {PLACE: list(place_of(args)), STAGE_LAYERS: getattr(args, STAGE_LAYERS)}
        elif name == KEPT and args.hybrid_layer_pattern is None:
            layout = str(args.pipeline_model_parallel_layout)
            chosen = [_layers_of(stage) for stage in layout.split("|")]
        elif name == KEPT:
            chosen = layers_of_stages(args)
        write_whole(Path(args.save) / name, json.dumps(chosen) + "\n")
        return models

    return keep


def _kept_vocabulary(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace").strip()
    if text not in (json.dumps(ON), json.dumps(OFF)):
        raise ValueError(
            f'{path}: expected "on" or "off"; delete the file, and say with --epp-vocab-parallel '
            "what the checkpoint was made with"
        )
    return str(json.loads(text))


def _layers_of(stage: str) -> int:
    """Layers in one stage's part of planner.partition.layout_text."""
    count = stage.strip("EmL").removeprefix("t").removeprefix("*")
    return int(count) if count else 1


def _resumes(args: Any) -> bool:
    """Whether a run goes on; one that only takes a checkpoint's weights begins anew."""
    return (
        bool(args.load)
        and not args.finetune
        and (Path(args.load) / "latest_checkpointed_iteration.txt").exists()
    )


def _kept(args: Any) -> Placement | None:
    path = Path(args.load) / KEPT
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    stages = args.pipeline_model_parallel_size
    try:
        kept: Any = json.loads(text)
        if not isinstance(kept, dict):
            kept = {PLACE: list(range(stages)), STAGE_LAYERS: kept}
        place: Any = kept.get(PLACE)
        layers: Any = kept.get(STAGE_LAYERS)
        for least, numbers in ((1, layers), (0, place)):
            if not isinstance(numbers, list) or not all(
                type(n) is int and n >= least for n in numbers
            ):
                raise ValueError("expected a list of layers by stage")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: no partition ({error}); delete the file, and say with "
            f"{_place_of(args)} what the checkpoint was made with"
        ) from error
    found = Placement(tuple(place), tuple(layers))
    unfit = len(layers) != len(place) or sum(layers) != args.num_layers
    if unfit or set(place) != set(range(stages)):
        raise ValueError(
            f"{path}: layers {layers} are not {args.num_layers} on {stages} stages; leave "
            f"--epp-{'placement' if found.place and not found.is_even else 'partition'} auto out "
            "to load this checkpoint into another pipeline"
        )
    if not found.is_even and not placement_by_time(args):
        raise ValueError(
            f"{path}: stages lie on ranks {found}; expected --epp-placement auto as the run began, "
            "or leave --epp-partition auto out"
        )
    return found


def _place_of(args: Any) -> str:
    """Where a user says what lies on which stage."""
    if args.hybrid_layer_pattern is not None:
        return "| in --hybrid-layer-pattern"
    return "--pipeline-model-parallel-layout"


def _by_time(args: Any, even: tuple[int, ...], both: bool) -> tuple[Placement, str]:
    """The fastest layers, where ``both`` with the fastest placement, and what it was chosen by."""
    from megatron_epp.planner.tuning.partitions import partition_of
    from megatron_epp.planner.tuning.placements import placement_of

    if both and args.epp_plan is not None:
        given = first_given(args.epp_plan)
        place, layers = given.place or tuple(range(given.stages)), given.layers
        said = "as the plans of --epp-plan have it"
    else:
        cost, options = _cost_and_options(args, even)
        batches = _batches(args, Config.of(args))
        if both:
            chosen = placement_of(cost, batches, options, args.epp_planner)
            place, layers = chosen.cost.rank_of, chosen.cost.layers
            said = f"{chosen.said} by {_by(args)} (simulated)"
        else:
            found = partition_of(cost, batches, options, args.epp_planner)
            place, layers = cost.rank_of, found.layers
            said = f"{100 * found.gain:.1f}% faster than even ones by {_by(args)}"
    *others, last = layers
    return Placement(place, (*others, last - len(further_shapes(args)))), said


def _measured(config: Config) -> bool:
    return config.epp_cost_model not in (None, ANALYTIC)


def _by(args: Any) -> str:
    """Source of the figures that a choice rests on."""
    config = Config.of(args)
    return str(config.epp_cost_model) if _measured(config) else f"{device_name()}'s figures"


def _cost_and_options(args: Any, layers: tuple[int, ...]) -> tuple[Cost, Options]:
    config = Config.of(args)
    profile = Profile.load(str(config.epp_cost_model)) if _measured(config) else analytic(args)
    layers = with_further(args, layers)
    cost = training_cost(args, config, layers, profile)
    if config.epp_memory_budget_gib is None and not cpu_host.has_gpu():
        # What is available differs from rank to rank, and the partition must not.
        cost = replace(cost, budget_bytes=(AMPLE_BYTES,) * len(layers))
    options = Options(
        context=args.seq_length, levers=training_levers(config.epp_levers, args), multiple=1
    )
    return cost, options


def _batches(args: Any, config: Config) -> list[list[int]]:
    """Global batches as the corpora's weights have them, on average."""
    if args.sft or args.mock_data:
        raise ValueError(
            "lengths are read from the .idx files of --data-path, and chats and mock data have "
            "none; for --epp-partition auto say with --pipeline-model-parallel-layout where layers "
            "lie (`python -m megatron_epp tune` prints one)"
        )
    blend, per_split = get_blend_and_blend_per_split(args)
    if blend is None:
        blend = next((part for part in per_split or () if part is not None), None)
    if blend is None:
        raise ValueError(
            "no --data-path, so no lengths are known; --epp-partition auto chooses by them"
        )
    prefixes, weights = blend
    corpora = [
        open_corpus(f"{prefix}.idx", args.seq_length, config.epp_overlong) for prefix in prefixes
    ]
    # Without weights each corpus is read once.
    parts = [float(len(corpus)) for corpus in corpora] if weights is None else list(weights)
    shares = [part / sum(parts) for part in parts]
    size = args.global_batch_size
    if getattr(args, "step_batch_size_schedule", None):
        size = scheduled_sizes()(sys.maxsize)  # as large as they get
    made = []
    for number in range(BATCHES):
        drawn: list[int] = []
        for corpus, share in zip(corpora, shares, strict=True):
            if count := min(round(share * size), len(corpus)):
                drawn += corpus.batch(number % max(1, len(corpus) // count), count)
        made.append(drawn[:size])
    return made
