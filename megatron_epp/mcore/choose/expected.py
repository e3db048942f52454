"""Lengths and costs that are known before Megatron builds the model.

Lengths are the corpus's, from its ``.idx`` files; costs are those of the file of --epp-cost-model,
or the device's figures by name. Every rank reads the same files and computes the same.
"""

import sys
from dataclasses import replace
from typing import Any

from megatron.training.utils import get_blend_and_blend_per_split

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.mcore.data.global_batches import scheduled_sizes
from megatron_epp.mcore.flags.config import ANALYTIC, Config
from megatron_epp.mcore.job_cost import analytic, device_name, training_cost, training_levers
from megatron_epp.mcore.model.shape import with_further
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.planner.options import Options

AMPLE_BYTES = 1e15


def source_of_costs(args: Any) -> str:
    """Return the file of --epp-cost-model, or the device by whose figures costs are computed."""
    measured = args.epp_cost_model not in (None, ANALYTIC)
    return str(args.epp_cost_model) if measured else f"{device_name()}'s figures"


def cost_and_options(args: Any, layers: tuple[int, ...]) -> tuple[Cost, Options]:
    """Return the job's cost with ``layers`` of the stages, and the options of its planner.

    ValueError, OSError: the cost model cannot be read.
    """
    config = Config.of(args)
    measured = config.epp_cost_model not in (None, ANALYTIC)
    profile = Profile.load(str(config.epp_cost_model)) if measured else analytic(args)
    layers = with_further(args, layers)
    cost = training_cost(args, config, layers, profile)
    if config.epp_memory_budget_gib is None and not cpu_host.has_gpu():
        # What is available differs from rank to rank, and the partition must not.
        cost = replace(cost, budget_bytes=(AMPLE_BYTES,) * len(layers))
    options = Options(
        context=args.seq_length, levers=training_levers(config.epp_levers, args), multiple=1
    )
    return cost, options


def expected_batches(args: Any) -> list[list[int]]:
    """Return the document lengths of the first global batches, on average over the corpora.

    ValueError: there are none to read.
    """
    from megatron_epp.planner.choose.choice import FIRST_BATCHES

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
        open_corpus(f"{prefix}.idx", args.seq_length, args.epp_overlong) for prefix in prefixes
    ]
    # Without weights each corpus is read once.
    parts = [float(len(corpus)) for corpus in corpora] if weights is None else list(weights)
    fractions = [part / sum(parts) for part in parts]
    size = args.global_batch_size
    if getattr(args, "step_batch_size_schedule", None):
        size = scheduled_sizes()(sys.maxsize)  # as large as they get
    batches = []
    for number in range(FIRST_BATCHES):
        lengths: list[int] = []
        for corpus, fraction in zip(corpora, fractions, strict=True):
            if count := min(round(fraction * size), len(corpus)):
                lengths += corpus.batch(number % max(1, len(corpus) // count), count)
        batches.append(lengths[:size])
    return batches
