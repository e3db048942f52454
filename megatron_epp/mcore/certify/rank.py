"""Rank of the job under test: it runs the trainer's components on one batch after another."""

import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config

from megatron_epp.certify.batches import RandomBatch, most_offloaded
from megatron_epp.certify.protocol import ModelSetup, RankResult, Role
from megatron_epp.certify.trainer_results import TrainerResult
from megatron_epp.certify.trial import FLOAT64
from megatron_epp.control.step_source import Following, SourcedStep
from megatron_epp.ir import OFFLOAD, Chunk, Step
from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.varlen import VarlenAttention
from megatron_epp.mcore.certify.adapters import gradient
from megatron_epp.mcore.certify.models import ChangingWeights, begin, elastic_models, join
from megatron_epp.mcore.certify.routing import RoutingNotes
from megatron_epp.mcore.certify.shards import fill, shards
from megatron_epp.mcore.data.global_batches import Batch
from megatron_epp.mcore.flags.config import Config
from megatron_epp.mcore.kinds.certificates import LAYER_CERTIFICATES
from megatron_epp.mcore.kinds.registry import heads_of
from megatron_epp.mcore.model.forward import chunk_forward_step
from megatron_epp.mcore.patching import patch_points
from megatron_epp.mcore.trainer.hooks import JobContext, TrainerHooks
from megatron_epp.mcore.trainer.job import Job
from megatron_epp.runtime.host_store import LEAST_BLOCK, LEAST_BYTES


def exact_attention(wanted: str, config: Any, device: torch.device) -> VarlenAttention:
    """Return an attention that computes all scores in torch, because GPU kernels lack float64."""
    return VarlenAttention(ReferenceKernel(heads_of(config).scale))


def mix_paths(place: JobContext, models: Sequence[Any]) -> None:
    """Make some random chunks take each of the paths that can compute a layer."""
    for kind in LAYER_CERTIFICATES:
        kind.mix_paths(models, place.args)


class DrawnSteps:
    """Source of steps (plans of all replicas) that were drawn at random with the documents."""

    def __init__(self) -> None:
        self.drawn: RandomBatch | None = None

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> SourcedStep:
        """Return the drawn step of this batch."""
        assert self.drawn is not None, "a batch is drawn before it is run"
        step = self.drawn.evaluation if forward_only else self.drawn.step
        return SourcedStep(step, str(step))

    def look_ahead(self, iteration: int, following: Following) -> None:
        """Do nothing, because the steps are already drawn."""


class InMemory:
    """Data source with one global batch of drawn documents."""

    def __init__(self, drawn: RandomBatch):
        self.drawn = drawn
        self.documents = self

    def __next__(self) -> Batch:
        lengths = numpy.array(self.drawn.lengths, dtype=numpy.int64)
        return Batch(numpy.arange(len(lengths)), lengths)

    def peek(self, ahead: int = 0) -> None:
        """Return None, because there is no later batch."""

    def header(self, sample: int) -> str:
        """Return "": recorded steps have no comment lines, because the documents have no corpus."""
        return ""

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        """Return the input tokens [start, stop) of document ``sample``."""
        return self.drawn.tokens[sample][start:stop]

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return (labels, loss mask) of the tokens [start, stop) of document ``sample``."""
        labels = self.drawn.tokens[sample][start + 1 : stop + 1]
        return labels, self.drawn.loss_masks[sample][start:stop]


class Rank:
    """Rank that builds the model with the trainer's hooks, and runs the trainer's schedule."""

    mtp_loss: Mapping[str, numpy.ndarray] = MappingProxyType({})  # MTP losses
    RESULT: ClassVar[type[RankResult]] = TrainerResult  # class of a batch's results

    def __init__(self, role: Role):
        self.trial, self.seed = role.trial, role.trial.seed
        backend = "nccl" if role.on_gpu else "gloo"
        ranks = role.trial.degrees.ranks
        join(role.folder / "meeting", role.rank, ranks, role.patience, backend)
        interference = role.interference()
        self.around = interference.get("around", lambda number: nullcontext())
        self.hooks = interference.get("HOOKS", TrainerHooks())
        if role.on_gpu and role.trial.dtype == FLOAT64:
            self.hooks = replace(self.hooks, attention_for=exact_attention)

    def prepare(self, prepared: ModelSetup) -> None:
        """Build the model, and set its weights to the weights in ``prepared``."""
        patch_points.install(patch_points.EPP_PATCH_POINTS)
        self.args, self.frame = pickle.loads(prepared.args), prepared.frame
        self.args.rank = dist.get_rank()
        begin(self.args, self.seed)
        self.models = self.build()
        for model in self.models:
            fill(model.module, prepared.weights)
        self.weights = ChangingWeights(*(model.module for model in self.models))

    def build(self) -> list[Any]:
        """Return this rank's stage modules, wrapped in Megatron's DDP."""
        for kind in LAYER_CERTIFICATES:
            kind.shrink_blocks()
        self.steps = DrawnSteps()
        hooks = replace(
            self.hooks,
            make_steps=lambda place, models: self.steps,
            choose_paths=mix_paths,
        )
        job = Job(self.args, Config.of(self.args), hooks)
        models = elastic_models(self.args, job.install, self.trial.lora_rank)
        self.routing, config = RoutingNotes(*models), get_model_config(models[0])
        config.finalize_model_grads_func = self.routing.before(config.finalize_model_grads_func)
        self.schedule = job.schedule
        self.groups, self.row_shard = job.place.groups, job.place.row_shard
        self.attention: Any = job.place.attention
        return models

    def compute(self, number: int) -> RankResult:
        """Run batch ``number``, first forward-only and then with backward; return the results."""
        self.number = number
        with self.around(number):
            drawn = self.frame.draw(self.seed, number)
            if self.args.fp8:
                self.weights.change()
            evaluated = self.run(drawn, forward_only=True)
            for model in self.models:
                model.zero_grad_buffer()
            trained = self.train(drawn)
            self._gather_gradients()
            return self.RESULT(
                [
                    shard
                    for model in self.models
                    for shard in shards(model.module, lambda one: gradient(one, "main_grad"))
                ],
                self.problems(drawn),
                *self.results(trained, evaluated),
            )

    def train(self, drawn: Any) -> Any:
        """Run the drawn batch with backward."""
        return self.run(drawn, forward_only=False)

    def problems(self, drawn: Any) -> list[str]:
        """Return a line for each deviation of the batch just trained from its plan."""
        return self._not_offloaded(drawn.step)

    def results(self, trained: Any, evaluated: Any) -> tuple[Any, ...]:
        """Return the values of the fields that class ``RESULT`` adds to its base RankResult."""
        return trained, evaluated, self.routing.taken(self.mtp_loss)

    def run(self, drawn: Any, forward_only: bool) -> Any:
        """Run the schedule; return this rank's (sum of token losses, number of loss tokens)."""
        self.mtp_loss = {}
        self.steps.drawn, self.args.iteration = drawn, self.number
        for model in self.models:
            model.train(not forward_only)
        with torch.set_grad_enabled(not forward_only):
            reports = self.schedule(
                forward_step_func=chunk_forward_step,
                data_iterator=InMemory(drawn),
                model=self.models,
                num_microbatches=1,
                seq_length=self.args.seq_length,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        if not reports or mpu.get_tensor_model_parallel_rank():
            return 0.0, 0.0
        report = {name: values.tolist() for name, values in reports[0].items()}
        total, tokens = report.pop("lm loss")
        replicas = self.trial.degrees.dp
        self.mtp_loss = {name: numpy.array([one / replicas]) for name, (one, _) in report.items()}
        return total, tokens

    def _gather_gradients(self) -> None:
        """All-gather gradient buffers; the distributed optimizer reduces one shard on each rank."""
        if not self.args.use_distributed_optimizer:
            return
        replicas = mpu.get_data_parallel_group(with_context_parallel=True)
        sharded = [(model.buffers, replicas) for model in self.models]
        experts = mpu.get_expert_data_parallel_group()
        sharded += [(model.expert_parallel_buffers, experts) for model in self.models]
        for buffers, group in sharded:
            for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                local = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, local, group=group)

    def _not_offloaded(self, step: Step) -> list[str]:
        """Return a line if fewer bytes were offloaded than the plan's offloaded layers require.

        Layers with small inputs do not count. Offload that is not in the plan also gives a line.
        """
        rank, plan = self.groups.pipeline_rank, step.plans[self.groups.replica]
        taken = self.schedule.ran.host_peak_bytes
        layers = most_offloaded(plan, rank, lambda chunk: self._input_bytes(chunk) >= LEAST_BYTES)
        asked = any(OFFLOAD in c for stage in plan.stages_of(rank) for c in plan.recompute[stage])
        if layers * LEAST_BLOCK <= taken and (asked or not taken):
            return []
        return [
            f"{plan.rank_name(rank)}: {taken} bytes were offloaded; the plan lays aside "
            f"{layers} layers at a time, of {LEAST_BLOCK} bytes or more each"
        ]

    def _input_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of a layer's input for ``chunk`` on this rank."""
        rows = self.row_shard.message(self.row_shard.rows(chunk))
        return rows * self.args.hidden_size * self.args.params_dtype.itemsize
