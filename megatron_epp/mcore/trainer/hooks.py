"""Context of a job with ``--epp``, and hooks that replace components of the trainer."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_epp.control.observe import Summary, summary_line
from megatron_epp.control.recorded_steps import RecordedSteps
from megatron_epp.control.step_source import StepSource
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.mcore.calibrate.path_seconds import path_seconds
from megatron_epp.mcore.calibrate.profile_file import obtain
from megatron_epp.mcore.choose.faster import report_faster_placement
from megatron_epp.mcore.data.global_batches import DocumentSource, GlobalBatches
from megatron_epp.mcore.data.item_documents import VarlenItems
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.flags.config import Config
from megatron_epp.mcore.job.job_cost import analytic, make_planning, training_cost
from megatron_epp.mcore.kinds.base import ChosenBy
from megatron_epp.mcore.kinds.modules import KIND_MODULES
from megatron_epp.mcore.model.attention import Attention, attention_for
from megatron_epp.mcore.model.elastic_layers import install_in_model
from megatron_epp.mcore.model.stage import ModelStage
from megatron_epp.mcore.patching.cpu_host import has_gpu
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobContext:
    """Context of this rank in the job, created when Megatron has built the model.

    Attributes:
        args: Megatron's args.
        config: The flags of --epp.
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


def make_steps(place: JobContext, models: Sequence[Any]) -> StepSource:
    """Return the source of steps: recorded steps with --epp-plan, else the planner.

    All ranks of the job must call this function. For the planner, :func:`.profile_file.obtain`
    reads or measures the cost model.

    Args:
        place: Context of this rank.
        models: This rank's stage modules, wrapped, in their final number format.

    Raises:
        ValueError: A flag, or a file that it names, is not valid; or the cost model cannot be
            fitted.
    """
    if place.config.epp_plan is not None:
        return RecordedSteps(place.config.epp_plan)
    args, config, groups = place.args, place.config, place.groups
    report = partial(report_faster_placement, args)
    profile = obtain(args, config, models, groups, place.row_shard, after=report)
    return make_planning(args, config, place.layers, place.row_shard.multiple, groups, profile)


def choose_paths(place: JobContext, models: Sequence[Any]) -> None:
    """Choose one of several implementations of layers; rank 0 logs the choices.

    All ranks of the job must call this function.

    Args:
        place: Context of this rank.
        models: This rank's stage modules, wrapped.
    """
    args, group = place.args, place.groups.control
    seconds = partial(path_seconds, args, place.row_shard) if has_gpu() else None

    def cost() -> Cost:
        return training_cost(args, place.config, place.layers, analytic(args))

    chosen_by = ChosenBy(args, cost, seconds, group)
    for kind in KIND_MODULES:
        line = kind.choose_paths(models, chosen_by)
        if line and group.rank() == 0:
            logger.info(line)


def limit_bytes(config: Config) -> float:
    """Return --epp-memory-limit-gib in bytes; infinity without the flag.

    On a CPU-only host, an op fails as out of memory if the chunks hold more than these bytes.
    """
    limit = config.epp_memory_limit_gib
    return math.inf if limit is None else limit * GIB


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """Components of the trainer, which a script, benchmark or test may replace.

    Attributes:
        pre_wrap: Function called with the stage modules before Megatron wraps them. It returns
            changed modules, such as modules with adapters. None: no change.
        make_steps: Function (context, this rank's stage modules) -> source of steps.
        items: Function called with the numbers of samples for training, validation and test (None
            is one epoch). It returns three datasets of items (None for no dataset), which replace
            the corpora of --data-path (data/item_documents.py). None: no replacement.
        make_batches: Function (documents, batch size, consumed samples) -> global batches. The
            batch size may be a function of the consumed samples.
        summary: Function that returns the log line of an iteration (control/observe.py).
        choose_paths: Function (context, this rank's stage modules) that chooses one of several
            implementations of layers.
        attention_for: Function (value of --epp-attention, configuration, device) -> attention.
        install_in_model: Function (model, context, attention) that patches the model to compute
            chunks.
        make_stage: Function that creates a ModelStage, which runs the ops of a stage.
        limit_bytes: Function (config) -> largest number of bytes that chunks may hold on a CPU-only
            host.
    """

    pre_wrap: Callable[[list[Any]], list[Any]] | None = None
    make_steps: Callable[[JobContext, Sequence[Any]], StepSource] = make_steps
    items: Callable[[Sequence[int | None]], Sequence[VarlenItems | None]] | None = None
    make_batches: Callable[[DocumentSource, int | Callable[[int], int], int], GlobalBatches] = (
        GlobalBatches
    )
    summary: Summary = summary_line
    choose_paths: Callable[[JobContext, Sequence[Any]], None] = choose_paths
    attention_for: Callable[[str, Any, torch.device], Attention] = attention_for
    install_in_model: Callable[[Any, int, Attention], None] = install_in_model
    make_stage: Callable[..., ModelStage] = ModelStage
    limit_bytes: Callable[[Config], float] = limit_bytes
