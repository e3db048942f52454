"""The table of ``scripts/bench/peers.py``: its cells, packed sequences and ratios by round."""

import argparse
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))
import computing_cells
import peers


def result(variant: str, number: int, seconds: float, simulated: float) -> dict:
    facts = {"cell": "4096x8x2c", "factor": 1.0, "tokens": 600, "bound": 2.0}
    made = {"variant": variant, "round": number, "seconds": seconds, "simulated": simulated}
    return facts | made | {"peak": 3 * 2.0**30}


RESULTS = [
    result("packing-best", 0, 3.0, 3.0),
    result("epp", 0, 2.0, 2.0),
    result("torch 1f1b docs", 0, 6.0, math.nan),
    result("packing-best", 1, 5.0, 3.0),
    result("epp", 1, 2.0, 2.0),
]


def test_ratios_are_of_the_same_round() -> None:
    assert peers.rows_of(RESULTS) == [
        ["epp", "300", "2.00", "1.50", "2.50", "1.50", "3.0"],
        ["packing-best", "160", "1.00", "1.00", "1.00", "1.00", "3.0"],
        ["torch 1f1b docs", "100", "0.50", "0.50", "0.50", "-", "3.0"],
    ]
    title = "4K, 8 documents, 2 stages: ops compute, bound 1.50 (simulated), 2 rounds"
    assert peers.title(RESULTS) == title


def test_a_run_goes_on_after_the_rounds_that_it_has() -> None:
    arguments = argparse.Namespace(rounds=4)
    missing = peers.missing_rounds(arguments, "4096x8x2c", RESULTS, {"packing-best", "epp"})
    assert missing == [2, 3]
    of_all = {"epp", "torch 1f1b docs"}
    assert peers.missing_rounds(arguments, "4096x8x2c", RESULTS, of_all) == [1, 2, 3]
    assert peers.missing_rounds(arguments, "4096x8x2", RESULTS, {"epp"}) == [0, 1, 2, 3]


def test_packed_sequences_are_tried_once_and_the_last_fills_the_context() -> None:
    def packed_to(tokens: int) -> computing_cells.MicroBatches:
        return ((0, 1, 2),) if tokens >= 600 else ((0,), (1, 2))

    tried = computing_cells.packings_of([300, 200, 100], 1000, packed_to)
    assert tried == (((0,), (1, 2)), ((0, 1, 2),))
