"""No test depends on how fast or busy the machine is: none compares with a clock.

A test waits for what it wants to see (tests/waiting.py), gives a module a clock of its own, or
looks at the order of things. What takes long is measured by benchmarks, not by tests.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
# What ends a test that hangs, and nothing else.
LAST_RESORTS = {
    "waiting.py": "the last resort itself",
    "mcore/runs.py": "of a training run",
    "attack/agents.py": "torchrun's, for a rank that it has told to end",
}


def comparisons(source: str) -> Iterator[int]:
    """Lines that compare with a clock, or with a name that was computed from one."""
    tree = ast.parse(source)
    from_clock: set[str] = set()

    def reads(node: ast.AST) -> bool:
        return any(
            (isinstance(inner, ast.Attribute) and inner.attr in CLOCKS)
            or (isinstance(inner, ast.Name) and inner.id in CLOCKS | from_clock)
            for inner in ast.walk(node)
        )

    assignments = [n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.NamedExpr)]
    for _ in assignments:  # names of names
        before = len(from_clock)
        for node in assignments:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if reads(node.value) and not isinstance(node.value, ast.Lambda):
                from_clock |= {each.id for each in targets if isinstance(each, ast.Name)}
        if len(from_clock) == before:
            break
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and reads(node):
            yield node.lineno


def test_no_test_compares_with_a_clock() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if path.parts[len(ROOT.parts)] != "gpu" and (lines := list(comparisons(path.read_text())))
    }
    assert {name: lines for name, lines in found.items() if name not in LAST_RESORTS} == {}
    assert LAST_RESORTS.keys() == found.keys()


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("assert time.monotonic() - began < 0.5", [1]),
        ("began = time.perf_counter()\nwork()\ntook = f() - began\nassert took <= 0.1", [4]),
        ("from time import monotonic\nassert 1 < monotonic() - 3 < 20", [2]),
        ("if (left := end - time.monotonic()) > 0: pass", [1]),
        ("begin = time.process_time()\nassert time.process_time() - begin < 1", []),
        ("clock = SimpleNamespace(monotonic=lambda: now)\nassert now == 3", []),
    ],
)
def test_a_comparison_with_a_clock_is_found(source: str, lines: list[int]) -> None:
    assert list(comparisons(source)) == lines
