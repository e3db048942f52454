"""Stages of a pipeline, one after another in this process, with random messages from neighbours.

One GPU cannot hold a pipeline, but it can run every stage's program: the same executor, and the
same ops in the same order with the same shapes. Received messages are random, because the time of
an op does not depend on their values. The simulator combines the measured stages
(:func:`measured_table`).
"""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from zlib import crc32

import numpy
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_epp.control.accept import AcceptedStep
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Message, Op, Plan, Step, Table, Timed
from megatron_epp.mcore.capabilities import refusals
from megatron_epp.mcore.data.global_batches import Batch
from megatron_epp.mcore.data.row_shard import RowShard
from megatron_epp.mcore.flags.config import FUSED_LINEARS, Config
from megatron_epp.mcore.job import megatron_gpt
from megatron_epp.mcore.job.read_flags import be_the_only_process, read_flags
from megatron_epp.mcore.model.attention import (
    Attention,
    attention_for,
    choose_mask,
    this_device,
)
from megatron_epp.mcore.model.forward import chunk_forward_step
from megatron_epp.mcore.patching import cpu_host, cuda_host, patch_points
from megatron_epp.mcore.trainer.stage_runner import StageRun, StageRunner
from megatron_epp.runtime.clock import HostClock
from megatron_epp.runtime.executor import CurrentOp
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.memory_meter import AllocatorMeter, SavedBytesMeter
from megatron_epp.runtime.program_runner import ProgramRunner


@dataclass(frozen=True, slots=True)
class SingleProcess:
    """Setup of Megatron with this process as the only rank; stages are built with it."""

    args: Any
    config: Config
    attention: Attention
    device: torch.device
    share: RowShard


def start_single_process(flags: Sequence[str]) -> SingleProcess:
    """Initialise Megatron with its ``flags`` for this process only.

    Raises:
        ValueError: if the flags cannot be used; the message is one line.
    """
    be_the_only_process()
    cuda_host.prepare([*flags, "--epp"])
    cpu_host.install_cpu_host()
    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
    sys.argv = [sys.argv[0], *flags, "--epp"]
    read_flags()
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.initialize import initialize_megatron

    args = get_args()
    refusals.refuse(args)
    if args.hybrid_layer_pattern is not None:
        raise ValueError("--hybrid-layer-pattern: one stage alone is a GPTModel's; leave it out")
    patch_points.install(patch_points.EPP_PATCH_POINTS)
    initialize_megatron(
        get_embedding_ranks=megatron_gpt.embedding_ranks, allow_no_cuda=not cpu_host.has_gpu()
    )
    config, device = Config.of(args), this_device()
    transformer = gpt_config_from_args(args).transformer
    attention = attention_for(config.epp_attention, transformer, device)
    choose_mask(attention, transformer, device)
    return SingleProcess(args, config, attention, device, RowShard.of(args))


def build_stage(alone: SingleProcess, layers: int, first: bool, last: bool) -> Any:
    """Return a stage of ``layers`` layers in Megatron's DDP, as the trainer builds it.

    The ``first`` stage has the embedding, the ``last`` stage the LM head.
    """
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.dist_utils import (
        prepare_existing_model_chunks_for_distributed_training,
    )
    from megatron.training.training import get_megatron_ddp_config

    from megatron_epp.mcore.kinds.modules import KIND_MODULES
    from megatron_epp.mcore.model.elastic_layers import fuse_weight_gradients, install_in_model
    from megatron_epp.mcore.model.layer_spec import fix_layer_spec

    args = copy.copy(alone.args)
    args.num_layers = args.encoder_num_layers = layers
    description = gpt_config_from_args(args)
    fix_layer_spec(description)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = description.get_builder_cls()(description)
    model = builder.build_model(groups, pre_process=first, post_process=last)
    install_in_model(model, args.seq_length, alone.attention)
    if getattr(args, FUSED_LINEARS, False):
        fuse_weight_gradients(model)
    (wrapped,) = prepare_existing_model_chunks_for_distributed_training(
        [model],
        description.transformer,
        groups,
        ddp_config=get_megatron_ddp_config(args),
        data_parallel_random_init=False,
    )
    for kind in KIND_MODULES:
        kind.install_in_wrapped([wrapped], None)
    return wrapped


def probe_alone(alone: SingleProcess, model: Any) -> Any:
    """Return a probe that measures parts of ``model`` on random chunks, as in calibration."""
    from megatron_epp.mcore.calibrate.probe import Probe
    from megatron_epp.mcore.lm_head.fused_head import block_tokens, fused_head

    args = alone.args
    head_tokens = block_tokens(args) if fused_head(args) else None
    unwrapped = unwrap_model(model)
    return Probe(
        unwrapped, chunk_forward_step, alone.share, alone.device, head_tokens, args.seq_length
    )


def profile_of(alone: SingleProcess, model: Any) -> Profile:
    """Return the profile that training would measure with ``model``, a first and last stage."""
    from megatron_epp.mcore.calibrate.profile_file import obtain
    from megatron_epp.mcore.job.process_groups import make_groups

    return obtain(alone.args, alone.config, [model], make_groups(alone.device), alone.share)


# ------------------------------------------------------------------ what is made up


class MadeUpDocuments:
    """Documents of random tokens, without padding and without masked labels."""

    def __init__(self, vocabulary: int, seed: int = 20260301):
        self._vocabulary, self._seed = vocabulary, seed

    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        return self._tokens(sample, stop + 1)[start:stop]

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        mask = numpy.ones(stop - start, dtype=numpy.float32)
        return self._tokens(sample, stop + 1)[start + 1 :], mask

    def _tokens(self, sample: int, count: int) -> numpy.ndarray:
        return numpy.random.default_rng([self._seed, sample]).integers(0, self._vocabulary, count)


class MadeUpLinks(Links):
    """Links without neighbours: received data are random, sent data are dropped.

    The random data depend only on the message. Transformer Engine advances the device's own
    generator with every call of its attention, so messages after a recomputed attention would
    otherwise differ.
    """

    def post(self, message: Message) -> None:
        """Do nothing, because no message arrives."""

    def receive(self, message: Message) -> Tensor:
        self.received += 1
        torch.manual_seed(crc32(str(message).encode()))
        return torch.randn(tuple(self.shape(message)), dtype=self.dtype, device=self.device)

    def send(self, message: Message, tensor: Tensor) -> None:
        assert tuple(tensor.shape) == self.shape(message)
        self.sent += 1


class _NoNeighbours(ProgramRunner):
    def links(self, shape: Callable[[Message], Sequence[int]], dtype: torch.dtype) -> MadeUpLinks:
        return MadeUpLinks({}, shape, dtype, self.device)


# ------------------------------------------------------------------ a stage's program


def replay(
    alone: SingleProcess, model: Any, plan: Plan, stage: int, repeats: int
) -> tuple[Timed, ...]:
    """Run ``stage``'s program of ``plan`` once unmeasured, then ``repeats`` times; return records.

    Every op has its median seconds, as if ops ran one after the other, and the bytes of the last
    run.

    Raises:
        RuntimeError: if an op runs out of memory.
    """
    runs = [run_stage(alone, model, plan, stage).records for _ in range(repeats + 1)][1:]
    records, now = [], 0.0
    for same in zip(*runs, strict=True):
        seconds = median(record.seconds for record in same)
        records.append(replace(same[-1], start=now, stop=now + seconds))
        now += seconds
    return tuple(records)


def run_stage(
    alone: SingleProcess, model: Any, plan: Plan, stage: int, clock: HostClock | None = None
) -> StageRun:
    """Run ``stage``'s program of ``plan`` once; gradients are in the model's buffer.

    ``clock`` times the ops; by default it is the clock of the device.
    """
    from megatron_epp.mcore.lm_head.fused_head import fused_head

    on_gpu = alone.device.type == "cuda"
    programs = _NoNeighbours(alone.device, CurrentOp(stage))
    programs.clock = clock or programs.clock
    runner = StageRunner(
        programs,
        (stage,),
        replica=0,
        row_shard=alone.share,
        meter=AllocatorMeter(every_op=True) if on_gpu else SavedBytesMeter(model.parameters()),
        fused_head=fused_head(alone.args),
        stores_last_slice=alone.attention.stores_last_slice,
    )
    samples = numpy.arange(len(plan.documents))
    model.zero_grad_buffer()
    part = Step((tuple(samples.tolist()),), (plan,)).part(0)
    ran = runner.run(
        AcceptedStep(part, sum(plan.documents)),
        Batch(samples, numpy.array(plan.documents)),
        MadeUpDocuments(alone.args.padded_vocab_size),
        [model],
        get_model_config(model),
        chunk_forward_step,
    )
    if ran.failure is not None:
        raise RuntimeError(f"stage {stage}: out of memory at {ran.failure.op}")
    return ran


def measured_table(plan: Plan, cost: Cost, records: Sequence[Sequence[Timed]]) -> Table:
    """Return the cost model's table of ``plan`` with the measured seconds of its ops.

    ``records`` has the records of every stage. Recompute is part of a backward's seconds; links are
    those of the cost model.
    """
    table = cost.table(plan)
    shape = (plan.stages, len(plan.chunks))
    seconds = {kind: numpy.zeros(shape) for kind in table.seconds}
    for of_stage in records:
        for record in of_stage:
            if isinstance(record.op, Op):
                seconds[record.op.kind][record.stage, record.op.chunk] = record.seconds
    nothing = numpy.zeros(shape)
    return replace(
        table,
        seconds=seconds,
        recompute_seconds=nothing,
        comm_seconds=dict.fromkeys(seconds, nothing),
    )


def peak_bytes(records: Sequence[Timed]) -> int:
    """Return the peak bytes of a stage for its chunks."""
    return max(record.peak_bytes for record in records)
