"""A fault in the second batch of each job: context-parallel ranks do not share a micro-batch.

Megatron averages gradients over these ranks, and its schedules multiply a loss that comes without a
number of tokens by their number.
"""

from contextlib import AbstractContextManager

from megatron_epp.mcore.loops.micro_batch_stage import MicroBatchStage

from tests.mcore.fault_injection import fault, nothing

alone = fault(
    MicroBatchStage,
    "__init__",
    lambda init, stage, call, batches, plan, cost, cp_size, shape: init(
        stage, call, batches, plan, cost, 1, shape
    ),
)


def around(number: int) -> AbstractContextManager:
    return alone() if number // 2 == 1 else nothing()
