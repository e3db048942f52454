"""One rank of a loop under test: Megatron's model and reduction, the loop's calls, our schedule."""

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron_epp.certify.allowed_collectives import name_of
from megatron_epp.certify.batches import letters_drawn
from megatron_epp.certify.loops.micro_batches import (
    LoopFrame,
    MicroBatch,
    arbitrary_sliced_plan,
    arbitrary_whole_plan,
    draw_micro_batches,
    loop_forward_step,
    loop_loss,
)
from megatron_epp.certify.loops.results import LoopComputed
from megatron_epp.certify.protocol import Role
from megatron_epp.ir import OFFLOAD, Plan
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.mcore.certify.adapters import gradient
from megatron_epp.mcore.certify.loops.allowed import LOOP
from megatron_epp.mcore.certify.loops.context import attend_over_ranks, context_forward_step
from megatron_epp.mcore.certify.models import begin, elastic_model
from megatron_epp.mcore.certify.rank import Rank
from megatron_epp.mcore.certify.shards import fill, shards
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.attached import attach_to
from megatron_epp.mcore.loops.install import Installation, installed
from megatron_epp.mcore.loops.settings import CallRecord, Settings
from megatron_epp.mcore.patching import seams
from megatron_epp.planner.calls.call_options import CallOptions
from megatron_epp.planner.calls.microbatch import MicrobatchShape
from megatron_epp.runtime.comm_recorder import Traffic


class LoopRank(Rank):
    """A loop: a model, an iterator, a forward step, and calls of ``get_forward_backward_func``."""

    def __init__(self, role: Role):
        super().__init__(role)
        self.ran: list[CallRecord] = []
        self.number = 0

    def prepare_loop(
        self,
        args: bytes,
        frame: LoopFrame,
        weights: Mapping[str, numpy.ndarray],
        lora_rank: int,
    ) -> None:
        if (before := installed()) is not None:
            before.remove()
        seams.install(seams.EPP_SEAMS)
        self.args, self.loop_frame = pickle.loads(args), frame
        self.args.rank = dist.get_rank()
        begin(self.args, self.seed)
        self.model = elastic_model(self.args, lambda description: None, lora_rank)
        get_model_config(self.model).variable_seq_lengths = True
        fill(self.model.module, weights)
        Installation(
            Settings(
                make_plan=self._whole_plan,
                make_sliced_plan=self._sliced_plan,
                observe=self.ran.append,
            )
        )
        if self.loop_frame.ranks > 1:
            attend_over_ranks(self.model.module)
        if self.loop_frame.sliced:
            attach_to(self.model, Samples(loop_loss), "auto", head_again=True)

    def compute_loop(self, number: int) -> LoopComputed:
        """Run batch ``number``: its forwards alone, and then in training."""
        with self.around(number):
            return self._compute_loop(number)

    def _compute_loop(self, number: int) -> LoopComputed:
        self.number = number
        drawn = draw_micro_batches(self.seed, number, self.loop_frame)
        replica = mpu.get_data_parallel_rank()
        batches = drawn.micro_batches[replica]
        collected = self._call(batches, forward_only=True)
        self.model.zero_grad_buffer()
        with Traffic() as traffic:
            values = self._call(batches, forward_only=False)
        pairs = [(one, name_of(one, LOOP)) for one in traffic.collectives]
        self._gather_gradients()
        unlisted = sorted({f"not on the list: {one}" for one, name in pairs if name is None})
        plan = self.ran[-1].plan
        whole = len(plan.chunks) - len(batches)
        return LoopComputed(
            replica,
            tuple(item["value"] for item in values),
            tuple(collected),
            shards(self.model.module, lambda one: gradient(one, "main_grad")),
            chunks=len(plan.chunks),
            cut=whole,
            halved=sum(op.kind.value == "W" for order in plan.orders for op in order),
            messages=len(traffic.messages),
            collectives=Counter(name for _, name in pairs if name is not None),
            problems=unlisted,
        )

    @property
    def _forward_step(self) -> Callable[..., Any]:
        return loop_forward_step if self.loop_frame.ranks == 1 else context_forward_step

    def _call(self, batches: Sequence[MicroBatch], forward_only: bool) -> list[Any]:
        self.model.train(not forward_only)
        with torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=iter(batches),
                model=[self.model],
                num_microbatches=len(batches),
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )

    def _whole_plan(
        self,
        extents: Sequence[MicrobatchShape],
        layers: Sequence[int],
        rates: numpy.ndarray,
        freedom: CallOptions,
        forward_only: bool,
    ) -> Plan:
        tokens = [extent.tokens for extent in extents]
        random = self._random(forward_only)
        return arbitrary_whole_plan(tokens, layers, random, freedom.split, forward_only)

    def _sliced_plan(
        self,
        lengths: Sequence[Sequence[int]],
        layers: Sequence[int],
        rates: numpy.ndarray,
        freedom: CallOptions,
        forward_only: bool,
    ) -> Plan:
        letters, random = letters_drawn(EXECUTABLE.replace(OFFLOAD, "")), self._random(forward_only)
        return arbitrary_sliced_plan(lengths, layers, random, freedom.split, forward_only, letters)

    def _random(self, forward_only: bool) -> Random:
        return Random(f"{self.seed} {self.number} {mpu.get_data_parallel_rank()} {forward_only}")
