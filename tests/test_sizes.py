"""No function or class of the package grows beyond what one person can keep in mind.

A class that is long is not made shorter by cutting it into ancestors: their lines count.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_epp"
MOST_FUNCTION_LINES, MOST_CLASS_LINES = 120, 300

# Functions that may be longer, with the reason.
LONG_FUNCTIONS = {
    "sim/engine.py:run_arrays": "one compiled loop: what numba would have to pass between parts "
    "is all of its state"
}
# Classes that are longer still: the most lines that each may have, and the reason. No new ones.
LONG_CLASSES = {
    "DSAKind": (421, "MLAKind and LayerKind are its ancestors"),
    "DSALayer": (368, "MLALayer and its ancestors"),
    "ModelStage": (312, "the operations of Compute share the chunks in flight of a stage"),
    "Search": (496, "Player is its ancestor; all moves of the hill climbing share its caches"),
    "SliceStage": (563, "ModelStage is its ancestor; one stage of an external loop's model"),
}


@cache
def modules(root: Path) -> dict[str, ast.Module]:
    paths = sorted(root.rglob("*.py"))
    return {str(path.relative_to(root)): ast.parse(path.read_text()) for path in paths}


def lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, int]]:
    """Qualified name and lines of every function in ``node``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{outer}{child.name}", lines(child)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions(child, f"{outer}{child.name}.")
        else:
            yield from functions(child, outer)


def long_functions(root: Path) -> dict[str, int]:
    return {
        f"{module}:{name}": count
        for module, tree in modules(root).items()
        for name, count in functions(tree)
        if count > MOST_FUNCTION_LINES
    }


def classes(root: Path) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Lines and names of the bases of every class at the top of a module, by its name."""
    return {
        node.name: (
            lines(node),
            tuple(getattr(base, "attr", getattr(base, "id", "")) for base in node.bases),
        )
        for tree in modules(root).values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def long_classes(root: Path) -> dict[str, int]:
    """Lines of the classes that have too many, those of their ancestors in the package included."""
    known = classes(root)

    def ancestry(name: str) -> set[str]:
        bases = [base for base in known[name][1] if base in known and base != name]
        return {name}.union(*map(ancestry, bases))

    counts = {name: sum(known[one][0] for one in ancestry(name)) for name in known}
    return {name: count for name, count in counts.items() if count > MOST_CLASS_LINES}


def test_no_function_is_too_long() -> None:
    assert long_functions(PACKAGE).keys() == LONG_FUNCTIONS.keys()


def test_no_class_is_too_long() -> None:
    counts = long_classes(PACKAGE)
    assert counts.keys() == LONG_CLASSES.keys()
    assert {name: count for name, count in counts.items() if count > LONG_CLASSES[name][0]} == {}


@pytest.mark.parametrize("count", [MOST_FUNCTION_LINES, MOST_FUNCTION_LINES + 1])
def test_a_long_function_is_found(tmp_path: Path, count: int) -> None:
    body = "        x = 1\n" * (count - 1)
    (tmp_path / "a.py").write_text(f"class A:\n    def f(self):\n{body}")
    assert long_functions(tmp_path) == ({"a.py:A.f": count} if count > MOST_FUNCTION_LINES else {})


@pytest.mark.parametrize("count", [MOST_CLASS_LINES, MOST_CLASS_LINES + 2])
def test_ancestors_count_as_a_class(tmp_path: Path, count: int) -> None:
    body = "    x = 1\n" * (count // 2 - 1)
    (tmp_path / "a.py").write_text(f"class A:\n{body}")
    (tmp_path / "b.py").write_text(f"import a\n\nclass B(a.A):\n{body}")
    assert long_classes(tmp_path) == ({"B": count} if count > MOST_CLASS_LINES else {})
