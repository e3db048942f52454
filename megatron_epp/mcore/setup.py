"""Megatron's trainer with elastic pipelines: everything that ``--epp`` puts in place."""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, print_rank_0

from megatron_epp.control.given_steps import FixedSteps
from megatron_epp.control.report import Recorder
from megatron_epp.cost.devices import GIB
from megatron_epp.mcore import megatron_gpt, refusals
from megatron_epp.mcore.calibrate.profile_file import obtain
from megatron_epp.mcore.config import Config
from megatron_epp.mcore.data.documents import config_from_args
from megatron_epp.mcore.data.global_batches import Documents, GlobalBatches, build_documents
from megatron_epp.mcore.data.row_share import RowShare
from megatron_epp.mcore.elastic_schedule import ElasticSchedule, Planning
from megatron_epp.mcore.job_cost import make_planning
from megatron_epp.mcore.model.attention import attention_for, this_device
from megatron_epp.mcore.model.early_head import early_head
from megatron_epp.mcore.model.forward import forward_step
from megatron_epp.mcore.model.hooks import install_in_model
from megatron_epp.mcore.model.layer_spec import allow_context_parallelism
from megatron_epp.mcore.patching import seams
from megatron_epp.mcore.process_groups import make_groups
from megatron_epp.mcore.sigterm import speak_when_terminated
from megatron_epp.runtime.executor import Waiting
from megatron_epp.runtime.groups import Groups
from megatron_epp.runtime.memory_meter import AllocatorMeter, SavedBytesMeter
from megatron_epp.runtime.watcher import Watcher

logger = logging.getLogger(__name__)

MakePlanning = Callable[[Any, Config, tuple[int, ...], int, Groups], Planning]


def setup(args: Any, model_config: Any) -> tuple[Any, Any]:
    """Put elastic pipelines into this process; returns the forward step and the data provider
    for Megatron's ``pretrain``.

    ``args`` are Megatron's, with ours (:mod:`megatron_epp.mcore.config`); ``model_config`` is the
    model configuration that ``pretrain`` will build from. A ValueError says in one line what
    cannot run.
    """
    config = Config.of(args)
    refusals.refuse(args)
    if args.num_layers is not None and args.pipeline_model_parallel_size > args.num_layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: more stages "
            f"than the {args.num_layers} layers; expected at most one stage per layer"
        )
    job = Job(args, config)
    if args.context_parallel_size > 1:
        allow_context_parallelism(model_config)
    model_config.pre_wrap_hooks.append(job.attach)
    model_config.post_wrap_hooks.append(job.prepare)
    seams.apply_schedule_seam(job.choose_schedule)
    datasets = partial(_datasets, config)
    datasets.is_distributed = True  # every rank reads lengths, and its own tokens
    return forward_step, datasets


class Job:
    """This rank's part of the job: filled when the model is built.

    ``plan_with`` makes the planning; the certificate brings plans of its own.
    """

    def __init__(self, args: Any, config: Config, plan_with: MakePlanning | None = None):
        self.args, self.config, self.plan_with = args, config, plan_with
        self.schedule: ElasticSchedule | None = None
        self.recorder = Recorder(config.epp_record) if config.epp_record else None

    def attach(self, models: list[Any]) -> list[Any]:
        """Megatron's pre-wrap hook: make the model compute chunks, and prepare the schedule."""
        args = self.args
        (model,) = models
        device = this_device()
        attention = attention_for(self.config.epp_attention, model.config, device)
        install_in_model(model, args.seq_length, attention)
        groups = make_groups(device)
        layers = [0] * groups.stages
        mine = torch.tensor([len(model.decoder.layers)])
        every = torch.empty(groups.control.size(), dtype=mine.dtype)
        dist.all_gather_into_tensor(every, mine, group=groups.control)
        for stage, rank in enumerate(groups.pipeline_ranks):
            layers[stage] = int(every[rank])
        share = RowShare.of(args)
        waiting = Waiting(groups.stage)
        self.schedule = ElasticSchedule(
            groups=groups,
            layers=tuple(layers),
            planning=None
            if self.plan_with is None
            else self.plan_with(args, self.config, tuple(layers), share.multiple, groups),
            share=share,
            meter=AllocatorMeter()
            if device.type == "cuda"
            else SavedBytesMeter(model.parameters(), limit_bytes(self.config)),
            waiting=waiting,
            recorder=self.recorder,
            device=device,
            folders=[folder for folder in (args.save, self.config.epp_record) if folder],
            loaded_from=None if args.finetune else args.load,  # iterations count from 1 again
            validate=lambda total: megatron_gpt.validate(total, args),
            early_head=early_head(args),
            keeps_last=attention.keeps_last,
            may_refit=self.config.epp_cost_model is None and self.config.epp_plan is None,
        )
        if not getattr(args, "exit_signal_handler", False):  # Megatron's saves a checkpoint instead
            speak_when_terminated(waiting, dist.get_rank())
        Watcher(waiting, groups.pipeline_ranks, dist.get_rank(), groups.timeout).start()
        return models

    def prepare(self, models: list[Any]) -> list[Any]:
        """Megatron's post-wrap hook: the model has its final number format, so it is measured, and
        plans can be made."""
        schedule, args, config = self.schedule, self.args, self.config
        assert schedule is not None, "attach comes first"
        if config.epp_plan is not None:
            schedule.planning = FixedSteps(config.epp_plan)
            return models
        (model,) = models
        profile = obtain(args, config, model, schedule.groups, schedule.share)
        schedule.planning = make_planning(
            args, config, schedule.layers, schedule.share.multiple, schedule.groups, profile
        )
        return models

    def choose_schedule(self, original: Any) -> Any:
        """What stands in for Megatron's ``get_forward_backward_func``."""

        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            assert self.schedule is not None, "the model is not built yet"
            return self.schedule

        return get_forward_backward_func


def limit_bytes(config: Config) -> float:
    """What chunks may hold on a host at most, whatever was planned."""
    limit = config.epp_memory_limit_gib
    return math.inf if limit is None else limit * GIB


# ------------------------------------------------------------------ data


def _datasets(config: Config, samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """The global batches of training, validation and test, from where the checkpoint stopped."""
    args = get_args()
    print_rank_0("> building the documents of training, validation and test ...")
    documents = build_documents(
        config_from_args(args, build_tokenizer(args), config.epp_overlong, args.padded_vocab_size),
        samples,
    )
    sizes = (args.global_batch_size, args.eval_global_batch_size, args.eval_global_batch_size)
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    made = []
    for docs, size, start in zip(documents, sizes, consumed, strict=True):
        if isinstance(docs, list):
            raise ValueError("--epp evaluates on one validation set; leave --multiple-... out")
        made.append(None if docs is None else GlobalBatches(docs, size, start))
    _tell(documents[0])
    return tuple(made)


def _tell(documents: Documents | None):
    if documents is not None:
        print_rank_0(f"> {documents.counts}")
