"""The runtime on devices that put work off as long as anything allows: the same numbers in every
order; and with any one of its waits taken away, an order that shows it."""

import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_epp.ir import Op, Payload, Plan, Program, lower_rank
from megatron_epp.ir.random_plan import arbitrary_block, arbitrary_plan
from megatron_epp.layers.attention import ulysses, varlen
from megatron_epp.layers.wgrad import linear
from megatron_epp.runtime import clock, executor, host_store, link
from megatron_epp.runtime.executor import LEAD_OPS, CurrentOp
from megatron_epp.runtime.kv_store import Store
from megatron_epp.runtime.memory_meter import NoMeter
from tests.device.fakes import CudaEvent, Group, run_on
from tests.device.memory import CUDA
from tests.device.queues import HERE, ORDERS, Order, Stuck, World
from tests.runtime.pipeline import Stage, drawn, drawn_letters, reference, shape_of

pytestmark = pytest.mark.everything

PARTS = ("link", "executor", "clock", "host_store", "ulysses", "linear")
_WAIT = "self._store.copies.wait(self._moved)"


@dataclass(frozen=True)
class Runtime:
    """Modules of the runtime, one of them perhaps with a line taken away."""

    link: ModuleType = link
    executor: ModuleType = executor
    clock: ModuleType = clock
    host_store: ModuleType = host_store
    ulysses: ModuleType = ulysses
    linear: ModuleType = linear


@dataclass(frozen=True)
class Case:
    """Plans of replicas that run at once; ``block``: in lockstep, with a rendezvous in every op."""

    plans: tuple[Plan, ...]
    transport: str = "nccl"
    block: bool = False
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.plans) * self.plans[0].ranks

    def programs(self) -> list[Program]:
        block = self.plans if self.block else ()
        ranks = range(self.plans[0].ranks)
        return [lower_rank(plan, rank, block) for plan in self.plans for rank in ranks]


def drawn_case(seed: int, transport: str = "nccl", place: Sequence[int] = ()) -> Case:
    random = Random(seed)
    lengths = [random.randint(1, 20) for _ in range(random.randint(2, 3))]
    plan = arbitrary_plan(
        lengths,
        (1,) * (len(place) or (2, 3, 2, 4)[seed % 4]),
        random,
        split_backward=(0.0, 0.5, 1.0)[seed % 3],
        vocabulary_parallel=seed % 2 == 1,
        place=place,
    )
    return Case((plan,), transport, seed=seed)


def drawn_block(seed: int, vocabulary_parallel: bool = False, place: Sequence[int] = ()) -> Case:
    random = Random(seed)
    lengths = [[random.randint(1, 20) for _ in range(random.randint(1, 3))] for _ in range(2)]
    plans = arbitrary_block(
        lengths,
        (1,) * (len(place) or 2),
        random,
        split_backward=0.5,
        vocabulary_parallel=vocabulary_parallel,
        place=place,
    )
    return Case(plans, block=True, seed=seed)


def execute(case: Case, order: Order, runtime: Runtime = Runtime()) -> list[list[torch.Tensor]]:
    """What every stage made, replica by replica, after the promises of ``Executor.run``."""
    ranks = case.plans[0].ranks
    programs = case.programs()
    world = World(case.ranks, order, case.seed)

    def program(rank: int) -> dict[int, list[torch.Tensor]]:
        replica, place = divmod(rank, ranks)
        plan = case.plans[replica]
        pipeline = range(replica * ranks, (replica + 1) * ranks)
        groups = {
            payload: Group(payload.name, range(case.ranks), case.transport, lazy=True)
            for payload in Payload
        }
        runtime.link.connect(groups, place, ranks, CUDA, pipeline, plan.place)
        together = Group(f"rank {place}", range(place, case.ranks, ranks)) if case.block else None
        begun: list[CudaEvent] = []

        def at(op: Op) -> None:
            begun.append(CudaEvent())
            begun[-1].record()
            if len(begun) > LEAD_OPS:
                assert begun[-1 - LEAD_OPS].query(), f"{op}: the host is too far ahead"
            if order.name == "late" and len(begun) == 1 and links.received and not links.staged:
                assert links.oldest_arriving() is not None, "the device waits, and nobody says so"

        memory, hosts, computes = runtime.host_store.HostMemory(), [], {}
        for stage in plan.stages_of(place):
            hosts.append(runtime.host_store.HostStore(CUDA, memory=memory))
            letters = drawn_letters(stage, case.seed)
            computes[stage] = Stage(plan, stage, CUDA, hosts[-1], letters, together, at)
        timer = runtime.clock.CudaClock()
        timer.start()
        links = runtime.link.Links(groups, shape_of(plan), torch.float64, CUDA, pipeline)
        links.staged = case.transport == "gloo"
        compute = computes if plan.shares_ranks else computes[plan.stages_of(place)[0]]
        records = runtime.executor.Executor(
            programs[rank], compute, links, Store({}), timer, NoMeter(), CurrentOp(place)
        ).run()
        assert all(record.start <= record.stop for record in records)
        assert not any(map(len, hosts)) and not memory.bytes
        for tensor in (one for compute in computes.values() for one in compute.handed):
            tensor.detach().fill_(float("nan"))  # every message has left
        return {
            stage: [one.cpu() for one in compute.results()] for stage, compute in computes.items()
        }

    found = run_on(world, program)
    replicas = [found[first : first + ranks] for first in range(0, case.ranks, ranks)]
    return [
        each[plan.rank_of[stage]][stage]
        for plan, each in zip(case.plans, replicas, strict=True)
        for stage in range(plan.stages)
    ]


def assert_right(case: Case, found: list[list[torch.Tensor]]) -> None:
    stages = case.plans[0].stages
    for replica, plan in enumerate(case.plans):
        for stage, right in enumerate(reference(plan)):
            *made, met = found[replica * stages + stage]
            for one, other in zip(made, right, strict=True):
                assert torch.equal(one, other), f"replica {replica}, stage {stage}"
            assert met.isfinite() and (met != 0) == case.block
            assert torch.equal(met, found[stage][-1])


CASES = [drawn_case(seed) for seed in range(4)]
STAGED = [drawn_case(seed, "gloo") for seed in (0, 1)]
BLOCKS = [drawn_block(0), drawn_block(1, vocabulary_parallel=True)]
# A V, interleaved with the words over all stages, a wave of three, and anyhow, neither end alone.
PLACED = [
    drawn_case(2, place=(1, 0, 0, 1)),
    drawn_case(1, place=(0, 1, 0, 1)),
    drawn_case(4, place=(0, 1, 1, 0, 0, 1)),
    drawn_case(5, place=(1, 2, 0, 2, 1, 2)),
    drawn_case(6, "gloo", place=(1, 0, 0, 1)),
    drawn_block(2, place=(1, 0, 0, 1)),
    drawn_block(3, vocabulary_parallel=True, place=(0, 1, 0, 1)),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_random_plans_in_every_order(order: Order) -> None:
    """Executor, links over NCCL and through the host's memory, H and G, offloaded layers, the early
    head, replicas in lockstep, several stages on a rank: to the bit what a host computes op by
    op. An order meets every second case, the next order the others."""
    for case in (*CASES, *STAGED, *BLOCKS, *PLACED)[ORDERS.index(order) % 2 :: 2]:
        assert_right(case, execute(case, order))


# ------------------------------------------------------------------ without one of its waits

# module, the lines that wait, what is there instead
MUTATIONS = (
    ("link", "        posted.work.wait()\n", ""),
    ("link", "            self._sending[0][2].wait()\n", ""),
    ("link", "self._sending and self._sending[0][2].is_completed()", "self._sending"),
    ("link", "self._arriving and self._arriving[0][1].is_completed()", "self._arriving"),
    ("link", " if not work.is_completed()), None)", " if False), None)"),
    ("executor", "self.clock.wait(ends[0])", "pass"),
    ("executor", "            self.links.finish()\n", ""),
    ("clock", 'passed ``mark``."""\n        mark.synchronize()', 'passed ``mark``."""'),
    ("clock", "        mark.synchronize()\n        return", "        return"),
    ("host_store", "        stream.wait_stream(torch.cuda.current_stream())\n", ""),
    ("host_store", "torch.cuda.current_stream().wait_event(done)", "pass"),
    ("host_store", f"{_WAIT}\n        for storage in self._moving:", "pass"),
    ("host_store", f"{_WAIT}\n        for storage in (ref", "pass"),
    ("host_store", "while self._leaving:\n            self._leaving.popleft().leave()", "pass"),
    ("host_store", "            self.release()\n        before", "        before"),
    ("ulysses", "    for work in works:\n        work.wait()\n", ""),
    ("linear", "            work.wait()\n", "            pass\n"),
)
# HostStore.clear's: release() waits for the same copies; here it only empties a list.
NOT_THE_DEVICES = {"host_store": 1}
# A call that waits, or asks whether something is done.
WAITS = re.compile(r"\.(wait|wait_event|wait_stream|synchronize|is_completed|finish)\(")


def without(part: str, lines: str, instead: str) -> Runtime:
    plain = getattr(Runtime(), part)
    text = Path(plain.__file__).read_text()
    assert text.count(lines) == 1, f"{part}: {lines!r}"
    if lines.startswith(_WAIT):
        instead += lines.removeprefix(_WAIT)
    made = types.ModuleType(plain.__name__)
    exec(compile(text.replace(lines, instead), plain.__file__, "exec"), vars(made))
    return Runtime(**{part: made})


def test_every_wait_of_the_runtime_is_taken_away_once() -> None:
    for part in PARTS:
        text = Path(getattr(Runtime(), part).__file__).read_text()
        taken = sum(
            len(WAITS.findall(lines)) - len(WAITS.findall(instead))
            for name, lines, instead in MUTATIONS
            if name == part
        )
        assert taken == len(WAITS.findall(text)) - NOT_THE_DEVICES.get(part, 0), part


def failures(runtime: Runtime) -> Iterator[str]:
    for order in ORDERS:
        for attempt in (lambda: exchange(order, runtime), *_attempts(order, runtime)):  # noqa: B023
            try:
                attempt()
            except (AssertionError, RuntimeError) as error:
                yield f"{order.name}: {error!r}"


def _attempts(order: Order, runtime: Runtime) -> list[Callable[[], None]]:
    if runtime.ulysses is not Runtime.ulysses or runtime.linear is not Runtime.linear:
        return []
    return [
        lambda case=case: assert_right(case, execute(case, order, runtime))
        for case in (*CASES[1:3], STAGED[1])
    ]


@pytest.mark.parametrize(
    ("part", "lines", "instead"), MUTATIONS, ids=[f"{m[0]} {n}" for n, m in enumerate(MUTATIONS)]
)
def test_without_a_wait_some_order_breaks(part: str, lines: str, instead: str) -> None:
    assert next(failures(without(part, lines, instead)), None)


# ------------------------------------------------------------------ exchanges within a layer


def exchange(order: Order, runtime: Runtime = Runtime()) -> None:
    """Rows for heads, and the gradient of a linear's input over tensor-parallel ranks: two ranks,
    two rows, two heads each."""
    group_of = lambda: Group("layer", range(2))  # noqa: E731
    given = [drawn(7, rank, rows=4).view(4, 2, 3) for rank in range(2)]
    weights = [drawn(8, rank) for rank in range(2)]

    def program(rank: int) -> list[torch.Tensor]:
        group, q = group_of(), given[rank].to(CUDA)
        heads = runtime.ulysses.Ulysses(group).to_heads(q, q + 1, q + 2)
        made = [sum(heads) * 1.0]
        weight = torch.nn.Parameter(weights[rank].to(CUDA))
        for gathers in (False, True):
            x = given[0 if not gathers else rank].view(4, 6).to(CUDA).requires_grad_()
            layer = runtime.linear.Linear(weight, group, gathers=gathers, reduces=not gathers)
            deferred = runtime.linear.DeferredWeightGrads()
            y = runtime.linear.deferred_linear(x, None, layer, deferred)
            y.square().sum().backward()
            deferred.accumulate_all()
            made.append(x.grad * 1.0)
        return [one.detach().cpu() for one in (*made, weight.grad)]

    found = run_on(World(2, order, 0), program)
    for rank in range(2):
        mine = torch.cat([one[:, rank : rank + 1] for one in given])
        torch.testing.assert_close(found[rank][0], 3 * mine + 3)
        one, every = given[0].view(4, 6), torch.cat([x.view(4, 6) for x in given])
        one_grad, every_grad = (
            sum(2 * x @ weight.T @ weight for weight in weights) for x in (one, every)
        )
        torch.testing.assert_close(found[rank][1], one_grad)
        torch.testing.assert_close(found[rank][2], every_grad[4 * rank : 4 * rank + 4])
        own = sum(2 * (x @ weights[rank].T).T @ x for x in (one, every))
        torch.testing.assert_close(found[rank][3], own)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_exchanges_within_a_layer(order: Order) -> None:
    exchange(order)


def test_a_copy_to_the_device_comes_from_pinned_memory() -> None:
    """All that is made on the host goes this way: the host does not wait for the copy."""

    def program(copied: Callable[[torch.Tensor], torch.Tensor]) -> int:
        assert torch.equal(copied(torch.arange(3)).cpu(), torch.arange(3))
        made, before = copied(torch.arange(3)), HERE.world.count
        del made
        return before

    def of(copied: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        return run_on(World(1, LATE, 0), lambda rank: program(copied))

    pinned = of(lambda tensor: varlen.on_device(tensor, CUDA))
    assert of(lambda tensor: tensor.to(CUDA, non_blocking=True))[0] > pinned[0]


# ------------------------------------------------------------------ what stands still

LATE = next(order for order in ORDERS if order.name == "late")


def test_links_that_first_speak_out_of_order_stand_still() -> None:
    """Every rank first speaks with the one before it: all wait for rank 0, which waits for the
    next."""
    case = drawn_case(1)

    def backwards(groups: Any, stage: int, stages: int, device: Any, ranks: Any, _: Any) -> None:
        tensor = torch.zeros(1, device=device)
        for group in groups.values():
            source = (stage - 1) % stages
            torch.distributed.irecv(tensor, group=group, group_src=ranks[source])
            torch.distributed.isend(tensor, group=group, group_dst=ranks[(stage + 1) % stages])

    other = types.SimpleNamespace(**{**vars(link), "connect": backwards})
    with pytest.raises(Stuck, match=r"waits for .*communicator"):
        execute(case, LATE, Runtime(link=other))
