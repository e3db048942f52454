"""Choice of vocabulary parallelism, layers per stage and placement if their flags are ``auto``.

Rank 0 chooses the values before Megatron builds the model, by the simulated times of plans of the
first batches (planner/choose). The inputs are the document lengths in the ``.idx`` files, or of the
first chats, and a cost model: the file --epp-cost-model, or analytic coefficients of this device. A
run that resumes uses the choices saved with its checkpoint (kept.py). If lengths or costs are
unknown, vocabulary parallelism is off, and every rank has one stage if the planner allows it.
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from megatron_epp.control.cost_monitor import last_refit
from megatron_epp.control.recorded_steps import first_recorded
from megatron_epp.control.step_source import SharingLengths, planned_documents
from megatron_epp.corpus.blend import TOKENS, document_weights
from megatron_epp.corpus.lengths import DEFAULT_SEED, Corpus, open_corpus
from megatron_epp.corpus.overlong import apply_context
from megatron_epp.corpus.shared_prefixes import PrefixForest
from megatron_epp.corpus.token_prefixes import CorpusTokens
from megatron_epp.cost.build import even_layers
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir.placement import EVENLY, Placement, named_placement
from megatron_epp.mcore.capabilities.refusals import vocabulary_refusal
from megatron_epp.mcore.capabilities.table import limit_for
from megatron_epp.mcore.choose.from_rank_0 import from_rank_0
from megatron_epp.mcore.choose.kept import (
    keeps_layout,
    kept_blend,
    kept_placement,
    kept_vocabulary,
    resumes,
)
from megatron_epp.mcore.data.chat_cache import ChatFile, first_documents
from megatron_epp.mcore.data.data_flags import blends_of
from megatron_epp.mcore.data.global_batches import ScheduledSizes
from megatron_epp.mcore.data.row_shard import chunk_multiple, row_block, row_ranks
from megatron_epp.mcore.flags.config import (
    ANALYTIC,
    AUTO,
    OFF,
    ON,
    PLACED_BY,
    Config,
    placement_by_time,
)
from megatron_epp.mcore.hybrid.pattern import with_boundaries
from megatron_epp.mcore.job.job_cost import (
    analytic,
    device_name,
    on_these_ranks,
    training_cost,
    training_levers,
)
from megatron_epp.mcore.kinds.registry import lockstep_of
from megatron_epp.mcore.model.shape import mtp_shapes, placement_of, with_mtp
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.mcore.placing.requested import place_of, placed_values
from megatron_epp.planner.choose import FIRST_BATCHES
from megatron_epp.planner.options import Options
from megatron_epp.planner.padding import GPU_ROWS, MOST_PADDING, gpu_row_multiple

AMPLE_BYTES = 1e15


def choose(args: Any, parts: Any = None) -> list[str]:
    """Choose values for flags with the value ``auto`` in ``args``, which Megatron has validated.

    Every rank calls this function. ``parts`` are components of the trainer that the user's script
    replaces (:class:`~megatron_epp.mcore.trainer.hooks.TrainerHooks`); None: no replacements.

    Returns:
        Lines that rank 0 prints.

    Raises:
        ValueError: A flag's value, --epp-plan or the saved choices are not valid.
    """
    blend = choose_blend(args)
    rows = choose_row_multiple(args, parts)  # first: the other choices use padded chunks
    lines = blend, *choose_stages(args, parts), rows, _overlong_line(args, parts)
    first_documents.cache_clear()  # the tokens of chats would stay in memory on every rank
    return [line for line in lines if line]


def _overlong_line(args: Any, parts: Any) -> str | None:
    """Return a warning if one document takes longer than a replica's average share of a batch.

    The function returns None if there is no such document, or if lengths or costs are unknown.
    """
    from megatron_epp.planner.feasibility import overlong_for_replica

    replicas = args.data_parallel_size
    if not args.epp or replicas == 1 or (parts is not None and parts.items is not None):
        return None
    try:
        cost, _ = cost_and_options(args, placement_of(args).layers)
        batches = first_batches(args)
    except (OSError, ValueError):
        return None
    lines = (overlong_for_replica(cost, lengths, replicas) for lengths in batches)
    return next(filter(None, lines), None)


def choose_row_multiple(args: Any, parts: Any = None) -> str | None:
    """Set --epp-row-multiple (padding of chunks) if the user has not set it.

    The value changes plans but not results, so a run that resumes chooses it again.

    Returns:
        A line to print if the chosen value is not the default, otherwise None.
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
    """Set --epp-blend to ``tokens`` or ``documents`` if it is ``auto``.

    The order of documents depends on this flag, so a run that resumes uses its checkpoint's choice.
    A new run uses ``tokens``.

    Returns:
        A line to print if this run resumes, several corpora have weights, and the weights count
        documents in this run or in the resumed one; otherwise None.

    Raises:
        ValueError: The saved choices are damaged, or the data flags are invalid.
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


def choose_stages(args: Any, parts: Any = None) -> list[str]:
    """Choose vocabulary parallelism, layers and ranks of the stages where their flags are ``auto``.

    Rank 0 chooses all of these together, by the simulated times of plans. A run that resumes uses
    its checkpoint's choices, because some checkpoint formats cannot be loaded with other choices.
    The function sets --epp-vocab-parallel. If it chooses layers, it also sets --epp-placement, and
    --pipeline-model-parallel-layout or the | in a HybridModel's pattern.

    Returns:
        Lines to print.

    Raises:
        ValueError: See :func:`choose`. Every rank raises the error of rank 0.
    """
    open_vocabulary, open_layers = args.epp_vocab_parallel == AUTO, placement_by_time(args)
    if open_vocabulary:
        args.epp_vocab_parallel = OFF
    if not args.epp:
        return []
    if args.pipeline_model_parallel_size == 1:
        return []
    lines = []
    if (why := getattr(args, PLACED_BY, None)) is not None:
        lines.append(f"--epp-placement auto: {_stages_text(placement_of(args))}; {why}")
    if open_vocabulary or open_layers:
        make = partial(_stage_facts, copy.copy(args), parts, open_vocabulary)
        facts = from_rank_0("the choice of stages", make)
        args.epp_vocab_parallel = facts["vocabulary"]
        if open_layers:
            placement = Placement(tuple(facts["place"]), tuple(facts["layers"]))
            vars(args).update(_placing(args, placement))
        lines += facts["lines"]
    return lines


def _stage_facts(args: Any, parts: Any, open_vocabulary: bool) -> dict[str, Any]:
    """Choose what is open, and return it as a JSON object. ``args`` may be changed.

    Returns:
        ``vocabulary`` (on or off), ``lines`` to print, and, if the layers are chosen, ``place`` and
        ``layers`` of the stages.
    """
    from megatron_epp.planner.registry import planner_of

    planner_of(args.epp_planner)  # raises an error if the name is unknown, as the next line does
    training_levers(args.epp_levers)
    open_layers = placement_by_time(args)
    vocabulary: tuple[str, str] | None = (args.epp_vocab_parallel, "")
    if open_vocabulary:
        vocabulary = _settled_vocabulary(args, parts)
    if vocabulary is not None:
        args.epp_vocab_parallel, _ = vocabulary
    placement, why = _settled_placement(args, parts) if open_layers else (None, "")
    if vocabulary is None or (open_layers and placement is None):
        chosen, placement, reason = _by_time(args, vocabulary, placement)
        vocabulary = vocabulary or chosen
        why = "; ".join(filter(None, (why, reason)))
    value, of_vocabulary = vocabulary
    lines = [f"--epp-vocab-parallel auto: {value}; {of_vocabulary}"] if open_vocabulary else []
    if placement is None:
        return {"vocabulary": value, "lines": lines}
    where = _stages_text(placement)
    if args.hybrid_layer_pattern is not None and placement.is_even:
        where = f"{where}, {with_boundaries(args.hybrid_layer_pattern, placement.layers)}"
    lines.append(f"--epp-placement auto: {where}; {why}")
    layers = placement.layers
    return {"vocabulary": value, "lines": lines, "place": placement.place, "layers": layers}


def _stages_text(placement: Placement) -> str:
    layers = " ".join(map(str, placement.layers))
    return f"stages on ranks {placement}, layers {layers} of the stages"


def _placing(args: Any, placement: Placement) -> dict[str, Any]:
    """Return the values of Megatron's args for ``placement``, with --epp-placement."""
    layers = placement.layers
    values = placed_values(placement, layers, args.mtp_num_layers or 0, args.hybrid_layer_pattern)
    named = f"place {placement} layers {' '.join(map(str, layers))}"
    return {**values, "epp_placement": EVENLY if placement.is_even else named}


def _settled_vocabulary(args: Any, parts: Any) -> tuple[str, str] | None:
    """Return (on or off, reason) if plans do not decide about vocabulary parallelism, else None."""
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
    by_user = not (placement_by_time(args) or place_of(args))
    if by_user and args.pipeline_model_parallel_layout is not None:
        return OFF, "--pipeline-model-parallel-layout has placed the LM head"
    if parts is not None and parts.items is not None:
        return OFF, "no lengths are known of documents from Python"
    return None


def _settled_placement(args: Any, parts: Any) -> tuple[Placement | None, str]:
    """Return the placement, with layers, if plans of the first batches do not decide it.

    Returns:
        The placement and the reason. The placement is None if it is open; the reason then says why
        it is chosen anew, or is empty.
    """
    anew = ""
    if args.epp_plan is not None:
        return _planned_placement(args), "as the plans of --epp-plan have it"
    if resumes(args):
        kept = kept_placement(args) if keeps_layout(args) else None
        if kept is None and keeps_layout(args):
            whence = "its flags made it even"
            return _simplest(args), f"the checkpoint's, as it resumes ({whence})"
        if kept is not None and _fits(kept, args):
            return kept, "the checkpoint's, as it resumes (kept next to it)"
        anew = "chosen anew, as the checkpoint's run had another layout"
    why = None
    if parts is not None and parts.items is not None:
        why = "no lengths are known of documents from Python"
    elif (args.save or args.load) and args.ckpt_format != "torch_dist":
        why = f"--ckpt-format {args.ckpt_format} is for one stage a rank"
    if why is not None:
        return _simplest(args), "; ".join(filter(None, (anew, why)))
    return None, anew


def _planned_placement(args: Any) -> Placement:
    """Return the placement of the plans of --epp-plan.

    Raises:
        ValueError: The plans are of another model, or of another number of pipeline ranks.
    """
    plan = first_recorded(args.epp_plan)
    place, (*others, last) = plan.place or tuple(range(plan.stages)), plan.layers
    placement = Placement(place, (*others, last - len(mtp_shapes(args))))
    if not _fits(placement, args):
        raise ValueError(
            f"--epp-plan {args.epp_plan}: the plan has {_stages_text(placement)}; this job has "
            f"{args.num_layers} layers on {args.pipeline_model_parallel_size} pipeline ranks"
        )
    return placement


def _fits(placement: Placement, args: Any) -> bool:
    """Return whether ``placement`` is of this job's pipeline ranks and layers."""
    ranks, layers = args.pipeline_model_parallel_size, placement.layers
    return placement.ranks == ranks and sum(layers) == args.num_layers and min(layers) > 0


def _simplest(args: Any) -> Placement:
    """Return one stage a rank, or the first placement that the planner plans; layers are even."""
    from megatron_epp.planner.choose.choice import PLACEMENT_NAMES
    from megatron_epp.planner.registry import planner_of

    planner, ranks = planner_of(args.epp_planner), args.pipeline_model_parallel_size
    even, *placed = (named_placement(name, ranks) for name in (EVENLY, *PLACEMENT_NAMES))
    assert even is not None
    placement = even
    if not planner.takes(even.place):
        filled = (each for each in placed if each and each.stages <= args.num_layers)
        placement = next((each for each in filled if planner.takes(each.place)), even)
    return Placement(placement.place, even_layers(args.num_layers, placement.stages))


def _by_time(
    args: Any, vocabulary: tuple[str, str] | None, placement: Placement | None
) -> tuple[tuple[str, str], Placement | None, str]:
    """Choose what is open by simulated time.

    ``vocabulary`` and ``placement`` are None if they are open, or if the flags set the placement.

    Returns:
        Vocabulary parallelism (on or off, reason), the placement, and the placement's reason.
    """
    from megatron_epp.planner.choose.choice import PLACEMENT_NAMES, ruled_out, run_choice

    open_layers, where = placement_by_time(args) and placement is None, args
    layers = even_layers(args.num_layers, args.pipeline_model_parallel_size)
    if placement is not None:
        where = copy.copy(args)
        vars(where).update(_placing(args, placement))
    if not open_layers:
        layers = placement_of(where).layers
    try:
        if open_layers and resumes(args):  # by the cost model that the resumed run has measured
            where = copy.copy(args)
            cost, options = first_cost_and_options(where, layers)
        else:
            cost, options = cost_and_options(where, layers)
        why = ruled_out(cost)
        vocabularies = [args.epp_vocab_parallel == ON]
        if vocabulary is None:
            vocabularies = [False] if why is not None else [False, True]
        if why is not None and not open_layers:
            return (OFF, why), placement, ""
        batches = [*map(planned_documents, first_batches(args))]
        choice = run_choice(
            *(cost, batches, options, args.epp_planner),
            placements=PLACEMENT_NAMES if open_layers else (),
            vocabularies=vocabularies,
            words=getattr(args, "padded_vocab_size", None) or 0,
        )
    except (OSError, ValueError) as unknown:
        reason = str(unknown).split(";")[0]
        if open_layers:
            placement = _simplest(args)
        of_others = f"what other stages save is not known: {reason}" if open_layers else ""
        return (OFF, f"what it saves is not known: {reason}"), placement, of_others
    layout = choice.cost.layout
    if open_layers:
        *others, last = layout.layers
        chosen_layers = (*others, last - len(mtp_shapes(args)))
        placement = Placement(layout.placement.place, chosen_layers)
    once = "; shared prefixes computed once" * isinstance(batches[0], PrefixForest)
    reason = f"{choice.comparison} by {_source_of_costs(where)} (simulated{once})"
    of_vocabulary = why or ("chosen with the stages" if open_layers else reason)
    value = ON if layout.vocabulary_parallel else OFF
    return (value, of_vocabulary), placement, reason if open_layers else ""


# ------------------------------------------------------------------ lengths and costs


def _source_of_costs(args: Any) -> str:
    """Return a text that names the source of costs: the cost-model file or the device."""
    measured = args.epp_cost_model not in (None, ANALYTIC)
    return str(args.epp_cost_model) if measured else f"{device_name()}'s coefficients"


def cost_and_options(
    args: Any, layers: tuple[int, ...], measured: Profile | None = None
) -> tuple[Cost, Options]:
    """Return the cost of ops with ``layers`` per stage, and the options of the planner.

    ``measured`` is a profile that replaces --epp-cost-model; None: no replacement.

    Raises:
        ValueError: The file of --epp-cost-model cannot be read or is not valid, or --epp-levers
            names an unknown lever.
    """
    config = Config.of(args)
    if measured is not None:
        profile = measured
    elif config.epp_cost_model in (None, ANALYTIC):
        profile = analytic(args)
    else:
        profile = Profile.load(str(config.epp_cost_model))
    profile = on_these_ranks(args, profile)
    layers = with_mtp(args, layers)
    cost = training_cost(args, config, layers, profile)
    if config.epp_memory_budget_gib is None and not cpu_host.has_gpu():
        # The available memory differs between ranks, but all ranks must choose the same layers.
        cost = cost.replace(device_budget_bytes=(AMPLE_BYTES,) * cost.layout.placement.ranks)
    levers = training_levers(config.epp_levers)
    if config.epp_host_memory_gib is None:
        levers -= {"offload"}  # available host memory also differs between ranks
    else:
        cost = cost.replace(host_budget_bytes=config.epp_host_memory_gib * GIB)
    options = Options(args.seq_length, levers, config.epp_effort, lockstep_of(args))
    return cost.replace(multiple=chunk_multiple(args)), options


def first_cost_and_options(args: Any, layers: tuple[int, ...]) -> tuple[Cost, Options]:
    """Return the result of :func:`cost_and_options` with the first valid cost model.

    The function tries :func:`cost_models` in order, and sets ``args.epp_cost_model`` to the first
    valid cost model.

    Raises:
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
    """Return the document lengths, in tokens, of FIRST_BATCHES typical global batches.

    With --epp-share-from, each batch is a ``SharingLengths`` (control/step_source.py), which finds
    the prefixes that documents of one corpus share. It reads tokens only when they are needed.

    Raises:
        ValueError: There is no corpus (--data-path), or a corpus or chat file is not valid.
    """
    if args.mock_data:
        raise ValueError("lengths are read from the files of --data-path, and mock data have none")
    blend, per_split = blends_of(args)
    if blend is None:
        blend = next((part for part in per_split or () if part is not None), None)
    if blend is None:
        raise ValueError("no --data-path, so no lengths are known")
    prefixes, weights = blend
    size = args.global_batch_size
    if getattr(args, "step_batch_size_schedule", None):
        size = ScheduledSizes()(sys.maxsize)  # the largest size
    by_tokens = weights is not None and args.epp_blend == TOKENS
    parts = None if weights is None else tuple(weights)
    # Of chats, as many as these batches may need: to convert a file may take minutes.
    files = tuple(ChatFile(path, args) if args.sft else path for path in prefixes)
    how, sharing = (args.seq_length, args.epp_overlong), (args.epp_share_from, args.mtp_num_layers)
    return _batches_of(files, parts, by_tokens, how, size, sharing)


def _corpus_of(file: str | ChatFile, context: int, overlong: str, count: int) -> Corpus:
    """Return a corpus, or a chat file's first ``count`` conversations."""
    if isinstance(file, str):
        return open_corpus(f"{file}.idx", context, overlong)
    tokens = first_documents(file, count)
    inputs = numpy.array([len(each) - 1 for each in tokens], numpy.int64)
    index = apply_context(inputs, context, overlong)
    if not index.counts.documents:
        raise ValueError(f"{file.path}: no usable document in its first {count} conversations")
    read = CorpusTokens(index, lambda _: lambda number, *part: tokens[number][slice(*part)])
    return Corpus(file.path, file.path, index.inputs, index.counts, document_tokens=read)


@lru_cache(maxsize=1)
def _batches_of(
    files: tuple[str | ChatFile, ...],
    weights: tuple[float, ...] | None,
    by_tokens: bool,
    how: tuple[int, str],
    size: int,
    sharing: tuple[int, int | None],
) -> list[list[int]]:
    """Return the document lengths of ``FIRST_BATCHES`` global batches of ``size`` documents.

    ``how`` is the context and --epp-overlong; ``sharing``, the least tokens of a shared prefix, or
    0, and the number of MTP layers. The function caches its result, because several choices use it.
    """
    corpora = [_corpus_of(file, *how, FIRST_BATCHES * size) for file in files]
    # Without weights, each corpus is read once per epoch.
    parts = [float(len(corpus)) for corpus in corpora] if weights is None else list(weights)
    means = [corpus.tokens / len(corpus) if by_tokens else 1.0 for corpus in corpora]
    fractions = document_weights(parts, means)
    counts = [min(round(part * size), len(of)) for part, of in zip(fractions, corpora, strict=True)]
    read = [(corpus, count) for corpus, count in zip(corpora, counts, strict=True) if count]
    batches: list[list[int]] = []
    for number in range(FIRST_BATCHES):
        drawn = [(corpus, number % (len(corpus) // count), count) for corpus, count in read]
        lengths = [*chain(*(corpus.batch(*which) for corpus, *which in drawn))][:size]
        forest = cache(partial(_shared, drawn, len(lengths), *sharing))
        batches.append(SharingLengths(lengths, forest) if sharing[0] else lengths)
    return batches


def _shared(
    drawn: Sequence[tuple[Corpus, int, int]], documents: int, least: int, depths: int | None
) -> PrefixForest:
    """Return the first documents of (corpus, batch, number of documents), with their prefixes."""
    how = DEFAULT_SEED, least, depths or 0
    forests = (corpus.sharing(number, count, *how) for corpus, number, count in drawn)
    return PrefixForest.joined(forests).of(range(documents))
