"""No module imports itself, however far round, no folder of mcore one above it, and nobody outside
assigns to the names of a module.

A circle that Python does not see, because one of its imports stands inside a function, is a circle
for whoever reads: none of its modules can be understood, tested or moved alone.
"""

import ast
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


def every_source() -> dict[str, str]:
    return {
        ".".join([PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): file.read_text()
        for file in sorted(Path(ROOT).rglob("*.py"))
    }


def rooms(graph: Mapping[str, set[str]], folder: str) -> dict[str, set[str]]:
    """What the folders and files of ``folder`` import of one another, whole folders at a time."""
    depth = folder.count(".") + 2
    room_of = {
        module: ".".join(module.split(".")[:depth])
        for module in graph
        if module.startswith(f"{folder}.")
    }
    found: dict[str, set[str]] = {room: set() for room in room_of.values()}
    for module, room in room_of.items():
        found[room] |= {room_of[one] for one in graph[module] if one in room_of} - {room}
    return found


def test_no_circles() -> None:
    graph = import_graph(every_source())
    assert sum(map(len, graph.values())) > 500
    assert circles(graph) == []


def test_no_folder_of_mcore_imports_one_above_it() -> None:
    """Its folders and files can be laid out so that every arrow points down."""
    within = rooms(import_graph(every_source()), f"{PACKAGE}.mcore")
    assert len(within) > 8
    assert circles(within) == []


@pytest.mark.parametrize(
    ("module", "back"),
    [
        ("mcore.model.elastic_layers", "from megatron_epp.mcore.loops import attached"),
        (
            "mcore.data.chunk_params",
            "from megatron_epp.mcore.kinds.attention.module import ElasticAttention",
        ),
        ("mcore.choose.choices", "def late():\n    import megatron_epp.mcore.certify.rank"),
    ],
)
def test_an_arrow_upwards_in_mcore_is_found(module: str, back: str) -> None:
    """Each of these is no circle of modules."""
    sources = every_source()
    sources[f"{PACKAGE}.{module}"] += f"\n{back}\n"
    graph = import_graph(sources)
    assert circles(rooms(graph, f"{PACKAGE}.mcore")) != []


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


# ------------------------------------------------------------------ whose names are assigned to

OUTSIDE = ("scripts", "examples", "tests")
OWN_PACKAGES = (PACKAGE, "tests", "scripts")


def takeovers(source: str) -> list[str]:
    """Assignments to an attribute of a module or class of ours that ``source`` has imported.

    Whoever replaces ``setup.make_planning`` depends on a name that a refactoring may change, and
    then replaces nothing without a word: hand it in (``entry.main(hooks=...)``). A context of
    ``patch.object``, or pytest's monkeypatch, fails where the name is gone, and gives it back.
    """
    tree = ast.parse(source)
    imported = {
        (name.asname or name.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
        if (getattr(node, "module", None) or name.name).split(".")[0] in OWN_PACKAGES
        or (isinstance(node, ast.ImportFrom) and node.level)
        # Scripts beside each other import each other by their bare names.
        or (ROOT.parent / "scripts" / "bench" / f"{name.name}.py").exists()
    }

    def owner(node: ast.AST) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del(), value=taken):
                pass
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[taken, *_]):
                pass
            case _:
                continue
        if owner(taken) in imported:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_nobody_takes_over_a_module() -> None:
    files = [file for folder in OUTSIDE for file in sorted((ROOT.parent / folder).rglob("*.py"))]
    assert len(files) > 90
    found = [f"{file}: {line}" for file in files for line in takeovers(file.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from megatron_epp.mcore.trainer import setup\nsetup.make_planning = print",
        "def main():\n    from megatron_epp.mcore.trainer import setup\n    setup.obtain = dict",
        "from megatron_epp.mcore.model.stage import ModelStage\nModelStage.forward = print",
        "import megatron_epp.ir.plan\nmegatron_epp.ir.plan.Plan = print",
        "from tests.mcore import runs\nruns.VOCABULARY += 1",
        "from megatron_epp.mcore.trainer import setup\nsetattr(setup, 'obtain', print)",
        "from megatron_epp.corpus import idx_file\nidx_file.BLOCK, before = 1, idx_file.BLOCK",
        "import in_turns\nin_turns.told = print",
    ],
)
def test_a_takeover_is_found(source: str) -> None:
    assert len(takeovers(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from megatron_epp.mcore.trainer.job import Job\njob = Job()\njob.schedule = 3",
        "import numpy\nnumpy.told = 1",
        "from megatron_epp.mcore.trainer import setup\nmine = setup.obtain",
        "from unittest.mock import patch\nfrom megatron_epp.mcore.trainer import setup\n"
        "with patch.object(setup, 'obtain', print):\n    pass",
    ],
)
def test_what_is_no_takeover(source: str) -> None:
    assert takeovers(source) == []
