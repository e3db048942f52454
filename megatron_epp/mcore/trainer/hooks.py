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
    """This rank's place in the job, known when Megatron has built the model.

    Attributes:
        layers: Of every stage.
        row_shard: The rows of a chunk that this rank computes.
        placement: The rank of every stage; empty if stage i lies on rank i.
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
    """Return the steps of --epp-plan, or the planner's. Collective.

    Without a given cost model, the planner's is measured. ``model`` is this rank's first stage
    module, wrapped, in its final number format.
    """
    if place.config.epp_plan is not None:
        return RecordedSteps(place.config.epp_plan)
    args, config, groups = place.args, place.config, place.groups
    profile = obtain(args, config, model, groups, place.row_shard)
    return make_planning(args, config, place.layers, place.row_shard.multiple, groups, profile)


def limit_bytes(config: Config) -> float:
    """Return the most bytes that chunks may hold on a CPU-only host, whatever was planned."""
    limit = config.epp_memory_limit_gib
    return math.inf if limit is None else limit * GIB


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """Replacements of the trainer's components by a benchmark, an example or a test.

    Attributes:
        pre_wrap: (stage modules): the stage modules with adapters or the like, before the trainer
            wraps them; or None.
        make_steps: The source of steps.
        items: (samples wanted for training, validation, test, or None for one epoch): three
            datasets of items that replace the corpora of --data-path (data/item_documents.py), or
            None.
        make_batches: (documents, batch size or a function from consumed samples to it, samples
            consumed): the global batches.
        summary: The line that is logged for an iteration.
        choose: (sublayers, flags, layers of every stage): values of open choices.
        attention_for: (--epp-attention, model's configuration, device): the attention.
        install_in_model: (model, context, attention): makes the model compute chunks.
        make_stage: Makes the model's side of the executor.
        limit_bytes: (configuration): the most bytes that chunks may hold on a host.
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
