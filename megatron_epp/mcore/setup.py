"""Megatron's trainer with elastic pipelines: everything that ``--epp`` puts in place."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, print_rank_0

from megatron_epp.control.accept import AcceptedSteps
from megatron_epp.control.cost_monitor import CostMonitor
from megatron_epp.control.files import claim
from megatron_epp.control.given_steps import GivenSteps
from megatron_epp.control.observe import Observer, Summary, summary_line
from megatron_epp.control.report import IterationReport, Recorder
from megatron_epp.control.retry import Retry
from megatron_epp.control.step_source import StepSource
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir import Step
from megatron_epp.mcore import megatron_gpt, replaced, telemetry
from megatron_epp.mcore.calibrate.open_choices import Chooser, cheaper, settle_choices
from megatron_epp.mcore.calibrate.profile_file import obtain
from megatron_epp.mcore.capabilities import refusals
from megatron_epp.mcore.config import AUTO, FUSED_LINEARS, OFF, Config
from megatron_epp.mcore.data.chat_cache import check_chat_flags, converted_chats
from megatron_epp.mcore.data.documents import config_from_args
from megatron_epp.mcore.data.global_batches import (
    DocumentSource,
    GlobalBatches,
    build_documents,
    scheduled_samples,
    scheduled_sizes,
)
from megatron_epp.mcore.data.item_documents import ItemDocuments, VarlenItems
from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.elastic_schedule import ElasticSchedule
from megatron_epp.mcore.flags import rank
from megatron_epp.mcore.job_cost import host_budget_bytes, make_planning
from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of
from megatron_epp.mcore.kinds.registry import heads_of, layers_see, whole_documents
from megatron_epp.mcore.launcher import end_with_launcher
from megatron_epp.mcore.lm_head.fused_head import early_head
from megatron_epp.mcore.lm_head.shard import spread_output_layer
from megatron_epp.mcore.lm_head.tied import tie
from megatron_epp.mcore.model.attention import Attention, attention_for, this_device
from megatron_epp.mcore.model.elastic_layers import fuse_weight_gradients, install_in_model
from megatron_epp.mcore.model.forward import chunk_forward_step
from megatron_epp.mcore.model.layer_spec import mend_layer_spec
from megatron_epp.mcore.model.quantisation import warn_of_scales
from megatron_epp.mcore.model.stage import ModelStage
from megatron_epp.mcore.model.warm_up import warm_up
from megatron_epp.mcore.patching import seams
from megatron_epp.mcore.placing.asked import own_stages, place_of, stages_of
from megatron_epp.mcore.placing.ends import tie_ends
from megatron_epp.mcore.placing.parts import place_parts
from megatron_epp.mcore.process_groups import make_groups
from megatron_epp.mcore.sigterm import speak_when_terminated
from megatron_epp.mcore.stage_runner import StageRunner
from megatron_epp.runtime.consensus import broadcast_text
from megatron_epp.runtime.executor import CurrentOp
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.memory_meter import AllocatorMeter, SavedBytesMeter
from megatron_epp.runtime.program_runner import ProgramRunner
from megatron_epp.runtime.watcher import Watcher

# ------------------------------------------------------------------ what can be put in its place


@dataclass(frozen=True, slots=True)
class JobContext:
    """This rank's place in the job, known when Megatron has built the model.

    layers   of every stage
    share    of a chunk's rows, which this rank computes
    placement  the rank of every stage; none where stage i lies on rank i
    """

    args: Any
    config: Config
    groups: Groups
    layers: tuple[int, ...]
    share: RowShare
    device: torch.device
    attention: Attention
    placement: tuple[int, ...] = ()


def make_steps(place: JobContext, model: Any) -> StepSource:
    """--epp-plan's steps, or the planner's with a cost model that is measured where none is given;
    ``model``, this rank's first stage, is wrapped, in its final number format. Collective."""
    if place.config.epp_plan is not None:
        return GivenSteps(place.config.epp_plan)
    args, config, groups = place.args, place.config, place.groups
    profile = obtain(args, config, model, groups, place.share)
    return make_planning(args, config, place.layers, place.share.multiple, groups, profile)


def limit_bytes(config: Config) -> float:
    """Bytes that chunks may hold on a host at most, whatever was planned."""
    limit = config.epp_memory_limit_gib
    return math.inf if limit is None else limit * GIB


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """Replacements of the trainer's own parts by a benchmark, an example or a test.

    pre_wrap           (parts of the model): the parts with adapters or the like, before the trainer
                       wraps them; or None
    make_steps         where steps come from
    items              (samples wanted of training, validation, test): three datasets of items in
                       the place of the corpora of --data-path (data/item_documents.py), or None
    make_batches       (documents, size of a batch, or of that behind so many samples, samples
                       consumed): the global batches
    summary            the line that is logged of an iteration
    choose             (part of layers, flags, layers of every stage): what flags leave open of it
    attention_for      (--epp-attention, model's configuration, device): the attention
    install_in_model   (model, context, attention): makes the model compute chunks
    make_stage         the model's side of the executor
    limit_bytes        (configuration): what chunks may hold on a host
    """

    pre_wrap: Callable[[list[Any]], list[Any]] | None = None
    make_steps: Callable[[JobContext, Any], StepSource] = make_steps
    items: Callable[[Sequence[int]], Sequence[VarlenItems | None]] | None = None
    make_batches: Callable[[DocumentSource, int | Callable[[int], int], int], GlobalBatches] = (
        GlobalBatches
    )
    summary: Summary = summary_line
    choose: Chooser = cheaper
    attention_for: Callable[[str, Any, torch.device], Attention] = attention_for
    install_in_model: Callable[[Any, int, Attention], None] = install_in_model
    make_stage: Callable[..., ModelStage] = ModelStage
    limit_bytes: Callable[[Config], float] = limit_bytes


def _layers_of_stages(
    models: Mapping[int, Any], stages: int, groups: Groups, spread: bool
) -> tuple[int, ...]:
    """``models``: this rank's stages. Collective. ValueError: ranks differ in ``spread``, which
    each has chosen for itself."""
    mine = torch.zeros(stages + 1, dtype=torch.int64)
    mine[-1] = spread
    for stage, model in models.items():
        mine[stage] = len(layers_of(model))
    flat = torch.empty(len(mine) * groups.control.size(), dtype=mine.dtype)
    dist.all_gather_into_tensor(flat, mine, group=groups.control)
    every = flat.view(-1, stages + 1)
    if len(every[:, -1].unique()) > 1:
        raise ValueError(
            "--epp-vocab-parallel auto: ranks have chosen differently, from other files or other "
            "devices; give on or off"
        )
    return tuple(every[list(groups.pipeline_ranks), :-1].sum(0).tolist())


# ------------------------------------------------------------------ the job


def setup(args: Any, model_config: Any, hooks: TrainerParts | None = None) -> tuple[Any, Any]:
    """Put elastic pipelines into this process; returns the forward step and the data provider
    for Megatron's ``pretrain``.

    ``args`` are Megatron's, with ours (:mod:`megatron_epp.mcore.config`); ``model_config`` is the
    model configuration that ``pretrain`` will build from. A ValueError says in one line what
    cannot run.
    """
    if args.epp_vocab_parallel == AUTO:
        args.epp_vocab_parallel = OFF  # in whose script whatever comes may change the model
        if args.pipeline_model_parallel_size > 1 and rank() == 0:
            print("--epp-vocab-parallel auto: off; a script of your own says on", flush=True)
    config = Config.of(args)
    refusals.refuse(args)
    replaced.warn(args)
    warn_of_scales(args)
    end_with_launcher()
    host_budget_bytes(config)  # refused before anything is slow
    if args.sft:
        check_chat_flags(args)
    if args.num_layers is not None and args.pipeline_model_parallel_size > args.num_layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: more stages "
            f"than the {args.num_layers} layers; expected at most one stage per layer"
        )
    hooks = hooks or TrainerParts()
    place_parts(model_config, args)
    if hooks.pre_wrap is not None:
        if refusals.vocabulary_parallel(args):
            raise ValueError(
                "--epp-vocab-parallel on does not run a model that a script changes before it is "
                "wrapped, as adapters do; give --epp-vocab-parallel off"
            )
        model_config.pre_wrap_hooks.append(hooks.pre_wrap)
    job = Job(args, config, hooks)
    mend_layer_spec(model_config)
    job.install(model_config)
    seams.apply_schedule_seam(job.choose_schedule)

    def datasets(samples: Sequence[int], vp_stage: int | None = None) -> Any:
        return job.datasets(samples)

    datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank reads its own tokens
    return chunk_forward_step, datasets


class Job:
    """This rank's part of the job. Megatron's hooks fill it: ``attach`` before the model is
    wrapped, ``prepare`` behind it, which makes the ``schedule``."""

    def __init__(self, args: Any, config: Config, hooks: TrainerParts):
        self.args, self.config, self.hooks = args, config, hooks
        self.recorder = Recorder(config.epp_record) if config.epp_record else None
        self.truncated_documents = 0  # of the training set
        # Megatron's evaluation takes another mean of the losses where it sees the flag.
        self._reads_chats, args.sft = getattr(args, "sft", False), False
        self._chats: Mapping[str, str] = {}  # the corpora of chat files
        self._folders = (("--save", args.save), ("--epp-record", config.epp_record))
        self._locks: list[TextIO] = []  # open as long as the job
        self._current_op = CurrentOp(0)  # its stage is known when the model is built
        self._place: JobContext | None = None
        self._schedule: ElasticSchedule | None = None

    def install(self, model_config: Any) -> None:
        """Have Megatron's builder call this job when it builds the model of ``model_config``."""
        model_config.pre_wrap_hooks.append(self.attach)
        model_config.post_wrap_hooks.append(self.prepare)

    @property
    def schedule(self) -> ElasticSchedule:
        assert self._schedule is not None, "the model is not built yet"
        return self._schedule

    @property
    def place(self) -> JobContext:
        assert self._place is not None, "the model is not built yet"
        return self._place

    def attach(self, models: list[Any]) -> list[Any]:
        """Megatron's pre-wrap hook: make the model compute chunks."""
        place, device, config = place_of(self.args), this_device(), models[0].config
        attention = self.hooks.attention_for(self.config.epp_attention, config, device)
        heads, whole = heads_of(config), heads_of(config, context=1)
        for before, sinks in layers_see(config):
            seeing = attention.of_layer(before, (lambda: torch.zeros(1)) if sinks else lambda: None)
            warm_up(seeing, heads, whole, self.args.seq_length, device)
        groups = make_groups(device, place)
        spread = refusals.vocabulary_parallel(self.args)
        stages = dict(zip(own_stages(place, groups.pipeline_rank), models, strict=True))
        layers = _layers_of_stages(stages, stages_of(self.args), groups, spread)
        settle_choices(self.args, models[0], attention, layers, groups, self.hooks.choose)
        for model in models:
            self.hooks.install_in_model(model, self.args.seq_length, attention)
        if spread:
            refusals.require_whole_words(self.args)  # padded now
            spread_output_layer(stages, place, device)
            tie(models, device)
        tie_ends(stages, stages_of(self.args))
        if getattr(self.args, FUSED_LINEARS, False):
            for model in models:
                fuse_weight_gradients(model)
        self._current_op.stage = groups.pipeline_rank
        self._claim_folders(groups)
        if self._reads_chats:
            self._chats = converted_chats(self.args, groups.control)
        rows = RowShare.of(self.args)
        self._place = JobContext(
            self.args, self.config, groups, layers, rows, device, attention, place
        )
        if not getattr(self.args, "exit_signal_handler", False):  # Megatron's saves a checkpoint
            speak_when_terminated(self._current_op, dist.get_rank())
        Watcher(
            self._current_op,
            groups.pipeline_ranks,
            dist.get_rank(),
            groups.timeout,
            together=groups.in_lockstep,
        ).start()
        return models

    def _claim_folders(self, groups: Groups) -> None:
        """No other job may write where this one writes. Collective."""
        error = None
        if groups.control.rank() == 0:
            try:
                self._locks = claim(self._folders)
            except ValueError as refusal:
                error = str(refusal)
        broadcast_text("", error, groups.control)

    def prepare(self, models: list[Any]) -> list[Any]:
        """Megatron's post-wrap hook: the model has its final number format, so it can be measured,
        and steps can be made."""
        place, args, config = self.place, self.args, self.config
        groups, device = place.groups, place.device
        steps = self.hooks.make_steps(place, models[0])
        folders = [folder for _, folder in self._folders if folder]
        runner = StageRunner(
            ProgramRunner(device, self._current_op, groups),
            own_stages(place.placement, groups.pipeline_rank),
            groups.replica,
            share=place.share,
            meter=AllocatorMeter(every_op=config.epp_record is not None)
            if device.type == "cuda"
            else SavedBytesMeter(
                chain.from_iterable(model.parameters() for model in models),
                self.hooks.limit_bytes(config),
            ),
            early_head=early_head(args),
            stores_last_slice=place.attention.stores_last_slice,
            make_stage=self.hooks.make_stage,
            host_bytes=host_budget_bytes(config),
        )
        may_refit = config.epp_cost_model is None and config.epp_plan is None
        observer = Observer(
            groups,
            steps,
            CostMonitor(groups, folders, may_refit),
            self.recorder,
            self.hooks.summary,
            self._draw,
            loaded_from=None if args.finetune else args.load,  # iterations count from 1 again
        )
        self._schedule = ElasticSchedule(
            AcceptedSteps(
                steps,
                groups,
                place.layers,
                self._current_op,
                args.context_parallel_size,
                whole_documents(args),
                place.placement,
            ),
            runner,
            Retry(steps, groups),
            observer,
            validate=lambda total: megatron_gpt.validate(total, args),
        )
        return models

    def _draw(
        self, iteration: int, step: Step, report: IterationReport, waited_seconds: float
    ) -> None:
        if telemetry.wanted():
            truncated = self.truncated_documents
            telemetry.write(telemetry.scalars(step, report, waited_seconds, truncated), iteration)

    def choose_schedule(self, original: Any) -> Any:
        """Replaces Megatron's ``get_forward_backward_func``."""

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> ElasticSchedule:
            return self.schedule

        return get_forward_backward_func

    # -------------------------------------------------------------- data

    def datasets(self, samples: Sequence[int]) -> tuple[GlobalBatches | None, ...]:
        """Global batches of training, validation and test, from where the checkpoint stopped."""
        args = get_args()
        print_rank_0("> building the documents of training, validation and test ...")
        of_training = scheduled_sizes()
        if not args.train_samples:  # Megatron counts --global-batch-size for each iteration
            samples = (scheduled_samples(args.train_iters or 0, of_training), *samples[1:])
        documents = self._documents(args, samples)
        sizes = (of_training, args.eval_global_batch_size, args.eval_global_batch_size)
        consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
        made: list[GlobalBatches | None] = []
        megatron_gpt.require_validation(args, documents[1] is not None)
        for docs, size, start in zip(documents, sizes, consumed, strict=True):
            if isinstance(docs, list):
                raise ValueError("--epp evaluates on one validation set; leave --multiple-... out")
            made.append(None if docs is None else self.hooks.make_batches(docs, size, start))
        training = documents[0]
        if training is not None and not isinstance(training, list):
            print_rank_0(f"> {training.counts}")
            self.truncated_documents = training.counts.truncated
        return tuple(made)

    def _documents(
        self, args: Any, samples: Sequence[int]
    ) -> Sequence[DocumentSource | list | None]:
        """Documents of training, validation and test."""
        context, overlong = args.seq_length, self.config.epp_overlong
        if self.hooks.items is not None:
            if args.fim_data:
                raise ValueError("--fim-data: documents from Python are read as they are")
            return [
                None
                if items is None
                else ItemDocuments(items, context, overlong, wanted, args.padded_vocab_size)
                for items, wanted in zip(self.hooks.items(samples), samples, strict=True)
            ]
        tokenizer = build_tokenizer(args)
        return build_documents(
            config_from_args(args, tokenizer, overlong, args.padded_vocab_size, self._chats),
            samples,
            self.place.groups.control,
        )
