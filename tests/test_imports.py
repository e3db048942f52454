"""No module of the house imports itself, however far round: imports inside functions count, too.

A circle that Python does not see, because one of its imports stands inside a function, is a circle
for whoever reads: none of its modules can be understood, tested or moved alone.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.test_floors import PACKAGE, ROOT, imports


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Which modules of ``sources`` each one imports, by dotted names; a package by its folder's."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        found = set()
        for _, name, _ in imports(source, module):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            found.add(name)
        graph[module] = found - {"", module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """One circle of each knot: modules of which each imports the next and the last the first."""
    found, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(tuple(path[path.index(module) :]))
        elif module not in done:
            for imported in sorted(graph[module]):
                visit(imported, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def test_no_circles() -> None:
    sources = {
        ".".join([PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): file.read_text()
        for file in sorted(Path(ROOT).rglob("*.py"))
    }
    graph = import_graph(sources)
    assert sum(map(len, graph.values())) > 500
    assert circles(graph) == []


@pytest.mark.parametrize(
    "back",
    [
        "from house.hall import door",
        "def late():\n    from house.hall import door",
        "def late():\n    import house.hall",
        "from house import hall",
        "from importlib import import_module\nimport_module('house.hall')",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    sources = {
        "house": "",
        "house.hall": "from house.stairs import step",
        "house.stairs": "import json\nfrom house.attic import beam",
        "house.attic": back,
    }
    (found,) = circles(import_graph(sources))
    assert sorted(found) == ["house.attic", "house.hall", "house.stairs"]
