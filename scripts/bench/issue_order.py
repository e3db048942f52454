"""Cost of the issue order if ops take longer or shorter than predicted (simulated).

    python scripts/bench/issue_order.py [--batches N] [--seeds N] [-o RESULT.md]

Every rank derives the same sequence from the plan, and issues sends and receives in its order
(ir/program/sequence.py). If real durations differ, a receive may be posted only after its message
is ready, because an op precedes it in the sequence; the message then leaves late. In every row, the
seconds of ops and messages are random, around the cost model's, with the standard deviation in the
first column. At 0% they still differ from those of the sequence, which knows only tokens and
query-key pairs. The table shows how much longer the iteration is than with receives that are always
posted, for the issue order and for receives that are posted when a rank waits for them. It also
shows the mean fraction of compute time during which a message is on the device (sim/resident.py).
"""

import argparse
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from headline import ROOT, publish

sys.path.insert(0, str(ROOT))

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import BACKWARDS, Kind, Message, Op, Plan, Post, Program, Table, lower
from megatron_epp.planner import Options
from megatron_epp.planner.registry import COMPARED, PLANNERS
from megatron_epp.show.table import markdown
from megatron_epp.sim.resident import extra_ratio

NOISES = (0.0, 0.05, 0.10, 0.20)
SETUPS = (
    # model, device, parallel degrees, context, documents, lengths
    ("gpt-13b", "a100-80g", {"pp": 4, "cp": 8}, 98304, 128, "wlb"),
    ("llama3-8b", "h100-80g", {"pp": 8, "cp": 4}, 65536, 128, "wlb"),
    ("llama3-8b", "h100-80g", {"pp": 4, "tp": 4}, 32768, 128, "wikipedia"),
    ("llama3-70b", "h200-141g", {"pp": 16, "tp": 8}, 65536, 64, "prolong"),
)
LEAST = 0.1  # of its own seconds that an op takes at least, whatever is drawn

Draw = Callable[[], float]


def seconds_of(plan: Plan, table: Table, draw: Draw) -> tuple[dict, dict]:
    """Return random seconds of every (stage, op), and of every message on its link."""
    ops, messages = {}, {}
    for stage, program in enumerate(lower(plan)):
        for op in program:
            if isinstance(op, Op):
                alone = float(table.seconds[op.kind][stage][op.chunk])
                if op.kind in BACKWARDS:
                    alone += float(table.recompute_seconds[stage][op.chunk])
                ops[stage, op] = alone * draw()
            elif isinstance(op, Post):
                message = op.message
                link = min(message.link)
                alone = float(table.link_seconds[message.payload][link][message.chunk])
                messages[message] = alone * draw()
    return ops, messages


def play(
    programs: Sequence[Program], ops: dict, messages: dict, latency: float, posted: str
) -> tuple[float, float]:
    """Return the iteration's seconds, and the fraction of compute time with messages on devices.

    ``posted`` says when receives are posted: "always", "in order" or "when waited for". A message
    leaves when it is ready, its receive is posted, and earlier messages on its link have left. With
    "in order", a receive is posted when the op before it ends.
    """
    at, free = [0] * len(programs), [0.0] * len(programs)
    busy: list[list[tuple[float, float]]] = [[] for _ in programs]
    ready: dict[Message, float] = {}
    posts: dict[Message, float] = {}
    arrived: dict[Message, float] = {}
    coming: dict[tuple[int, int], deque[Message]] = {}
    link_free: dict[tuple[int, int], float] = {}

    def leave(link: tuple[int, int]) -> None:
        while coming[link] and coming[link][0] in ready and coming[link][0] in posts:
            message = coming[link].popleft()
            depart = max(ready[message], posts[message], link_free.get(link, 0.0))
            link_free[link] = depart + messages[message]
            arrived[message] = link_free[link] + latency

    for program in programs:
        for op in program:
            if isinstance(op, Post):
                coming.setdefault(op.message.link, deque()).append(op.message)
                if posted == "always":
                    posts[op.message] = 0.0
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            while at[stage] < len(program):
                op = program[at[stage]]
                if isinstance(op, Op):
                    busy[stage].append((free[stage], free[stage] + ops[stage, op]))
                    free[stage] += ops[stage, op]
                elif isinstance(op, Post):
                    if posted == "in order":
                        posts[op.message] = free[stage]
                        leave(op.message.link)
                elif op.kind is Kind.SEND:
                    ready[op.message] = free[stage]
                    leave(op.message.link)
                else:
                    if posted == "when waited for" and op.message not in posts:
                        posts[op.message] = free[stage]
                        leave(op.message.link)
                    if op.message not in arrived:
                        break
                    free[stage] = max(free[stage], arrived[op.message])
                at[stage] += 1
                moved = True
    assert at == list(map(len, programs))
    held: list[list[tuple[float, float]]] = [[] for _ in programs]
    for message, stop in arrived.items():
        source, target = message.link
        held[source].append((ready[message], stop))
        held[target].append((posts[message], stop))
    return max(free), statistics.mean(map(extra_ratio, busy, held))


def losses(plan: Plan, table: Table, noise: float, seeds: int) -> tuple[list[float], ...]:
    """Return, per random draw, the time added to that of receives that are always posted.

    The first list is for receives posted in order, the second for receives posted when waited for,
    both as fractions. Two more lists have the fractions of compute time with messages.
    """
    programs, latency = lower(plan), table.link_latency_seconds
    found: tuple[list[float], ...] = ([], [], [], [])
    for seed in range(seeds if noise else 1):
        random = Random(seed)
        draw = lambda: max(LEAST, random.gauss(1.0, noise))  # noqa: B023, E731
        drawn = seconds_of(plan, table, draw)
        (ideal, _), (ours, beside), (waited, beside_late) = (
            play(programs, *drawn, latency, posted)
            for posted in ("always", "in order", "when waited for")
        )
        made = (ours / ideal - 1, waited / ideal - 1, beside, beside_late)
        for column, one in zip(found, made, strict=True):
            column.append(one)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=3, help="of every setup (default: 3)")
    parser.add_argument("--seeds", type=int, default=5, help="draws of every plan (default: 5)")
    parser.add_argument("--planners", nargs="+", default=COMPARED, choices=COMPARED)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    args = parser.parse_args()
    found: dict[tuple[float, str], tuple[list[float], ...]] = {}
    for model, device, degrees, context, documents, lengths in SETUPS:
        cost = named_cost(model, device, **degrees)
        corpus = open_corpus(lengths, context)
        for number in range(args.batches):
            batch = corpus.batch(number, documents)
            for planner in args.planners:
                plan = PLANNERS[planner](batch, cost, Options(context=context, effort=1)).plan
                table = cost.table(plan)
                for noise in NOISES:
                    so_far = found.setdefault((noise, planner), ([], [], [], []))
                    more = losses(plan, table, noise, args.seeds)
                    for column, values in zip(so_far, more, strict=True):
                        column.extend(values)
        print(f"{model} on {device}, {degrees}: done", file=sys.stderr, flush=True)
    rows = []
    for (noise, planner), (ours, late, beside, beside_late) in sorted(found.items()):
        cells = [f"{noise:.0%}", planner, str(len(ours))]
        cells += [f"{statistics.mean(ours):+.2%}", f"{max(ours):+.2%}"]
        cells += [f"{statistics.mean(late):+.2%}", f"{max(late):+.2%}"]
        cells += [f"{statistics.mean(beside):.0%}", f"{statistics.mean(beside_late):.0%}"]
        rows.append(cells)
    headers = ["noise", "planner", "iterations", "in order, mean", "worst"]
    headers += ["when waited for, mean", "worst", "beside messages, in order", "when waited for"]
    text = markdown(headers, rows)
    title = "Seconds of an iteration over those with all receives always posted, **simulated**"
    publish(f"{title}\n\n{text}", args.output)


if __name__ == "__main__":
    main()
