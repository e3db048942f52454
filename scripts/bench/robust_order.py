"""Planned order of ops against running whatever is ready, if ops take other times than planned.

    python scripts/bench/robust_order.py [--jobs 8b-32k-64 ...] [--batches 2] [-o RESULT.md]

All times are **simulated**, for plans of `epp` with split backward for the jobs of set `table` of
`study_jobs.py`, on a V and on one stage a rank. The planner does not know the noise. A rank runs
its ops in one of these ways:

fixed      the planned order, as the executor does.
ready      While the input of the next planned op is missing, a later op that can run overtakes it,
           the first in planned order. It must leave the rank within the plan's peak memory, also if
           all other ops then run in planned order. So no rank runs out of memory or deadlocks.
informed   As `ready`, but a rank knows when the missing input arrives, from the moment when the op
           that computes it starts. An op that would end later than that by more than half of its
           time does not overtake.
fill       As `ready`, but only W and G overtake.
+1 chunk   As `ready`, with memory for one more forward of the rank's largest chunk.

A rank stands for its tensor- and context-parallel group, which adopts the choice of its first rank.
This agreement costs nothing here, and nor do messages in another order than planned: the gains are
upper bounds.
"""

import argparse
import heapq
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from headline import publish
from study_jobs import TABLE, Job, heaviest, progress

from megatron_epp.cost.cost import Cost
from megatron_epp.ir import KIND_CODE, Kind, Plan, needs_of, rules_of, slices_of
from megatron_epp.planner import planner_of
from megatron_epp.planner.choose.choice import placed_cost
from megatron_epp.show.table import markdown
from megatron_epp.sim.engine import OpArrays, run
from megatron_epp.sim.inputs import op_arrays, orders_of
from megatron_epp.sim.rule_arrays import PAYLOAD_CODE, needs_for

SEEDS = range(5)
PLACEMENTS = {"v": "V", "": "one stage a rank"}
FILLING = (KIND_CODE[Kind.WEIGHT], KIND_CODE[Kind.HEAD_WEIGHT])
EVERY = tuple(KIND_CODE.values())
# Kinds of ops that overtake, whether arrivals are known, chunks of memory above the plan's peak.
WAYS = {
    "fixed": ((), False, 0),
    "ready": (EVERY, False, 0),
    "informed": (EVERY, True, 0),
    "fill": (FILLING, False, 0),
    "+1 chunk": (EVERY, False, 1),
}
Factors = Callable[[tuple[int, ...], np.random.Generator], np.ndarray]  # of seconds, by grid shape


def noise(deviation: float) -> Factors:
    """Return a log-normal factor for each op, with mean 1."""
    sigma = np.sqrt(np.log1p(deviation**2))
    return lambda shape, random: random.lognormal(-(sigma**2) / 2, sigma, shape)


def errors(*axes: int) -> Factors:
    """Return a factor for all ops with the same index on ``axes``: 9 to 35% more or less time."""

    def drawn(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
        size = [length if axis in axes else 1 for axis, length in enumerate(shape)]
        return 1 + random.choice([-1, 1], size) * random.uniform(0.09, 0.35, size)

    return drawn


# Factors of the seconds [kinds, stages, chunks]; None: a random rank takes 1.1 times as long.
TIMES: dict[str, Factors | None] = {
    "10% noise": noise(0.1),
    "20% noise": noise(0.2),
    "a rank 10% slower": None,
    "errors by op kind": errors(0),
    "errors by op kind and stage": errors(0, 1),
    "errors by chunk": errors(2),
}


class Execution:
    """A plan and the dependencies between its ops, which are numbered rank by rank as planned."""

    def __init__(self, plan: Plan, cost: Cost):
        self.plan, self.orders, slices = plan, orders_of(plan), slices_of(plan)
        self.arrays = op_arrays(cost.table(plan), slices, rules_of(plan))
        self.planned = run(self.orders, self.arrays, needs_for(plan.vocabulary_parallel))
        places = [place for order in plan.rank_orders for place in order]
        number = {place: op for op, place in enumerate(places)}
        index = self.orders.kind.astype(int), self.orders.stage, self.orders.chunk
        self.index = index
        # Of each op: the ops that wait for it, with payload and link if it is a message.
        self.waits = [0] * len(places)
        self.gives: list[list[tuple[int, tuple[int, int] | None]]] = [[] for _ in places]
        needs = needs_of(plan, slices=slices)
        for op, (stage, what) in enumerate(places):
            for need, where, would in needs(stage, what):
                source = next(number[where, each] for each in would if (where, each) in number)
                link = plan.stages - 1 if need.stage == "last" else min(stage, where)
                remote = plan.rank_of[where] != plan.rank_of[stage]
                message = (PAYLOAD_CODE[need.payload], link) if remote else None
                self.gives[source].append((op, message))
                self.waits[op] += 1
        moved = self.arrays.moved_bytes[index[0], :, index[1], index[2]]
        self.makes, self.net = moved[:, 0].tolist(), (moved[:, 0] - moved[:, 1]).tolist()
        self.queues = [range(*ends) for ends in pairwise(self.orders.offset.tolist())]
        self.resident = np.bincount(plan.rank_of, self.arrays.resident).tolist()
        forward = np.where(index[0] == KIND_CODE[Kind.FORWARD], self.net, 0.0)
        self.chunk_bytes = [float(forward[ops].max()) for ops in self.queues]

    def times(self, drawn: Factors | None, seed: int) -> OpArrays:
        """Return the seconds of ops and messages under noise."""
        random, arrays = np.random.default_rng(seed), self.arrays
        if drawn is None:
            slow = np.array(self.plan.rank_of) == random.integers(self.plan.ranks)
            return arrays._replace(seconds=arrays.seconds * np.where(slow, 1.1, 1)[:, None])
        return arrays._replace(seconds=arrays.seconds * drawn(arrays.seconds.shape, random))

    def seconds(
        self, arrays: OpArrays, overtaking: Sequence[int], informed: bool, chunks: int
    ) -> float:
        """Return the seconds of an iteration with the times of ``arrays`` in one of the WAYS."""
        rank_of, links = self.plan.rank_of, arrays.link_seconds.tolist()
        kind, stage, chunk = (of.tolist() for of in self.index)
        seconds = arrays.seconds[self.index].tolist()
        left = [list(queue) for queue in self.queues]  # in planned order
        held, free = list(self.resident), [0.0] * self.plan.ranks
        most = [
            peak + chunks * more + 1
            for peak, more in zip(self.planned.peak, self.chunk_bytes, strict=True)
        ]
        waits, arrived = self.waits.copy(), [0.0] * len(self.waits)
        link_free: dict[tuple[int, int], float] = {}
        wakes = [(0.0, rank) for rank in range(self.plan.ranks)]
        while wakes:
            now, rank = heapq.heappop(wakes)
            if free[rank] > now or not left[rank]:
                continue
            first, known = left[rank][0], np.inf
            if informed and not waits[first]:
                known = 2 * (arrived[first] - now)
            # Peak of the ops before ``op`` and bytes after them, if ``op`` does not overtake.
            peak = after = held[rank]
            for op in left[rank] if overtaking else left[rank][:1]:
                if not waits[op] and arrived[op] <= now:
                    fits = max(held[rank] + self.makes[op], peak + self.net[op]) <= most[rank]
                    if op == first or (kind[op] in overtaking and fits and seconds[op] <= known):
                        break
                peak = max(peak, after + self.makes[op])
                after += self.net[op]
            else:
                continue
            left[rank].remove(op)
            held[rank] += self.net[op]
            end = free[rank] = now + seconds[op]
            heapq.heappush(wakes, (end, rank))
            for target, message in self.gives[op]:
                arrival, other = end, rank_of[stage[target]]
                if message is not None:
                    payload, link = message
                    departs = max(end, link_free.get((rank, other), 0.0))
                    link_free[rank, other] = departs + links[payload][link][chunk[op]]
                    arrival = link_free[rank, other] + arrays.latency
                waits[target] -= 1
                arrived[target] = max(arrived[target], arrival)
                if not waits[target]:
                    heapq.heappush(wakes, (arrived[target], other))
        assert not any(left), "a rank waits forever"
        return max(free)

    def gains(self) -> Iterator[tuple[str, str, float]]:
        """Yield the kind of times, the way, and the fraction that the planned order takes more."""
        for name, drawn in TIMES.items():
            for seed in SEEDS:
                arrays = self.times(drawn, seed)
                taken = {way: self.seconds(arrays, *how) for way, how in WAYS.items()}
                simulated = run(self.orders, arrays, needs_for(self.plan.vocabulary_parallel))
                assert np.isclose(taken["fixed"], simulated.seconds, rtol=1e-12)
                for way in tuple(WAYS)[1:]:
                    yield name, way, taken["fixed"] / taken[way] - 1


def fastest(job: Job, number: int, placement: str) -> Execution | None:
    """Return the faster plan of `epp` with and without vocabulary parallelism, if one fits."""
    cost = job.cost().replace(dp=1)
    placed = placed_cost(cost, placement) if placement else cost
    batch, found = heaviest(job.batch(number), job.cost()), []
    for vocabulary in (False, True):
        try:
            here = placed.with_vocabulary(vocabulary)
            found.append((planner_of("epp")(batch, here, job.options()), here))
        except ValueError:  # too large
            continue
    found = [each for each in found if each[0].fits]
    best = min(found, key=lambda each: each[0].seconds, default=None)
    return None if best is None else Execution(best[0].plan, best[1])


def table(gains: Sequence[tuple[str, str, str, float]], column: int, head: str) -> str:
    """Return the median and range of gains by the name in ``column`` and by way."""
    ways = tuple(WAYS)[1:]
    rows = []
    for name in (*dict.fromkeys(each[column] for each in gains), "all"):
        cells = []
        for way in ways:
            of = [gain[3] for gain in gains if gain[2] == way and name in (gain[column], "all")]
            cells.append(f"{statistics.median(of):+.1%} ({min(of):+.1%} to {max(of):+.1%})")
        rows.append([name, *cells])
    return markdown([head, *ways], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", nargs="+", default=list(TABLE), choices=list(TABLE))
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    args = parser.parse_args()
    text = ""
    for placement, said in PLACEMENTS.items():
        gains = []
        for name in args.jobs:
            for number in range(args.batches):
                if (execution := fastest(TABLE[name], number, placement)) is not None:
                    gains += [(name, *each) for each in execution.gains()]
                    progress([said, name, str(number)])
        tables = table(gains, 1, "times") + "\n" + table(gains, 0, "job")
        text += f"### {said}: seconds in planned order over seconds, minus 1\n\n{tables}\n"
    publish(text, args.output)


if __name__ == "__main__":
    main()
