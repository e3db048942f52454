"""CPU time of the planner's replay of orders, compared with the simulator's loop.

    python scripts/bench/replay_time.py

Replay and loop compute the same result, and run alternately. Each time is that of one simulation in
processor seconds: the minimum over nine rounds of ten.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
from headline import ROOT

sys.path.insert(0, str(ROOT))

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.planner.chunks.params import ChunkingParams, build_chunks
from megatron_epp.planner.order.emit import SortedBatch
from megatron_epp.planner.order.list_scheduler import list_schedule
from megatron_epp.planner.order.policies import policies, policy_of
from megatron_epp.planner.order.problem import loads_of, problem_of, rates_of
from megatron_epp.planner.order.replay import replayed
from megatron_epp.planner.order.warmup import shrinking_in_flight
from megatron_epp.show.table import markdown
from megatron_epp.sim.engine import Orders, run_arrays
from megatron_epp.sim.rule_arrays import needs_for

ROUNDS, PLAYS = 9, 10


def least_seconds(*plays: Callable[[], object]) -> list[float]:
    """Return the minimum seconds of one call of each function."""
    best = [float("inf")] * len(plays)
    for number in range(ROUNDS):
        for which in range(len(plays))[:: 1 if number % 2 else -1]:
            began = time.process_time()
            for _ in range(PLAYS):
                plays[which]()
            best[which] = min(best[which], (time.process_time() - began) / PLAYS)
    return best


def main() -> None:
    rows = []
    for stages in (4, 8, 32):
        cost = named_cost("llama3-70b", "h200-141g", pp=stages, cp=8)
        batch = SortedBatch.of(open_corpus("wlb", 98304).batch(20, 256))
        params = ChunkingParams(12.0 * stages)
        chunking = build_chunks(params, batch.lengths, rates_of(cost), 10**9)
        work = problem_of(cost, chunking, loads_of(chunking, batch.lengths), {})
        in_flight_limit = shrinking_in_flight(chunking.sizes, stages)
        for split in (False, True):
            chosen = next(p for p in policies(split, many=True) if p.split == split)
            schedule = list_schedule(work, policy_of(chosen, work, chunking.sizes, in_flight_limit))
            orders = Orders(
                schedule.kinds.ravel(),
                schedule.chunks.ravel().astype(np.int64),
                np.repeat(np.arange(stages), schedule.kinds.shape[1]),
                np.arange(stages + 1) * schedule.kinds.shape[1],
                np.arange(stages),
            )
            needs = needs_for(False)
            replay, engine = least_seconds(
                lambda work=work, schedule=schedule: replayed(work, schedule),
                lambda work=work, orders=orders, needs=needs: run_arrays(orders, work.ops, needs),
            )
            cells = (f"{replay * 1e6:.0f}", f"{engine * 1e6:.0f}", f"{engine / replay:.1f}")
            rows.append([str(stages), "I, W" if split else "B", str(schedule.kinds.size), *cells])
    print(markdown(["stages", "backward", "ops", "replay us", "simulator us", "factor"], rows))


if __name__ == "__main__":
    main()
