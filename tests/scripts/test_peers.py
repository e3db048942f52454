"""The table of ``scripts/bench/peers.py``: its cells and ratios by round."""

import argparse

import peers


def result(variant: str, number: int, seconds: float, simulated: float) -> dict:
    facts = {"cell": "4096x8x2", "factor": 1.0, "tokens": 600, "bound": 2.0}
    made = {"variant": variant, "round": number, "seconds": seconds, "simulated": simulated}
    return facts | made | {"peak": 3 * 2.0**30}


RESULTS = [
    result("packing-best", 0, 3.0, 3.0),
    result("epp", 0, 2.0, 2.0),
    result("torch 1f1b docs", 0, 6.0, 2.0),
    result("packing-best", 1, 5.0, 3.0),
    result("epp", 1, 2.0, 2.0),
]


def test_ratios_are_of_the_same_round() -> None:
    assert peers.rows_of(RESULTS) == [
        ["epp", "300", "2.00", "1.50", "2.50", "1.50", "3.0"],
        ["packing-best", "160", "1.00", "1.00", "1.00", "1.00", "3.0"],
        ["torch 1f1b docs", "100", "0.50", "0.50", "0.50", "1.50", "3.0"],
    ]
    title = "4K, 8 documents, 2 stages: bound 1.50 (simulated), 2 rounds"
    assert peers.title(RESULTS) == title


def test_a_run_goes_on_after_the_rounds_that_it_has() -> None:
    names, arguments = {"epp", "torch 1f1b docs"}, argparse.Namespace(rounds=4)
    assert peers.missing_rounds(arguments, "4096x8x2", RESULTS, names) == [1, 2, 3]
