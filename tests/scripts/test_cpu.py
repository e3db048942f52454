"""Tables of ``scripts/bench/cpu.py``, of made-up measurements, and the options of its cases."""

import sys
from pathlib import Path

import cpu
import pytest


def test_plans_in_turn_are_compared_with_packing_best_of_their_budget() -> None:
    """Each variant takes 1 s more than the one before; predictions are 10% too high."""
    entries = [
        {
            "variant": number, "tokens": 100, "seconds": number + 1.0,
            "predicted": (number + 1) * 1.1, "bubble": 0.25, "own": 0.01,
            "peaks": [100, 50], "predicted_peaks": [110.0, 50.0],
            "host": [0, 100], "predicted_host": [0, 105],
            "whole": [], "chunks": 4, "recomputed": 0.5, "split": 0.0,
        }
        for _ in range(2)
        for number in range(len(cpu.VARIANTS))
    ]  # fmt: skip
    rows = cpu.turn_rows(cpu.Size.parse("gpt-oss:4096x6"), cpu.VARIANTS, entries)
    cells = [dict(zip(cpu.TURN_HEADERS, row, strict=True)) for row in rows]
    assert [row["ratio"] for row in cells] == ["2.00", "1.00", "0.67", "1.00", "0.80"]
    assert (
        {row["seconds off"] for row in cells} == {"+10.0%"} == {row["memory off"] for row in cells}
    )
    assert {row["host off"] for row in cells} == {"+5.0%"}
    assert cells[0]["job"] == "gpt-oss 4K x 6" and cells[0]["peak"] == "100%"
    assert cpu.errors(entries).startswith("10 iterations: seconds off by 10.0% in the median")


@pytest.mark.parametrize("case", [*cpu.TURNS, *cpu.WAY_SIZES])
def test_every_case_has_sizes_and_flags(case: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cpu.py", "--case", case])
    arguments = cpu.parse()
    for size in arguments.sizes:
        words = cpu.flags(size, Path("corpus"), 7, arguments.dtype)
        assert words[words.index("--train-iters") + 1] == "7"
        assert words[words.index("--seq-length") + 1] == str(size.context)
