#!/usr/bin/env python3
"""Elastic pipelines beside torch's own schedules and Megatron's, on gloo processes that sleep.

    scripts/bench/peers.py --state peers.jsonl [--cells 4096x32x2 ...] [--rounds 5] [-o RESULT.md]

A cell is a context, the documents of a batch, and pipeline stages. Every op sleeps the seconds that
the cost model predicts for it, scaled so that a step of `epp` takes --step-seconds; messages,
autograd graphs and orders are real, so that two cores stand for as many devices as there are
stages. In turn and in changing order, --rounds times:

    torch 1f1b, interleaved, zb (InterleavedZeroBubble), zbv (ZBVZeroBubble)
                    torch.distributed.pipelining's, a document or a packed sequence each
                    micro-batch (docs, packed); the last three with two stages a rank
    megatron 1f1b   forward_backward_pipelining_without_interleaving, a document each, shapes by
                    handshake
    packing, packing-best, whole, epp
                    by this project's executor; whole: epp's plans with no document cut;
                    packing to the context, within no memory budget; the others within what packing
                    then holds

Results of each cell are appended to --state, and a run that was stopped goes on after them. A row
of the table is a variant: tokens per second, its ratio to packing-best round by round (median,
least and most), and the most tokens x layers between forward and backward on a rank. `bound` is the
most that any plan of whole or cut documents can gain on packing-best under the cost model. torch's
schedules take micro-batches of one shape, so theirs are padded to the longest; nothing is computed
for padding.
"""

import argparse
import dataclasses
import json
import os
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
from headline import ROOT, heading, host, write

sys.path.insert(0, str(ROOT))

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.analytic import without_states
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import Chunk, Kind, Plan, Span, Table
from megatron_epp.planner import PLANNERS, STOCK, Options, PlannedReplica
from megatron_epp.planner.choose.choice import placed_cost

CELLS = tuple(
    f"{context}x{documents}x{stages}"
    for stages in (2, 4)
    for context in (4096, 16384, 32768)
    for documents in (8, 32, 128)
)
WIDTH = 8  # channels of a message
TORCH = {"1f1b": None, "interleaved": "interleaved 2", "zb": "interleaved 2", "zbv": "v"}
SPLIT = ("zb", "zbv")
AMPLE = 1e15  # bytes
HALVES = (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
Seconds = dict[Kind, np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one variant does in a step.

    plan      of the project's executor; None: of others
    chunks    tokens of every micro-batch or chunk
    layers    of every stage
    seconds   [stage, chunk] that F, I and W sleep
    """

    name: str
    plan: Plan | None
    chunks: tuple[int, ...]
    layers: tuple[int, ...]
    seconds: Seconds

    def scaled(self, factor: float) -> "Work":
        """With so many times the seconds."""
        seconds = {kind: grid * factor for kind, grid in self.seconds.items()}
        return dataclasses.replace(self, seconds=seconds)


# ------------------------------------------------------------------ inside the processes


def sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def layer_of(work: Work, stage: int) -> Any:
    """The module of a stage: x + w, whose halves of the backward sleep on paths of their own."""

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
            self.chunk = 0

        def forward(self, x: Any) -> Any:
            forward, back, later = (float(work.seconds[kind][stage, self.chunk]) for kind in HALVES)
            return Sleeping.apply(x, forward, back) + Sleeping.apply(self.weight, 0.0, later)

    return Stage()


class Held:
    """Tokens x layers between forward and backward on this rank, the most of a step."""

    def __init__(self, work: Work):
        self.work, self.now, self.most = work, 0, 0

    def take(self, chunk: int, stage: int) -> None:
        self.now += self.work.chunks[chunk] * self.work.layers[stage]
        self.most = max(self.most, self.now)

    def give(self, chunk: int, stage: int) -> None:
        self.now -= self.work.chunks[chunk] * self.work.layers[stage]


class Slept:
    """The executor's side of one stage, in the place of a model."""

    def __init__(self, work: Work, stage: int, held: Held):
        self.work, self.stage, self.held = work, stage, held
        self.layer = layer_of(work, stage)
        self.graphs: dict[int, tuple[Any, Any]] = {}
        self.last = stage == work.plan.stages - 1 if work.plan else False

    def forward(self, chunk: int, received: Any) -> Any:
        self.held.take(chunk, self.stage)
        if received is None:
            received = torch.zeros(self.work.chunks[chunk], WIDTH)
        x = received.detach().requires_grad_()
        self.layer.chunk = chunk
        y = self.layer(x)
        self.graphs[chunk] = x, y
        return None if self.last else y.detach()

    def _gradient(self, chunk: int, gradient: Any) -> Any:
        return torch.ones_like(self.graphs[chunk][1]) if gradient is None else gradient

    def backward(self, chunk: int, gradient: Any) -> Any:
        gradient = self._gradient(chunk, gradient)
        x, y = self.graphs.pop(chunk)
        y.backward(gradient)
        self.held.give(chunk, self.stage)
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
        self.held.give(chunk, self.stage)

    def head(self, chunk: int, received: Any) -> Any:
        raise AssertionError("no plan here has H")

    head_weight = abandon = head  # type: ignore[assignment]


def executor_step(work: Work, rank: int, groups: Any) -> Callable[[], int]:
    from megatron_epp.ir import lower
    from megatron_epp.runtime.clock import HostClock
    from megatron_epp.runtime.executor import CurrentOp, Executor
    from megatron_epp.runtime.kv_store import Store
    from megatron_epp.runtime.link import Links
    from megatron_epp.runtime.memory_meter import NoMeter

    plan = work.plan
    assert plan is not None and not plan.place
    program = lower(plan)[rank]
    shape = lambda message: (work.chunks[message.chunk], WIDTH)  # noqa: E731

    def step() -> int:
        held = Held(work)
        clock = HostClock()
        clock.start()
        links = Links(groups, shape, torch.float32, torch.device("cpu"))
        compute = Slept(work, rank, held)
        Executor(program, compute, links, Store({}), clock, NoMeter(), CurrentOp(rank)).run()
        return held.most

    return step


def torch_step(work: Work, rank: int, ranks: int, name: str) -> Callable[[], int]:
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    place = {None: range(ranks), "interleaved 2": [*range(ranks)] * 2}.get(
        TORCH[name], [*range(ranks), *reversed(range(ranks))]
    )
    mine = [stage for stage, at in enumerate(place) if at == rank]
    rows = max(work.chunks)
    held = Held(work)

    class Stage(pipelining.PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list:
            return []  # it makes NCCL's communicators; gloo sends nothing to the same rank

        def forward_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
            self.submod.chunk = chunk
            held.take(chunk, self.stage_index)
            return super().forward_one_chunk(chunk, *args, **named)

        def backward_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
            found = super().backward_one_chunk(chunk, *args, **named)
            if named.get("full_backward", True):
                held.give(chunk, self.stage_index)
            return found

        def backward_weight_one_chunk(self, chunk: int, *args: Any, **named: Any) -> Any:
            found = super().backward_weight_one_chunk(chunk, *args, **named)
            held.give(chunk, self.stage_index)
            return found

    x = torch.zeros(rows, WIDTH)
    stages = [
        Stage(layer_of(work, stage), stage, len(place), torch.device("cpu"), x, x) for stage in mine
    ]
    kind = {
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }[name]
    count = len(work.chunks)
    loss = lambda output, target: output.sum()  # noqa: E731
    given: Any = stages[0] if name == "1f1b" else stages
    schedule = kind(given, count, loss_fn=loss, scale_grads=False)
    first, last = 0 in mine, len(place) - 1 in mine
    inputs = torch.zeros(count * rows, WIDTH, requires_grad=True)

    def step() -> int:
        held.now = held.most = 0
        named = {"target": torch.zeros(count)} if last else {}
        schedule.step(*([inputs] if first else []), **named)
        return held.most

    return step


def megatron_step(work: Work, rank: int, ranks: int) -> Callable[[], int]:
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
    held = Held(work)

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
            self.layer.chunk = chunk
            return self.layer(rows)

    model = Model()

    def forward_step(iterator: Any, model: Any, *args: Any) -> Any:
        chunk = next(iterator)
        held.take(chunk, rank)
        output = model(chunk)
        output.register_hook(lambda gradient: held.give(chunk, rank))
        return output, lambda out: (out.sum(), {"loss": 0.0})

    def step() -> int:
        held.now = held.most = 0
        schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter(range(len(work.chunks))),
            model=[model],
            num_microbatches=len(work.chunks),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        return held.most

    return step


def process(rank: int, ranks: int, folder: str, rounds: Sequence[int]) -> None:
    """One rank: every variant of the cell, in turn, ``rounds`` times."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_epp.ir import Payload
    from megatron_epp.runtime.link import connect

    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)
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
            held = steps[at]()
            dist.barrier()
            seconds = time.perf_counter() - began
            every: list[Any] = [None] * ranks
            dist.all_gather_object(every, held)
            if rank == 0:
                found = {"round": number, "variant": works[at].name, "seconds": seconds}
                with (Path(folder) / "results").open("a") as file:
                    file.write(json.dumps(found | {"held": max(every)}) + "\n")
    dist.barrier()


# ------------------------------------------------------------------ outside


def cost_of(arguments: argparse.Namespace, stages: int) -> Cost:
    """The cost of one replica, its model states left out: a budget is of activations."""
    cost = named_cost(
        arguments.model, arguments.device, pp=stages, tp=arguments.tp, zero=1, topology="nodes"
    )
    profile = without_states(cost.layout.profile)
    return cost.replace(profile=profile, device_budget_bytes=(AMPLE,) * stages)


def sleeps(table: Table, split: bool) -> Seconds:
    """Return what every op of ``table`` sleeps, recompute included.

    Where no backward is ``split``, the two halves that autograd runs add up to a whole one.
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
    """The work of a plan of this project."""
    plan = found.plan
    split = any(op.kind is Kind.WEIGHT for order in plan.orders for op in order)
    tokens = tuple(chunk.tokens for chunk in plan.chunks)
    return Work(name, plan, tokens, plan.layers, sleeps(cost.table(plan), split))


def given_work(
    name: str,
    micro_batches: Sequence[Sequence[int]],
    lengths: Sequence[int],
    cost: Cost,
    split: bool,
) -> Work:
    """The work of another's schedule over micro-batches of whole documents."""
    chunks = [Chunk(tuple(Span(d, 0, lengths[d]) for d in held)) for held in micro_batches]
    table = cost.table_of(cost.loads(chunks, lengths), {})
    tokens = tuple(sum(lengths[d] for d in held) for held in micro_batches)
    return Work(name, None, tokens, cost.layout.layers, sleeps(table, split))


def works_of(
    arguments: argparse.Namespace, context: int, documents: int, stages: int
) -> tuple[list[Work], dict[str, float]]:
    """Every variant of a cell; what the simulator says of ours, and the lower bound."""
    lengths = open_corpus(arguments.lengths, context).batch(arguments.batch, documents)
    ample = cost_of(arguments, stages)
    options = Options(context=context)
    packing = PLANNERS["packing"](lengths, ample, options)
    within = ample.replace(device_budget_bytes=tuple(map(float, packing.peak_bytes)))
    found = {"packing": packing, STOCK: PLANNERS[STOCK](lengths, within, options)}
    found["whole"] = PLANNERS["epp"](lengths, within, dataclasses.replace(options, whole=True))
    found["epp"] = PLANNERS["epp"](lengths, within, options)
    works = [planned_work(name, each, within) for name, each in found.items()]
    single = [(d,) for d in range(documents)]
    packed = [tuple(span.document for span in chunk.spans) for chunk in found[STOCK].plan.chunks]
    for name, placement in TORCH.items():
        cost = ample if placement is None else placed_cost(ample, placement)
        assert cost is not None, "there are more layers than stages"
        for kind, micro_batches in (("docs", single), ("packed", packed)):
            if takes(name, len(micro_batches), stages):
                words = f"torch {name} {kind}", micro_batches, lengths, cost, name in SPLIT
                works.append(given_work(*words))
    works.append(given_work("megatron 1f1b docs", single, lengths, ample, False))
    predicted = {name: each.seconds for name, each in found.items()}
    predicted["bound"] = found["epp"].lower_bound_seconds
    predicted["tokens"] = float(sum(lengths))
    return works, predicted


def takes(name: str, micro_batches: int, ranks: int) -> bool:
    """Whether torch's schedule runs so many micro-batches."""
    if name in ("interleaved", "zb"):  # in rounds of the ranks
        return micro_batches >= ranks and micro_batches % max(1, micro_batches // ranks) == 0
    return name != "zbv" or micro_batches >= 2 * ranks


def run_cell(arguments: argparse.Namespace, cell: str, done: Sequence[dict]) -> list[dict]:
    """The results of the rounds of ``cell`` that ``done`` lacks."""
    context, documents, stages = map(int, cell.split("x"))
    works, predicted = works_of(arguments, context, documents, stages)
    had = {number for number in range(arguments.rounds) if has_round(done, cell, number, works)}
    missing = [number for number in range(arguments.rounds) if number not in had]
    if not missing:
        return []
    factor = arguments.step_seconds / predicted["epp"]
    works = [work.scaled(factor) for work in works]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        (Path(folder) / "works").write_bytes(pickle.dumps(works))
        # The first step of each warms up: sockets, allocator, torch's buffers.
        torch.multiprocessing.spawn(process, (stages, folder, [-1, *missing]), nprocs=stages)
        lines = (Path(folder) / "results").read_text().splitlines()
    results = [{"cell": cell, "factor": factor, **predicted, **json.loads(line)} for line in lines]
    return [each for each in results if each["round"] >= 0]


def has_round(done: Sequence[dict], cell: str, number: int, works: Sequence[Work]) -> bool:
    names = {each["variant"] for each in done if (each["cell"], each["round"]) == (cell, number)}
    return names >= {work.name for work in works}


HEADERS = ("variant", "tokens/s", "ratio", "least", "most", "held", "predicted")


def table_of(cell: str, results: Sequence[dict]) -> list[list[str]]:
    """Rows of a cell, the fastest first."""
    by_variant: dict[str, dict[int, dict]] = {}
    for each in results:
        by_variant.setdefault(each["variant"], {})[each["round"]] = each
    stock = by_variant[STOCK]
    rows = []
    for name, rounds in by_variant.items():
        both = rounds.keys() & stock.keys()
        ratios = sorted(stock[number]["seconds"] / rounds[number]["seconds"] for number in both)
        first = next(iter(rounds.values()))
        rate = statistics.median(e["tokens"] * e["factor"] / e["seconds"] for e in rounds.values())
        held = max(e["held"] for e in rounds.values()) / max(e["held"] for e in stock.values())
        said = f"{first[STOCK] / first[name]:.2f}" if name in first else ""
        numbers = statistics.median(ratios), ratios[0], ratios[-1], held
        rows.append([name, f"{rate:.0f}", *(f"{number:.2f}" for number in numbers), said])
    return sorted(rows, key=lambda row: -float(row[2]))


def title(cell: str, results: Sequence[dict]) -> str:
    context, documents, stages = cell.split("x")
    first = next(each for each in results if each["cell"] == cell)
    bound = first[STOCK] / first["bound"]
    return (
        f"{int(context) // 1024}K, {documents} documents, {stages} stages: bound {bound:.2f} "
        f"(simulated), {len({each['round'] for each in results if each['cell'] == cell})} rounds"
    )


LEGEND = f"""\
tokens/s: of the unscaled step. ratio: seconds of {STOCK} over this row's, round by round, median,
least and most. held: the most tokens x layers between forward and backward on a rank, over those of
{STOCK}.
predicted: the ratio by simulation."""


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

    from megatron_epp.show.table import markdown, text_table

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
        rows = table_of(cell, of_cell)
        print(f"\n{title(cell, results)}\n{text_table(HEADERS, rows)}", flush=True)
        text += f"{title(cell, results)}\n\n{markdown(HEADERS, rows)}\n\n"
    print(LEGEND)
    settings = f"{arguments.model} on {arguments.device}, tp {arguments.tp}, {arguments.lengths}"
    write(arguments.output, f"{heading(f'{host()}; {settings}')}{text}{LEGEND}\n\n")


if __name__ == "__main__":
    main()
