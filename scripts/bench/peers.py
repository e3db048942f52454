#!/usr/bin/env python3
"""Elastic pipelines compared with torch's and Megatron's schedules, on gloo processes.

    scripts/bench/peers.py --state peers.jsonl [--cells 4096x32x2 ...] [--rounds 5] [-o RESULT.md]

A cell is a context, the number of documents of a batch, and a number of pipeline stages. Every op
sleeps for the seconds that the cost model predicts, scaled so that a step of `epp` takes
--step-seconds. Messages, autograd graphs and orders are real, so two cores can stand for as many
devices as there are stages. Each round runs these variants, in another order:

    torch 1f1b, interleaved, zb (InterleavedZeroBubble), zbv (ZBVZeroBubble)
                    schedules of torch.distributed.pipelining; a micro-batch is a document (docs)
                    or a packed sequence (packed); the last three have two stages per rank
    megatron 1f1b   forward_backward_pipelining_without_interleaving; a micro-batch is a
                    document, shapes by handshake
    packing, packing-best, epp, epp v
                    plans in this project's executor. v: two stages per rank, in a V. packing packs
                    to the context without a memory budget; the budget of the others is the memory
                    of packing's fullest rank. ample: without a budget, like torch's and Megatron's
                    schedules

Results of each cell are appended to --state, and an interrupted run continues after them. A row of
the table is a variant: tokens per second, its ratio to packing-best by round (median, minimum and
maximum), and the memory of the fullest rank, simulated with the orders that ran. `bound` is the
largest gain over packing-best that any plan of unsliced or sliced documents can have under the cost
model. torch's schedules take micro-batches of one shape, so micro-batches are padded to the
longest; padding takes no compute time.
"""

import argparse
import dataclasses
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from headline import ROOT, heading, host, markdown, write
from pipeline_ranks import join_pipeline
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

sys.path.insert(0, str(ROOT))

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.analytic import without_states
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import KEEP, KIND_CODE, Chunk, Kind, Plan, Span, Table
from megatron_epp.planner.choose.choice import placed_cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.order.emit import orders_of_ranks
from megatron_epp.planner.registry import PLANNERS
from megatron_epp.planner.result import PlannedReplica
from megatron_epp.sim.play import play

CELLS = tuple(
    f"{context}x{documents}x{stages}"
    for stages in (2, 4)
    for context in (4096, 16384, 32768)
    for documents in (8, 32, 128)
)
PACKED = "packing-best"  # the baseline
WIDTH = 8  # channels of a message
SPLIT = ("zb", "zbv")
AMPLE = 1e15  # bytes
HALVES = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
Seconds = dict[Kind, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Ops and durations of one variant in a step.

    plan      plan for this project's executor; None for other schedules
    chunks    tokens of every micro-batch or chunk
    seconds   [stage, chunk] seconds for which F, I and W sleep
    """

    name: str
    plan: Plan | None
    chunks: tuple[int, ...]
    seconds: Seconds

    def scaled(self, factor: float) -> "Work":
        """Return the work with all seconds multiplied by ``factor``."""
        seconds = {kind: grid * factor for kind, grid in self.seconds.items()}
        return dataclasses.replace(self, seconds=seconds)


# ------------------------------------------------------------------ inside the processes

# By name: torch's schedule, and how stages lie on ranks (planner.choose); None: one a rank.
SCHEDULES: dict[str, tuple[type, str | None]] = {
    "1f1b": (torch_schedules.Schedule1F1B, None),
    "interleaved": (torch_schedules.ScheduleInterleaved1F1B, "interleaved 2"),
    "zb": (torch_schedules.ScheduleInterleavedZeroBubble, "interleaved 2"),
    "zbv": (torch_schedules.ScheduleZBVZeroBubble, "v"),
}


def rank_of_stages(name: str, ranks: int) -> list[int]:
    """Return the rank of every stage in the schedule ``name``."""
    in_turn = [*range(ranks)]
    return in_turn + {None: [], "interleaved 2": in_turn, "v": in_turn[::-1]}[SCHEDULES[name][1]]


def make_schedule(name: str, stages: Sequence[Any], micro_batches: int, loss: Callable) -> Any:
    """Return the schedule ``name`` for this rank's ``stages``; ``loss`` is not scaled."""
    given = stages if SCHEDULES[name][1] else stages[0]
    return SCHEDULES[name][0](given, micro_batches, loss_fn=loss, scale_grads=False)


class GlooStage(pipelining.PipelineStage):
    """Stage that sets ``number`` of its module to the micro-batch that it computes."""

    def _get_init_p2p_neighbors_ops(self) -> list:
        return []  # it makes NCCL's communicators; gloo sends nothing to the same rank

    def forward_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
        self.submod.number = chunk
        return super().forward_one_chunk(chunk, *args, **named)


def sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def layer_of(work: Work, stage: int) -> Any:
    """Return a stage's module x + w; the gradients of x and w sleep separately."""

    class Sleeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any, seconds: float, later: float) -> Any:
            ctx.later = later
            sleep(seconds)
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            sleep(ctx.later)
            return gradients[0].contiguous(), None, None

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(WIDTH))
            self.number = 0

        def forward(self, x: Any) -> Any:
            forward, back, later = (
                float(work.seconds[kind][stage, self.number]) for kind in HALVES
            )
            return Sleeping.apply(x, forward, back) + Sleeping.apply(self.weight, 0.0, later)

    return Stage()


# An op that ran: kind, chunk, stage.
Ran = tuple[str, int, int]


class Slept:
    """Compute interface of one stage for the executor; ops sleep instead of running a model."""

    def __init__(self, work: Work, stage: int):
        self.work, self.stage = work, stage
        self.layer = layer_of(work, stage)
        self.graphs: dict[int, tuple[Any, Any]] = {}
        self.last = stage == work.plan.stages - 1 if work.plan else False

    def forward(self, chunk: int, received: Any) -> Any:
        if received is None:
            received = torch.zeros(self.work.chunks[chunk], WIDTH)
        x = received.detach().requires_grad_()
        self.layer.number = chunk
        y = self.layer(x)
        self.graphs[chunk] = x, y
        return None if self.last else y.detach()

    def _gradient(self, chunk: int, gradient: Any) -> Any:
        return torch.ones_like(self.graphs[chunk][1]) if gradient is None else gradient

    def backward(self, chunk: int, gradient: Any) -> Any:
        gradient = self._gradient(chunk, gradient)
        x, y = self.graphs.pop(chunk)
        y.backward(gradient)
        return x.grad if self.stage else None

    def input_backward(self, chunk: int, gradient: Any) -> Any:
        gradient = self._gradient(chunk, gradient)
        x, y = self.graphs[chunk]
        (found,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        self.graphs[chunk] = gradient, y
        return found if self.stage else None

    def weight_backward(self, chunk: int) -> None:
        gradient, y = self.graphs.pop(chunk)
        torch.autograd.backward(y, gradient, inputs=[self.layer.weight])

    def head(self, chunk: int, received: Any) -> Any:
        raise AssertionError("no plan here has H")

    head_weight = abandon = head  # type: ignore[assignment]


def executor_step(work: Work, rank: int, groups: Any) -> Callable[[], list[Ran]]:
    from megatron_epp.ir import lower
    from megatron_epp.runtime.clock import HostClock
    from megatron_epp.runtime.executor import CurrentOp, Executor
    from megatron_epp.runtime.kv_store import StageStores, Store
    from megatron_epp.runtime.link import Links
    from megatron_epp.runtime.memory_meter import NoMeter

    plan = work.plan
    assert plan is not None
    program, place = lower(plan)[rank], plan.place or range(plan.stages)
    mine = [stage for stage, at in enumerate(place) if at == rank]
    shape = lambda message: (work.chunks[message.chunk], WIDTH)  # noqa: E731

    def step() -> list[Ran]:
        clock = HostClock()
        clock.start()
        links = Links(groups, shape, torch.float32, torch.device("cpu"))
        compute: Any = {stage: Slept(work, stage) for stage in mine}
        store = StageStores([Store({}) for _ in mine])
        if not plan.place:
            compute = compute[rank]
        Executor(program, compute, links, store, clock, NoMeter(), CurrentOp(rank)).run()
        return []  # the plan is known

    return step


def torch_step(work: Work, rank: int, ranks: int, name: str) -> Callable[[], list[Ran]]:
    place = rank_of_stages(name, ranks)
    mine = [stage for stage, at in enumerate(place) if at == rank]
    rows = max(work.chunks)
    ran: list[Ran] = []

    class Stage(GlooStage):
        def forward_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
            ran.append(("F", chunk, self.stage_index))
            return super().forward_one_chunk(chunk, *args, **named)

        def backward_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
            kind = "B" if named.get("full_backward", True) else "I"
            ran.append((kind, chunk, self.stage_index))
            return super().backward_one_chunk(chunk, *args, **named)

        def backward_weight_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
            ran.append(("W", chunk, self.stage_index))
            return super().backward_weight_one_chunk(chunk, *args, **named)

    x = torch.zeros(rows, WIDTH)
    stages = [
        Stage(layer_of(work, stage), stage, len(place), torch.device("cpu"), x, x) for stage in mine
    ]
    count = len(work.chunks)
    schedule = make_schedule(name, stages, count, lambda output, target: output.sum())
    first, last = 0 in mine, len(place) - 1 in mine
    inputs = torch.zeros(count * rows, WIDTH, requires_grad=True)

    def step() -> list[Ran]:
        ran.clear()
        named = {"target": torch.zeros(count)} if last else {}
        schedule.step(*([inputs] if first else []), **named)
        return list(ran)

    return step


def megatron_step(work: Work, rank: int, ranks: int) -> Callable[[], list[Ran]]:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules

    config = ModelParallelConfig(
        pipeline_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        deallocate_pipeline_outputs=False,
    )
    config.hidden_size = WIDTH  # type: ignore[attr-defined]
    config.timers = None
    layer = layer_of(work, rank)
    ran: list[Ran] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.config = layer, config
            self.input: Any = None

        def set_input_tensor(self, tensors: Any) -> None:
            self.input = tensors[0] if isinstance(tensors, list) else tensors

        def forward(self, chunk: int) -> Any:
            rows = self.input
            if rows is None:
                rows = torch.zeros(work.chunks[chunk], 1, WIDTH, requires_grad=True)
            self.layer.number = chunk
            return self.layer(rows)

    model = Model()

    def forward_step(iterator: Any, model: Any, *args: Any) -> Any:
        chunk = next(iterator)
        ran.append(("F", chunk, rank))
        output = model(chunk)
        output.register_hook(lambda gradient: ran.append(("B", chunk, rank)))
        return output, lambda out: (out.sum(), {"loss": 0.0})

    def step() -> list[Ran]:
        ran.clear()
        schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(work.chunks))),
            model=[model],
            num_microbatches=len(work.chunks),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        return list(ran)

    return step


def process(rank: int, ranks: int, folder: str, rounds: Sequence[int]) -> None:
    """Run one rank: every variant of the cell in turn, in each of ``rounds``."""
    join_pipeline(rank, ranks, folder)
    import torch.distributed as dist

    from megatron_epp.ir import Payload
    from megatron_epp.runtime.link import connect

    groups = {payload: dist.new_group() for payload in Payload}
    connect(groups, rank, ranks, torch.device("cpu"))
    works: list[Work] = pickle.loads((Path(folder) / "works").read_bytes())
    steps = []
    for work in works:
        kind, _, rest = work.name.partition(" ")
        if kind == "torch":
            steps.append(torch_step(work, rank, ranks, rest.split()[0]))
        elif kind == "megatron":
            steps.append(megatron_step(work, rank, ranks))
        else:
            steps.append(executor_step(work, rank, groups))
    for number in rounds:
        for turn in range(len(works)):
            at = (number + turn) % len(works)
            dist.barrier()
            began = time.perf_counter()
            ran = steps[at]()
            dist.barrier()
            seconds = time.perf_counter() - began
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, ran)
            if rank == 0:
                found = {"round": number, "variant": works[at].name, "seconds": seconds}
                with (Path(folder) / "results").open("a") as file:
                    file.write(json.dumps(found | {"ran": every}) + "\n")
    dist.barrier()


# ------------------------------------------------------------------ outside


def cost_of(arguments: argparse.Namespace, stages: int) -> Cost:
    """Return the cost model of one replica without model states: budgets are for activations."""
    cost = named_cost(
        arguments.model, arguments.device, pp=stages, tp=arguments.tp, zero=1, topology="nodes"
    )
    profile = without_states(cost.layout.profile)
    return cost.replace(profile=profile, device_budget_bytes=(AMPLE,) * stages)


def sleeps(table: Table, split: bool) -> Seconds:
    """Return the seconds that every op of ``table`` sleeps, with recompute included.

    If backwards are not ``split``, autograd still runs both halves, whose times add up to that of a
    whole backward.
    """
    seconds = {kind: np.array(table.seconds[kind]) for kind in HALVES}
    again = np.array(table.recompute_seconds)
    seconds[Kind.INPUT] = seconds[Kind.INPUT] + again
    if not split:
        whole = np.array(table.seconds[Kind.BACKWARD]) + again
        factor = whole / (seconds[Kind.INPUT] + seconds[Kind.WEIGHT])
        seconds[Kind.INPUT], seconds[Kind.WEIGHT] = (
            seconds[kind] * factor for kind in (Kind.INPUT, Kind.WEIGHT)
        )
    return seconds


def planned_work(name: str, found: PlannedReplica, cost: Cost) -> Work:
    """Return the work of a plan of this project."""
    plan = found.plan
    split = any(op.kind is Kind.WEIGHT for order in plan.orders for op in order)
    tokens = tuple(chunk.tokens for chunk in plan.chunks)
    return Work(name, plan, tokens, sleeps(cost.table(plan), split))


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """Schedule of torch or Megatron with unsliced documents; ``split``: with I and W."""

    name: str
    micro_batches: Sequence[Sequence[int]]
    lengths: Sequence[int]
    cost: Cost
    split: bool = False

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(
            Chunk(tuple(Span(d, 0, self.lengths[d]) for d in held)) for held in self.micro_batches
        )

    @property
    def work(self) -> Work:
        table = self.cost.table_of(self.cost.loads(self.chunks, self.lengths), {})
        tokens = tuple(chunk.tokens for chunk in self.chunks)
        return Work(self.name, None, tokens, sleeps(table, self.split))

    def played(self, ran: Sequence[Sequence[Sequence]]) -> dict[str, float]:
        """Return simulated seconds and peak bytes of the ops that ran on every rank."""
        layout = self.cost.layout
        if (
            layout.place and layout.place[0]
        ):  # the project's V begins on the last rank, torch's on 0
            ran = ran[::-1]
        codes = [[(KIND_CODE[Kind(kind)], c, s) for kind, c, s in of_rank] for of_rank in ran]
        orders, turns = orders_of_ranks(codes, layout.stages)
        keep = tuple(tuple(KEEP * layers for _ in self.chunks) for layers in layout.layers)
        placed = {"place": layout.place, "turns": turns} if layout.place else {}
        plan = Plan(
            documents=tuple(self.lengths),
            layers=layout.layers,
            chunks=self.chunks,
            recompute=keep,
            orders=orders,
            **placed,
        )
        simulated = play(plan, self.cost.table(plan))
        return {"simulated": simulated.seconds, "peak": float(max(simulated.peak_bytes))}


@dataclasses.dataclass(frozen=True, slots=True)
class Variants:
    """All variants of a cell: their work, and simulated seconds and peaks.

    ``bound`` is a lower bound in seconds for all plans; ``tokens`` is the number of tokens of the
    batch.
    """

    works: list[Work]
    given: dict[str, Given]
    planned: dict[str, dict[str, float]]
    bound: float
    tokens: int


def variants_of(
    arguments: argparse.Namespace, context: int, documents: int, stages: int
) -> Variants:
    """Return the variants of a cell."""
    lengths = open_corpus(arguments.lengths, context).batch(arguments.batch, documents)
    ample = cost_of(arguments, stages)
    options = Options(context=context)
    packing = PLANNERS["packing"](lengths, ample, options)
    # Memory is alike on all ranks.
    budget = float(max(packing.peak_bytes))
    costs = {"": ample.replace(device_budget_bytes=(budget,) * stages), " ample": ample}
    found = {"packing": (packing, ample)}
    found[PACKED] = PLANNERS[PACKED](lengths, costs[""], options), costs[""]
    for memory, even in costs.items():
        in_v = placed_cost(even, "v")
        assert in_v is not None, "there are more layers than stages"
        for name, cost in (("epp", even), ("epp v", in_v)):
            found[name + memory] = PLANNERS["epp"](lengths, cost, options), cost
    works = [planned_work(name, *each) for name, each in found.items()]
    single = [(d,) for d in range(documents)]
    packed = [
        tuple(span.document for span in chunk.spans) for chunk in found[PACKED][0].plan.chunks
    ]
    given = [Given("megatron 1f1b docs", single, lengths, ample)]
    for name, (_, placement) in SCHEDULES.items():
        cost = ample if placement is None else placed_cost(ample, placement)
        assert cost is not None, "there are more layers than stages"
        given += [
            Given(f"torch {name} {kind}", micro_batches, lengths, cost, name in SPLIT)
            for kind, micro_batches in (("docs", single), ("packed", packed))
            if takes(name, len(micro_batches), stages)
        ]
    return Variants(
        works + [each.work for each in given],
        {each.name: each for each in given},
        {
            name: {"simulated": each.seconds, "peak": float(max(each.peak_bytes))}
            for name, (each, _) in found.items()
        },
        found["epp"][0].lower_bound_seconds,
        sum(lengths),
    )


def takes(name: str, micro_batches: int, ranks: int) -> bool:
    """Return whether torch's schedule ``name`` can run this number of micro-batches."""
    if name in ("interleaved", "zb"):  # in rounds of the ranks
        return micro_batches >= ranks and micro_batches % max(1, micro_batches // ranks) == 0
    return name != "zbv" or micro_batches >= 2 * ranks


def run_cell(arguments: argparse.Namespace, cell: str, done: Sequence[dict]) -> list[dict]:
    """Run the rounds of ``cell`` that are not in ``done``, and return their results."""
    context, documents, stages = degrees_of(cell)
    variants = variants_of(arguments, context, documents, stages)
    works = variants.works
    missing = missing_rounds(arguments, cell, done, {work.name for work in works})
    if not missing:
        return []
    factor = arguments.step_seconds / variants.planned["epp"]["simulated"]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        scaled = [work.scaled(factor) for work in works]
        (Path(folder) / "works").write_bytes(pickle.dumps(scaled))
        # The first step of each warms up: sockets, allocator, torch's buffers.
        torch.multiprocessing.spawn(process, (stages, folder, [-1, *missing]), nprocs=stages)
        lines = (Path(folder) / "results").read_text().splitlines()
    results, played = [], dict(variants.planned)
    for line in lines:
        one = json.loads(line)
        ran, name = one.pop("ran"), one["variant"]
        if name not in played:
            played[name] = variants.given[name].played(ran)
        if one["round"] >= 0:
            facts = {"cell": cell, "factor": factor, "bound": variants.bound}
            results.append(facts | {"tokens": variants.tokens} | one | played[name])
    return results


def degrees_of(cell: str) -> tuple[int, int, int]:
    """Return context, documents and stages of a cell."""
    context, documents, stages = map(int, cell.split("x"))
    return context, documents, stages


def missing_rounds(
    arguments: argparse.Namespace, cell: str, done: Sequence[dict], names: set[str]
) -> list[int]:
    """Return the rounds of ``cell`` in which a variant of ``names`` is not in ``done``."""
    return [
        number
        for number in range(arguments.rounds)
        if not names
        <= {each["variant"] for each in done if (each["cell"], each["round"]) == (cell, number)}
    ]


HEADERS = ("variant", "tokens/s", "ratio", "least", "most", "simulated", "GiB")


def rows_of(results: Sequence[dict]) -> list[list[str]]:
    """Return the table rows of a cell, fastest first."""
    by_variant: dict[str, dict[int, dict]] = {}
    for each in results:
        by_variant.setdefault(each["variant"], {})[each["round"]] = each
    stock = by_variant[PACKED]
    rows = []
    for name, rounds in by_variant.items():
        both = rounds.keys() & stock.keys()
        ratios = sorted(stock[number]["seconds"] / rounds[number]["seconds"] for number in both)
        simulated = statistics.median(
            stock[number]["simulated"] / rounds[number]["simulated"] for number in both
        )
        rate = statistics.median(e["tokens"] * e["factor"] / e["seconds"] for e in rounds.values())
        numbers = [f"{n:.2f}" for n in (statistics.median(ratios), ratios[0], ratios[-1])]
        peak = max(each["peak"] for each in rounds.values()) / GIB
        rows.append([name, f"{rate:.0f}", *numbers, f"{simulated:.2f}", f"{peak:.1f}"])
    return sorted(rows, key=lambda row: -float(row[2]))


def title(results: Sequence[dict]) -> str:
    """Return the title of a cell, with the largest gain that plans can have."""
    cell = results[0]["cell"]
    context, documents, stages = degrees_of(cell)
    stock = [each for each in results if each["variant"] == PACKED]
    bound = statistics.median(each["simulated"] / each["bound"] for each in stock)
    return (
        f"{context // 1024}K, {documents} documents, {stages} stages: bound {bound:.2f} "
        f"(simulated), {len({each['round'] for each in results})} rounds"
    )


LEGEND = f"""\
tokens/s: of the unscaled step. ratio: seconds of {PACKED} over this row's, round by round, median,
least and most; simulated: the same by the simulator. GiB: activations of the fullest rank, by the
simulator, of the order that ran."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--state", type=Path, required=True, help="results of every call, as JSON lines"
    )
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="CONTEXTxDOCUMENTSxSTAGES")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=0, help="number of the batch")
    parser.add_argument("--lengths", default="wlb", help="as of compare")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--device", default="h100-80g")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=2.5, help="that a step of epp sleeps")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    arguments = parser.parse_args()

    from megatron_epp.show.table import text_table

    results: list[dict] = []
    if arguments.state.exists():
        results = [json.loads(line) for line in arguments.state.read_text().splitlines()]
    text = ""
    for cell in arguments.cells:
        found = run_cell(arguments, cell, results)
        with arguments.state.open("a") as file:
            file.writelines(json.dumps(each) + "\n" for each in found)
        results += found
        of_cell = [each for each in results if each["cell"] == cell]
        rows = rows_of(of_cell)
        print(f"\n{title(of_cell)}\n{text_table(HEADERS, rows)}", flush=True)
        text += f"{title(of_cell)}\n\n{markdown(HEADERS, rows)}\n\n"
    print(LEGEND)
    settings = f"{arguments.model} on {arguments.device}, tp {arguments.tp}, {arguments.lengths}"
    write(arguments.output, f"{heading(f'{host()}; {settings}')}{text}{LEGEND}\n\n")


if __name__ == "__main__":
    main()
