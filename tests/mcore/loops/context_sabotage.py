"""Forgets, in the second batch of each model, that context-parallel ranks share a micro-batch.

Run inside a rank (``Trial.interfere``): Megatron averages gradients over these ranks, and its
schedules multiply a loss that comes without a number of tokens by their number.
"""

from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

from megatron_epp.mcore.loops.micro_batch_stage import MicroBatchStage


def around(number: int) -> AbstractContextManager:
    if number != 1:
        return nullcontext()
    plain = MicroBatchStage.__init__

    def alone(self, call, batches, plan, stage, cp_size, shape) -> None:
        plain(self, call, batches, plan, stage, 1, shape)

    return patch.object(MicroBatchStage, "__init__", alone)
