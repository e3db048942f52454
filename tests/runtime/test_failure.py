"""A rank without memory keeps its messages: the others run their programs to the end."""

from random import Random

import pytest
import torch
from torch import nn

from megatron_epp.ir import Kind, Op, Plan, Post, StageOp, Transfer, lower
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.runtime.executor import CurrentOp
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import LimitReached, NoMeter, SavedBytesMeter, out_of_memory
from tests.plans import V_SHAPE
from tests.runtime.pipeline import on_host, shape_of
from tests.runtime.test_executor import executor_of

STAGES = 3


def plan():
    return arbitrary_plan([9, 14, 3, 7, 20], (1,) * STAGES, Random(5), split_backward=0.5)


def fails_at(kind: Kind, chunk: int, error: Exception):
    def at(op: Op) -> None:
        if (op.kind, op.chunk) == (kind, chunk):
            raise error

    return at


class Hungry:
    """A stage whose op ``at`` raises; nothing else happens."""

    def __init__(self, error: Exception):
        self.error = error

    def forward(self, chunk, received):
        raise self.error

    def abandon(self):
        pass


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("mat1 and mat2 shapes")])
def test_other_errors_are_survived_only_where_they_are_to_be_caught(error) -> None:
    the_plan = arbitrary_plan([4], (1,), Random(0))
    executor = executor_of(the_plan, 0, Hungry(error))
    with pytest.raises(type(error), match=str(error)):
        executor.run()
    executor = executor_of(the_plan, 0, Hungry(error), catch_errors=True)
    assert [record.op for record in executor.run()] == list(the_plan.orders[0])
    assert executor.failure.error is error and executor.failure.op == the_plan.orders[0][0]


class FullAtFirst:
    """Links that have no memory for the first message (``refused`` 0), and receive zeros."""

    def __init__(self, plan: Plan, refused: int = 0):
        self.plan, self.posted, self.sent, self.refused = plan, [], [], refused

    def post(self, message):
        if not self.refused:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.posted.append(message)

    def receive(self, message):
        return self.zeros(message)

    def zeros(self, message):
        return torch.zeros(shape_of(self.plan)(message), dtype=torch.float64)

    def send(self, message, tensor):
        self.sent.append(message)

    def oldest_sending(self):
        return None

    def finish(self):
        pass


class CountedMeter(NoMeter):
    """A meter that is read a known number of times."""

    read = 0

    def op_peak(self) -> int:
        self.read += 1
        return self.read


def test_memory_is_read_once_an_op_and_not_for_messages() -> None:
    the_plan = plan()
    links = FullAtFirst(the_plan, refused=1)
    executor = executor_of(the_plan, 1, on_host(the_plan, 1), links=links)
    executor.meter = CountedMeter()
    records = executor.run()
    peaks = [record.peak_bytes for record in records if isinstance(record.op, Op)]
    assert peaks == list(range(1, len(the_plan.orders[1]) + 1))
    assert all(record.peak_bytes == 0 for record in records if isinstance(record.op, Transfer))


@pytest.mark.parametrize(
    ("rank", "failing", "refused"),
    [
        (0, StageOp(3, Op(Kind.FORWARD, 1)), 1),
        (1, StageOp(2, Op(Kind.FORWARD, 0)), 1),
        # No memory for the first message that is received: a failure of the op that follows.
        (0, StageOp(3, Op(Kind.FORWARD, 0)), 0),
        (1, StageOp(1, Op(Kind.FORWARD, 0)), 0),
    ],
)
def test_a_failure_names_the_stage_and_the_rank(rank, failing, refused, caplog) -> None:
    """A V: the stages of rank 0 are 0 and 3, those of rank 1 are 1 and 2."""
    the_plan = Plan.parse(V_SHAPE)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    at = fails_at(failing.kind, failing.chunk, error) if refused else id
    computes = {
        stage: on_host(the_plan, stage, at if stage == failing.stage else id)
        for stage in the_plan.stages_of(rank)
    }
    current_op = CurrentOp(rank, iteration=7)
    links = FullAtFirst(the_plan, refused)
    executor = executor_of(the_plan, rank, computes, links=links, current_op=current_op)
    records = executor.run()
    program = lower(the_plan)[rank]
    assert links.posted == [op.message for op in program if isinstance(op, Post)]
    sends = [op for op in program if isinstance(op, Transfer) and op.kind is Kind.SEND]
    assert links.sent == [op.message for op in sends]
    failure = executor.failure
    assert failure is not None
    assert failure.reason.startswith("CUDA out of memory")
    assert (failure.stage, failure.op, failure.rank) == (failing.stage, failing.op, rank)
    (line,) = caplog.text.splitlines()
    said = f"pipeline rank {rank}, stage {failing.stage}, iteration 7: was in {failing.op} for "
    assert said in line and ": out of memory (CUDA out of memory" in line
    assert {record.stage for record in records} == set(the_plan.stages_of(rank))


def test_what_counts_as_out_of_memory() -> None:
    assert out_of_memory(MemoryError())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"))
    assert out_of_memory(LimitReached())
    assert not out_of_memory(RuntimeError("shape"))
    assert not out_of_memory(ValueError("can't allocate memory"))


def test_a_limit_is_told_after_the_op_and_forgotten_with_it() -> None:
    meter = SavedBytesMeter([], limit_bytes=1000)
    with meter.watch(Store({})):
        x = torch.ones(200, requires_grad=True)
        y = x.exp()  # 800 bytes
        meter.check()
        z = nn.functional.gelu(y * 2)  # as many again
        with pytest.raises(LimitReached, match=r"0\.0 MiB held, the limit is 0\.0"):
            meter.check()
        assert meter.op_peak() == 1600
        del y, z
        meter.op_peak()
        meter.check()
