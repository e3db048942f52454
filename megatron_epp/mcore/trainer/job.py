"""One rank's part of a job with ``--epp``, set up while Megatron builds its model."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TextIO

import torch
import torch.distributed as dist
from megatron.training import print_rank_0
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_epp.control.accept import AcceptedStep, AcceptedSteps
from megatron_epp.control.cost_monitor import CostMonitor
from megatron_epp.control.files import claim, owner_of
from megatron_epp.control.observe import Observer
from megatron_epp.control.report import IterationReport, Recorder
from megatron_epp.control.retry import Retry
from megatron_epp.control.step_source import StepSource
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.mcore.calibrate.first_run import run_every_kind
from megatron_epp.mcore.capabilities import refusals
from megatron_epp.mcore.data.chat_cache import converted_chats
from megatron_epp.mcore.data.global_batches import GlobalBatches
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.data.shared_tokens import SharedTokens
from megatron_epp.mcore.flags.config import FUSED_LINEARS, Config
from megatron_epp.mcore.job import megatron_gpt
from megatron_epp.mcore.job.emergency_exit import end_now
from megatron_epp.mcore.job.job_cost import host_budget_bytes, on_these_ranks, training_levers
from megatron_epp.mcore.job.process_groups import make_groups
from megatron_epp.mcore.kinds.modules import KIND_MODULES
from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of
from megatron_epp.mcore.lm_head.fused_head import fused_head
from megatron_epp.mcore.lm_head.shard import shard_output_layer
from megatron_epp.mcore.lm_head.tied import tie
from megatron_epp.mcore.model.attention import Attention, choose_mask, this_device
from megatron_epp.mcore.model.elastic_layers import fuse_weight_gradients
from megatron_epp.mcore.model.split_backward import report_kept
from megatron_epp.mcore.model.warm_up import warm_up_layers
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.mcore.placing.embedding_copies import tie_embeddings
from megatron_epp.mcore.placing.requested import local_stages, place_of, stages_of
from megatron_epp.mcore.trainer.elastic_schedule import ElasticSchedule
from megatron_epp.mcore.trainer.hooks import JobContext, TrainerHooks
from megatron_epp.mcore.trainer.host_facts import require_same_facts
from megatron_epp.mcore.trainer.job_data import JobData
from megatron_epp.mcore.trainer.sigterm import report_when_terminated
from megatron_epp.mcore.trainer.stage_runner import StageRunner
from megatron_epp.runtime.consensus import all_gathered, broadcast_result, require_same
from megatron_epp.runtime.executor import CurrentOp
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.memory_meter import AllocatorMeter, SavedBytesMeter
from megatron_epp.runtime.program_runner import ProgramRunner
from megatron_epp.runtime.watcher import Watcher


class Job:
    """One rank's part of a job.

    Megatron's model builder calls :meth:`attach` before it wraps the model, and then
    :meth:`prepare`, which creates the :attr:`schedule`.
    """

    def __init__(self, args: Any, config: Config, hooks: TrainerHooks):
        self.args, self.config, self.hooks = args, config, hooks
        self.recorder = Recorder(config.epp_record) if config.epp_record else None
        # args.sft is reset, because it makes Megatron's evaluation average losses differently.
        self._reads_chats, args.sft = getattr(args, "sft", False), False
        self._data = JobData(config.epp_overlong, hooks, config.epp_blend)
        self._shared: SharedTokens | None = None
        if config.epp_share_from:
            self._shared = SharedTokens(config.epp_share_from, args.mtp_num_layers or 0)
        self._folders = (("--save", args.save), ("--epp-record", config.epp_record))
        self._locks: list[TextIO] = []  # open until the process ends
        self._current_op = CurrentOp(0)  # attach sets the rank
        self._place: JobContext | None = None
        self._schedule: ElasticSchedule | None = None

    def install(self, model_config: Any) -> None:
        """Append :meth:`attach` and :meth:`prepare` to the builder's hooks in ``model_config``."""
        model_config.pre_wrap_hooks.append(self.attach)
        model_config.post_wrap_hooks.append(self.prepare)

    @property
    def schedule(self) -> ElasticSchedule:
        """Schedule created by :meth:`prepare`."""
        assert self._schedule is not None, "the model is not built yet"
        return self._schedule

    @property
    def place(self) -> JobContext:
        """Context created by :meth:`attach`."""
        assert self._place is not None, "the model is not built yet"
        return self._place

    # -------------------------------------------------------------- before the model is wrapped

    def attach(self, models: list[Any]) -> list[Any]:
        """Patch the model to compute chunks (Megatron's pre-wrap hook).

        All ranks of the job must call this method. It also creates process groups, locks the job's
        folders, converts chat files, starts the watcher, and sets :attr:`place`.

        Args:
            models: Stage modules of this rank, first to last.

        Returns:
            ``models``.

        Raises:
            ValueError: The model, the device or a file is not supported, ranks see different files,
                or another job writes to an output folder.
        """
        place, device = place_of(self.args), this_device()
        groups = make_groups(device, place, partial(require_same_facts, self.args))
        attention = self._warm_up(models[0].config, device, groups)
        stages = dict(zip(local_stages(place, groups.pipeline_rank), models, strict=True))
        layers = self._layers_of_stages(stages, groups)
        self._install_in_models(stages, attention, place, device)
        self._current_op.rank = groups.pipeline_rank
        self._claim_folders(groups)
        if self._reads_chats:
            self._data.chats = converted_chats(self.args, groups.control)
        rows = RowShard.of(self.args)
        self._place = JobContext(
            self.args, self.config, groups, layers, rows, device, attention, place
        )
        self._watch(groups)
        return models

    def _warm_up(self, config: Any, device: torch.device, groups: Groups) -> Attention:
        """Return the model's attention, after a warm-up of its kernels. Collective over the job."""
        attention = self.hooks.attention_for(self.config.epp_attention, config, device)
        choose_mask(attention, config, device, groups.control)
        warm_up_layers(attention, config, self.args.seq_length, device)
        return attention

    def _layers_of_stages(self, stages: Mapping[int, Any], groups: Groups) -> tuple[int, ...]:
        """Return the number of layers of every stage of the pipeline. Collective over the job.

        Args:
            stages: The stage modules of this rank, by stage.
            groups: The job's process groups.

        Raises:
            ValueError: Ranks have chosen different values of --epp-vocab-parallel.
        """
        local = {stage: len(layers_of(model)) for stage, model in stages.items()}
        every = all_gathered((local, refusals.vocabulary_parallel(self.args)), groups.control)
        if len({parallel for _, parallel in every}) > 1:
            raise ValueError(
                "--epp-vocab-parallel auto: ranks have chosen differently, from other files or "
                "other devices; give on or off"
            )
        layers = {stage: count for of_rank, _ in every for stage, count in of_rank.items()}
        return tuple(layers[stage] for stage in range(stages_of(self.args)))

    def _install_in_models(
        self,
        stages: Mapping[int, Any],
        attention: Attention,
        place: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """Patch this rank's stage modules to compute chunks, and shard and tie their weights."""
        models = list(stages.values())
        for model in models:
            self.hooks.install_in_model(model, self.args.seq_length, attention)
        if refusals.vocabulary_parallel(self.args):
            refusals.require_vocabulary_parallel(self.args)  # the vocabulary size is padded now
            shard_output_layer(stages, place, device)
            tie(models, device)
        tie_embeddings(stages, stages_of(self.args))
        if getattr(self.args, FUSED_LINEARS, False):
            for model in models:
                fuse_weight_gradients(model)

    def _claim_folders(self, groups: Groups) -> None:
        """Lock this job's output folders, so that no other job writes to them.

        Raises:
            ValueError: A rank does not see the --save folder that rank 0 has locked.
        """
        save = self.args.save

        def lock() -> str:
            self._locks = claim(self._folders)
            return owner_of(save) if save else ""

        owner = broadcast_result(lock, groups.control)
        if save:
            seen = {f"--save {save}": owner_of(save, owner)}
            require_same(seen, groups.control, "one folder that all hosts share")

    def _watch(self, groups: Groups) -> None:
        """Make this rank report its current op when the rank is terminated or an op hangs."""
        report_when_terminated(self._current_op, dist.get_rank())
        Watcher(
            self._current_op,
            groups.pipeline_ranks,
            dist.get_rank(),
            groups.timeout,
            end=end_now,
            together=groups.in_lockstep,
        ).start()

    # -------------------------------------------------------------- after the model is wrapped

    def prepare(self, models: list[Any]) -> list[Any]:
        """Create :attr:`schedule` (Megatron's post-wrap hook).

        All ranks of the job must call this method. The wrapped model has its final number format,
        so the cost model can be measured.

        Args:
            models: Wrapped stage modules of this rank, first to last.

        Returns:
            ``models``.

        Raises:
            ValueError: A kernel does not run on a rank; or see :func:`.hooks.make_steps`.
        """
        place, args = self.place, self.args
        for kind in KIND_MODULES:
            kind.install_in_wrapped(models, place.groups.control)
        if cpu_host.has_gpu_kernels():
            run_every_kind(args, models, place.groups, place.row_shard)
        self.hooks.choose_paths(place, models)
        if "wsplit" in training_levers(self.config.epp_levers):
            report_kept(models, place.groups.control)
        steps = self.hooks.make_steps(place, models)
        accepted = AcceptedSteps(
            steps,
            place.groups,
            place.layers,
            self._current_op,
            args.context_parallel_size,
            place.placement,
        )
        self._schedule = ElasticSchedule(
            accepted,
            self._stage_runner(models),
            Retry(steps, place.groups),
            self._observer(steps),
            validate=lambda total: megatron_gpt.validate(total, args),
            shared=self._shared,
        )
        return models

    def _stage_runner(self, models: list[Any]) -> StageRunner:
        """Return the runner of this rank's programs."""
        place, config = self.place, self.config
        meter: AllocatorMeter | SavedBytesMeter
        if place.device.type == "cuda":
            meter = AllocatorMeter(every_op=config.epp_record is not None)
        else:
            parameters = chain.from_iterable(model.parameters() for model in models)
            meter = SavedBytesMeter(parameters, self.hooks.limit_bytes(config))
        return StageRunner(
            ProgramRunner(place.device, self._current_op, place.groups),
            local_stages(place.placement, place.groups.pipeline_rank),
            place.groups.replica,
            row_shard=place.row_shard,
            meter=meter,
            fused_head=fused_head(self.args),
            stores_last_slice=place.attention.stores_last_slice,
            make_stage=self.hooks.make_stage,
            host_bytes=host_budget_bytes(config),
        )

    def _observer(self, steps: StepSource) -> Observer:
        """Return the observer, which reports iterations and compares them with predictions."""
        args, config, groups = self.args, self.config, self.place.groups
        folders = [folder for _, folder in self._folders if folder]
        may_refit = config.epp_cost_model is None and config.epp_plan is None
        return Observer(
            groups,
            steps,
            CostMonitor(groups, folders, may_refit, partial(on_these_ranks, args)),
            self.recorder,
            self.hooks.summary,
            self._write_scalars,
            loaded_from=None if args.finetune else args.load,  # iterations count from 1 again
        )

    def _write_scalars(self, iteration: int, step: AcceptedStep, report: IterationReport) -> None:
        """Write scalars under ``epp/`` to this rank's TensorBoard and Weights & Biases, if any."""
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        if tensorboard is None and wandb is None:
            return
        values = _scalars(step, report, self._data.truncated_documents)
        for name, value in values.items():
            if tensorboard is not None:
                tensorboard.add_scalar(f"epp/{name}", value, iteration)
        if wandb is not None:
            wandb.log({f"epp/{name}": value for name, value in values.items()}, iteration)

    # -------------------------------------------------------------- what Megatron calls

    def choose_schedule(self, original: Any) -> Any:
        """Return a replacement of get_forward_backward_func that returns :attr:`schedule`."""

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> ElasticSchedule:
            return self.schedule

        return get_forward_backward_func

    def datasets(self, samples: Sequence[int]) -> tuple[GlobalBatches | None, ...]:
        """Build the documents; return the global batches of training, validation and test.

        All ranks of the job must call this method; see :meth:`.JobData.global_batches`. With
        --epp-share-from, rank 0 prints a line on shared prefixes.
        """
        group, shared = self.place.groups.control, self._shared
        training, *others = self._data.global_batches(samples, group)
        if shared is not None and training is not None:
            line = broadcast_result(lambda: shared.first_line(training), group)
            print_rank_0(f"> {line}")
        return training, *others


def _scalars(step: AcceptedStep, report: IterationReport, truncated: int) -> dict[str, float]:
    """Return the scalars of an iteration for TensorBoard and Weights & Biases, by name.

    Args:
        step: The iteration's step.
        report: Reports of all ranks.
        truncated: Number of training documents that were truncated to the context.
    """
    values: dict[str, float] = {
        "tokens-per-second": step.tokens / report.seconds,
        "seconds": report.seconds,
        "bubble-ratio": report.bubble_ratio,
        "recomputed-layers-ratio": report.recomputed,
        "recomputed-in-part-ratio": report.recomputed_in_part,
        "chunks": report.chunks,
        "planner-wait-seconds": step.planning.waited_seconds,
        "planner-iterations-ahead": step.planning.ahead,
        "planner-discarded-plans": step.planning.discarded,
        "truncated-documents": truncated,
    }
    for rank, peak in enumerate(report.peak_bytes):
        values[f"peak-gib-rank-{rank}"] = peak / GIB
    if step.predicted_seconds:
        values["predicted-seconds"] = step.predicted_seconds
    return values
