"""Choice of vocabulary parallelism, layers per stage and placement if their flags are ``auto``.

Every rank chooses the values before Megatron builds the model, by the simulated times of plans of
the first batches (planner/choose). The inputs are the document lengths in the ``.idx`` files and a
cost model: the file --epp-cost-model, or analytic coefficients of this device. All ranks read the
same inputs and compute the same choice. A run that resumes uses the choices saved with its
checkpoint (kept.py).
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_epp.control.cost_monitor import last_refit
from megatron_epp.control.recorded_steps import first_recorded
from megatron_epp.corpus.blend import TOKENS, document_weights
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir.placement import Placement
from megatron_epp.mcore.capabilities.refusals import vocabulary_refusal
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.choose.kept import (
    keeps_layout,
    kept_blend,
    kept_placement,
    kept_vocabulary,
    resumes,
)
from megatron_epp.mcore.data.data_flags import blends_of
from megatron_epp.mcore.data.global_batches import scheduled_sizes
from megatron_epp.mcore.data.row_shard import chunk_multiple, row_block, row_ranks
from megatron_epp.mcore.flags.config import (
    ANALYTIC,
    AUTO,
    LAYOUT_KEY,
    OFF,
    ON,
    PARTITION_AUTO,
    Config,
    layers_by_time,
    placement_by_time,
)
from megatron_epp.mcore.job.job_cost import (
    analytic,
    device_name,
    on_these_ranks,
    training_cost,
    training_levers,
)
from megatron_epp.mcore.model.shape import mtp_shapes, stage_layers, with_mtp
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.mcore.placing.requested import place_of, placed_values
from megatron_epp.planner.choose import FIRST_BATCHES
from megatron_epp.planner.options import Options
from megatron_epp.planner.padding import GPU_ROWS, MOST_PADDING, gpu_row_multiple

AMPLE_BYTES = 1e15


@dataclass(frozen=True, slots=True)
class JobChoices:
    """Choices of a run.

    Attributes:
        lines: Lines that rank 0 prints.
        placement: Placement of the stages, and their layers; None if Megatron's flags set both.
    """

    lines: tuple[str, ...]
    placement: Placement | None


def choose(args: Any, parts: Any = None) -> JobChoices:
    """Choose values for flags with the value ``auto`` in ``args``, which Megatron has validated.

    ``parts`` are components of the trainer that the user's script replaces
    (:class:`~megatron_epp.mcore.trainer.hooks.TrainerHooks`).

    Raises:
        ValueError: A corpus, a cost model, --epp-plan or the saved choices cannot be read.
    """
    blend = choose_blend(args)
    rows = choose_row_multiple(args, parts)  # first: the other choices use padded chunks
    vocabulary = choose_vocabulary(args, parts)
    placement, line = choose_placement(args)
    lines = blend, vocabulary, line, rows, _overlong_line(args, parts)
    return JobChoices(tuple(filter(None, lines)), placement)


def _overlong_line(args: Any, parts: Any) -> str | None:
    """Return a warning if one document takes longer than a replica's average share of a batch.

    The function returns None if there is no such document, or if lengths or costs are unknown.
    """
    from megatron_epp.planner.feasibility import overlong_for_replica

    stages, replicas = args.pipeline_model_parallel_size, args.data_parallel_size
    if not args.epp or replicas == 1 or (parts is not None and parts.items is not None):
        return None
    try:
        cost, _ = cost_and_options(args, even_layers(args.num_layers, stages))
        batches = first_batches(args)
    except (OSError, ValueError):
        return None
    lines = (overlong_for_replica(cost, lengths, replicas) for lengths in batches)
    return next(filter(None, lines), None)


def choose_row_multiple(args: Any, parts: Any = None) -> str | None:
    """Set --epp-row-multiple (padding of chunks) if the user has not; return a line to print.

    The function returns None instead of a line if the flag is set, or if the value is the default.
    The value changes plans but not results, so a run that resumes chooses it again.
    """
    if not args.epp or args.epp_row_multiple is not None:
        return None
    args.epp_row_multiple = row_block(argparse.Namespace(transformer_impl=args.transformer_impl))
    if args.epp_row_multiple != GPU_ROWS or (parts is not None and parts.items is not None):
        return None
    ranks = row_ranks(args)
    try:
        batches = first_batches(args)
    except (OSError, ValueError):  # lengths are unknown
        return None
    stages, replicas = args.pipeline_model_parallel_size, args.data_parallel_size
    args.epp_row_multiple = gpu_row_multiple(batches, stages, replicas, ranks)
    if args.epp_row_multiple == GPU_ROWS:
        return None
    return (
        f"--epp-row-multiple: {args.epp_row_multiple}; {GPU_ROWS} would pad chunks of these "
        f"documents by more than {MOST_PADDING:.0%} over {ranks} ranks"
    )


def choose_blend(args: Any) -> str | None:
    """Set --epp-blend to tokens or documents if it is auto; return a line to print, or None.

    The order of documents depends on this flag, so a run that resumes uses its checkpoint's choice.
    """
    begun = kept_blend(args) if args.epp and resumes(args) else None
    asked = args.epp_blend
    if asked == AUTO:
        args.epp_blend = begun or TOKENS
    if begun is None or {begun, args.epp_blend} == {TOKENS}:
        return None
    blend, per_split = blends_of(args)
    weights = [weights for _, weights in filter(None, (blend, *(per_split or ())))]
    if not any(each is not None and len(each) > 1 for each in weights):
        return None
    line = f"--epp-blend {asked}: weights of corpora count {args.epp_blend}"
    if args.epp_blend == begun:
        return f"{line}, as the run that resumes began"
    return (
        f"{line}, and the run that resumes counted {begun}: its next documents are those at the "
        "same place of the new order, so that some come twice and some later"
    )


def choose_vocabulary(args: Any, parts: Any = None) -> str | None:
    """Set --epp-vocab-parallel to on or off if it is auto; return a line to print, or None.

    The weights of a checkpoint load with either value, but in some formats its optimizer states
    load only with the same value. So a run that resumes uses its checkpoint's choice. The value is
    off if the job does not support vocabulary parallelism or if the gain is unknown.
    """
    if args.epp_vocab_parallel != AUTO:
        return None
    args.epp_vocab_parallel = OFF
    if not args.epp or args.pipeline_model_parallel_size == 1:
        return None
    args.epp_vocab_parallel, why = _vocabulary_and_reason(args, parts)
    return f"--epp-vocab-parallel auto: {args.epp_vocab_parallel}; {why}"


def _vocabulary_and_reason(args: Any, parts: Any) -> tuple[str, str]:
    refused, unlike = vocabulary_refusal(args), limit_for("training", args)
    args.epp_vocab_parallel = ON
    if (said := limit_for("training", args)) not in (None, unlike):
        refused = said, ""
    args.epp_vocab_parallel = OFF
    if parts is not None and parts.pre_wrap is not None:
        refused = "a script changes the model before it is wrapped, as adapters do", ""
    if refused is not None:
        return OFF, refused[0]
    if args.epp_plan is not None:
        planned = first_recorded(args.epp_plan).vocabulary_parallel
        return (ON if planned else OFF), "as the plans of --epp-plan have it"
    if resumes(args) and keeps_layout(args):
        return (ON if kept_vocabulary(args) else OFF), "the checkpoint's, as it resumes"
    if args.pipeline_model_parallel_layout is not None and not layers_by_time(args):
        return OFF, "--pipeline-model-parallel-layout has placed the output layer"
    if place_of(args) or placement_by_time(args):
        return OFF, "ranks may have several stages; give on"
    if parts is not None and parts.items is not None:
        return OFF, "no lengths are known of documents from Python"
    from megatron_epp.planner.choose.choice import ruled_out, vocabulary_of

    layers = even_layers(args.num_layers, args.pipeline_model_parallel_size)
    if args.epp_partition != PARTITION_AUTO:
        layers = tuple(stage_layers(args, len(layers), None))
    try:
        cost, options = cost_and_options(args, layers)
        if (refusal := ruled_out(cost)) is not None:
            return OFF, refusal
        choice = vocabulary_of(cost, first_batches(args), options, args.epp_planner)
    except (OSError, ValueError) as unknown:
        return OFF, f"what it saves is not known: {str(unknown).split(';')[0]}"
    return choice.key, f"{choice.comparison} by {_source_of_costs(args)} (simulated)"


def choose_placement(args: Any) -> tuple[Placement | None, str | None]:
    """Choose the layers and ranks of stages by simulated time; return (placement, line to print).

    With --epp-partition auto, the function chooses the layers per stage. With --epp-placement auto,
    it also chooses the rank of each stage. The function sets --pipeline-model-parallel-layout, or
    marks the stages by | in a HybridModel's pattern. Without these flags, both results are None.
    """
    if not (args.epp and layers_by_time(args)):
        return None, None
    both = placement_by_time(args)
    flag = f"--epp-{'placement' if both else 'partition'} auto"
    stages = args.pipeline_model_parallel_size
    if stages == 1:
        return None, f"{flag} has no effect with one stage"
    even = even_layers(args.num_layers, stages)
    if resumes(args) and keeps_layout(args):
        kept = kept_placement(args)
        placement = kept or Placement(tuple(range(stages)), even)
        whence = "its flags made it even" if kept is None else "kept next to it"
        why = f"the checkpoint's, as it resumes ({whence})"
    else:
        placement, why = _placement_by_time(args, even)
        if resumes(args):
            why = f"chosen anew, as the checkpoint's run had another layout; {why}"
    values = placed_values(
        placement, placement.layers, args.mtp_num_layers or 0, args.hybrid_layer_pattern
    )
    vars(args).update(values)
    where = f"layers {' '.join(map(str, placement.layers))} of the stages"
    if both:
        where = f"stages on ranks {placement}, {where}"
    if args.hybrid_layer_pattern is not None and placement.is_even:
        where = f"{where}, {args.hybrid_layer_pattern}"
    return placement, f"{flag}: {where}; {why}"


def _placement_by_time(args: Any, even: tuple[int, ...]) -> tuple[Placement, str]:
    """Return the layers per stage with the shortest simulated time, and a text with the reason.

    With --epp-placement auto, the function also chooses the rank of each stage; plans in --epp-plan
    then determine both. ``even`` are the layers per stage without this choice (``even_layers``).
    """
    from megatron_epp.planner.choose.choice import partition_of, placement_of

    costing = cost_and_options
    if getattr(args, LAYOUT_KEY, None) is not None and resumes(args):
        # Use the cost model that the resumed run has measured, as the choice of the layout does.
        args, costing = copy.copy(args), first_cost_and_options
    both = placement_by_time(args)
    if both and args.epp_plan is not None:
        plan = first_recorded(args.epp_plan)
        place, layers = plan.place or tuple(range(plan.stages)), plan.layers
        why = "as the plans of --epp-plan have it"
    else:
        cost, options = costing(args, even)
        plans = first_batches(args), options, args.epp_planner
        if both:
            placed = placement_of(cost, *plans)
            cost, why = placed.cost, f"{placed.comparison} by"
        else:
            partition = partition_of(cost, *plans)
            cost, why = partition.cost, f"{100 * partition.gain:.1f}% faster than even ones by"
        place, layers = cost.layout.placement.place, cost.layout.layers
        why = f"{why} {_source_of_costs(args)} (simulated)"
    *others, last = layers
    return Placement(place, (*others, last - len(mtp_shapes(args)))), why


# ------------------------------------------------------------------ lengths and costs


def _source_of_costs(args: Any) -> str:
    """Return a text that names the source of costs: the cost-model file or the device."""
    measured = args.epp_cost_model not in (None, ANALYTIC)
    return str(args.epp_cost_model) if measured else f"{device_name()}'s figures"


def cost_and_options(args: Any, layers: tuple[int, ...]) -> tuple[Cost, Options]:
    """Return the cost of ops with ``layers`` per stage, and the options of the planner.

    Raises:
        OSError: The cost-model file cannot be read.
        ValueError: The cost-model file is not valid.
    """
    config = Config.of(args)
    measured = config.epp_cost_model not in (None, ANALYTIC)
    profile = Profile.load(str(config.epp_cost_model)) if measured else analytic(args)
    profile = on_these_ranks(args, profile)
    layers = with_mtp(args, layers)
    cost = training_cost(args, config, layers, profile)
    if config.epp_memory_budget_gib is None and not cpu_host.has_gpu():
        # The available memory differs between ranks, but all ranks must choose the same layers.
        cost = cost.replace(device_budget_bytes=(AMPLE_BYTES,) * cost.layout.placement.ranks)
    levers = training_levers(config.epp_levers, args)
    if config.epp_host_memory_gib is None:
        levers -= {"offload"}  # available host memory also differs between ranks
    else:
        cost = cost.replace(host_budget_bytes=config.epp_host_memory_gib * GIB)
    options = Options(args.seq_length, levers)
    return cost.replace(multiple=chunk_multiple(args)), options


def first_cost_and_options(args: Any, layers: tuple[int, ...]) -> tuple[Cost, Options]:
    """Return the result of :func:`cost_and_options` with the first valid cost model.

    The function tries :func:`cost_models` in order, and sets ``args.epp_cost_model`` to the first
    valid cost model.

    Raises:
        OSError: No cost model is valid, and the last one cannot be read.
        ValueError: No cost model is valid.
    """
    *better, last = cost_models(args)
    for source in better:
        args.epp_cost_model = source
        with suppress(OSError, ValueError):
            return cost_and_options(args, layers)
    args.epp_cost_model = last
    return cost_and_options(args, layers)


def cost_models(args: Any) -> Iterator[str | None]:
    """Yield values of --epp-cost-model in the order in which a restart prefers them.

    If the user gives the flag, the function yields only its value. Otherwise, it yields the files
    of the checkpoint's last refitted and measured cost models, if they exist, and then None.
    """
    from megatron_epp.mcore.calibrate.profile_file import FILE_NAME

    if args.epp_cost_model is None and args.load:
        measured = last_refit(args.load), Path(args.load) / FILE_NAME
        yield from (str(path) for path in measured if path is not None and path.exists())
    yield args.epp_cost_model


def first_batches(args: Any) -> list[list[int]]:
    """Return the document lengths in tokens of global batches that are typical of the corpora.

    Raises:
        ValueError: The lengths are unknown.
    """
    if args.sft or args.mock_data:
        raise ValueError(
            "lengths are read from the .idx files of --data-path, and chats and mock data have "
            "none; for --epp-partition auto say with --pipeline-model-parallel-layout where layers "
            "lie (`python -m megatron_epp tune` prints one)"
        )
    blend, per_split = blends_of(args)
    if blend is None:
        blend = next((part for part in per_split or () if part is not None), None)
    if blend is None:
        raise ValueError(
            "no --data-path, so no lengths are known; --epp-partition auto chooses by them"
        )
    prefixes, weights = blend
    size = args.global_batch_size
    if getattr(args, "step_batch_size_schedule", None):
        size = scheduled_sizes()(sys.maxsize)  # the largest size
    by_tokens = weights is not None and args.epp_blend == TOKENS
    parts = None if weights is None else tuple(weights)
    return _batches_of(tuple(prefixes), parts, by_tokens, args.seq_length, args.epp_overlong, size)


@lru_cache(maxsize=1)
def _batches_of(
    prefixes: tuple[str, ...],
    weights: tuple[float, ...] | None,
    by_tokens: bool,
    context: int,
    overlong: str,
    size: int,
) -> list[list[int]]:
    """Return the document lengths of ``FIRST_BATCHES`` global batches of ``size`` documents.

    The function caches its result, because several choices use it.
    """
    corpora = [open_corpus(f"{prefix}.idx", context, overlong) for prefix in prefixes]
    # Without weights, each corpus is read once per epoch.
    parts = [float(len(corpus)) for corpus in corpora] if weights is None else list(weights)
    means = [corpus.tokens / len(corpus) if by_tokens else 1.0 for corpus in corpora]
    fractions = document_weights(parts, means)
    batches = []
    for number in range(FIRST_BATCHES):
        lengths: list[int] = []
        for corpus, fraction in zip(corpora, fractions, strict=True):
            if count := min(round(fraction * size), len(corpus)):
                lengths += corpus.batch(number % max(1, len(corpus) // count), count)
        batches.append(lengths[:size])
    return batches
