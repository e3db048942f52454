"""Context of a job with ``--epp``, and hooks that replace components of the trainer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_epp.control.observe import Summary, summary_line
from megatron_epp.control.recorded_steps import RecordedSteps
from megatron_epp.control.step_source import StepSource
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.mcore.calibrate.open_choices import Chooser, cheaper
from megatron_epp.mcore.calibrate.profile_file import obtain
from megatron_epp.mcore.data.global_batches import DocumentSource, GlobalBatches
from megatron_epp.mcore.data.item_documents import VarlenItems
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.flags.config import Config
from megatron_epp.mcore.job.job_cost import make_planning
from megatron_epp.mcore.model.attention import Attention, attention_for
from megatron_epp.mcore.model.elastic_layers import install_in_model
from megatron_epp.mcore.model.stage import ModelStage
from megatron_epp.runtime.groups import Groups


@dataclass(frozen=True, slots=True)
class JobContext:
    """Context of this rank in the job, created when Megatron has built the model.

    Attributes:
        args: Megatron's args.
        config: Flags of this package.
        groups: Process groups of this rank.
        layers: Number of layers of every stage.
        row_shard: This rank's shard of a chunk's rows.
        device: Device of this rank.
        attention: Attention of the job.
        placement: Pipeline rank of every stage; empty if stage i is on rank i.
    """

    args: Any
    config: Config
    groups: Groups
    layers: tuple[int, ...]
    row_shard: RowShard
    device: torch.device
    attention: Attention
    placement: tuple[int, ...] = ()


def make_steps(place: JobContext, model: Any) -> StepSource:
    """Return the source of steps: recorded steps with --epp-plan, else the planner. Collective.

    Without --epp-cost-model, the cost model is measured on the ranks of the job.

    Args:
        place: Context of this rank.
        model: This rank's first stage module, wrapped, in its final number format.
    """
    if place.config.epp_plan is not None:
        return RecordedSteps(place.config.epp_plan)
    args, config, groups = place.args, place.config, place.groups
    profile = obtain(args, config, model, groups, place.row_shard)
    return make_planning(args, config, place.layers, place.row_shard.multiple, groups, profile)


def limit_bytes(config: Config) -> float:
    """Return --epp-memory-limit-gib in bytes, infinity without the flag.

    On a CPU-only host, chunks that hold more bytes fail as out of memory.
    """
    limit = config.epp_memory_limit_gib
    return math.inf if limit is None else limit * GIB


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """Replacements of the trainer's components by a benchmark, an example or a test.

    Attributes:
        pre_wrap: Function from the stage modules to changed ones, such as modules with adapters,
            before Megatron wraps them; or None.
        make_steps: Returns the source of steps from the context and the first stage module.
        items: Function from the numbers of samples for training, validation and test (None is one
            epoch) to three datasets of items, which replace the corpora of --data-path
            (data/item_documents.py); or None.
        make_batches: Returns the global batches from documents, batch size (or a function from
            consumed samples to it) and consumed samples.
        summary: Returns the log line of an iteration.
        choose: Returns values of open choices from sublayers, flags and the layers of every stage.
        attention_for: Returns the attention from --epp-attention, the model's configuration and the
            device.
        install_in_model: Patches a model to compute chunks, from model, context and attention.
        make_stage: Creates the model's side of the executor.
        limit_bytes: Returns the largest number of bytes that chunks may hold on a CPU-only host.
    """

    pre_wrap: Callable[[list[Any]], list[Any]] | None = None
    make_steps: Callable[[JobContext, Any], StepSource] = make_steps
    items: Callable[[Sequence[int | None]], Sequence[VarlenItems | None]] | None = None
    make_batches: Callable[[DocumentSource, int | Callable[[int], int], int], GlobalBatches] = (
        GlobalBatches
    )
    summary: Summary = summary_line
    choose: Chooser = cheaper
    attention_for: Callable[[str, Any, torch.device], Attention] = attention_for
    install_in_model: Callable[[Any, int, Attention], None] = install_in_model
    make_stage: Callable[..., ModelStage] = ModelStage
    limit_bytes: Callable[[Config], float] = limit_bytes
