"""Imports keep to the contracts of import-linter (pyproject.toml), and torch stays out of planning.

Nobody outside assigns to the names of a module, and the package opens no path into the tests.
"""

import ast
import re
import shutil
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.programs import ROOT, Done, python, run

NAME = "megatron_epp"
PACKAGE = ROOT / NAME
PLANNING = {"ir", "corpus", "cost", "sim", "planner", "show"}
COMMANDS = {"__init__", "__main__", "cli"}

# ------------------------------------------------------------------ contracts

# An import that a contract must find: contract, module, statement.
BAD_IMPORTS = [
    ("A layer imports only", "cost.build", "from megatron_epp.sim.play import play"),
    ("A layer imports only", "sim.play", "def late():\n    from ..show import text"),
    ("A layer imports only", "control.report", "from megatron_epp.mcore.trainer import setup"),
    ("A layer imports only", "certify.child", "def late():\n    import megatron_epp.mcore.certify"),
    ("A layer imports only", "mcore.job.job_cost", "import megatron_epp.cli.plan"),
    ("A layer imports only", "layers.norms", "from megatron_epp import pretrain_gpt"),
    ("Planning does not import", "planner.division", "from megatron_epp.runtime import link"),
    ("Execution does not import", "runtime.link", "from megatron_epp.cost import build"),
    ("Planning and commands", "show.svg", "def late():\n    import torch.nn"),
    ("Planning and commands", "cli.plan", "import torch"),
    ("Only mcore imports", "control.report", "from megatron.core import parallel_state"),
    ("Only layers import", "mcore.job.read_flags", "import transformer_engine.pytorch"),
    ("The plan's package", "ir.plan", "import numpy"),
    ("Folders of mcore", "mcore.model.elastic_layers", "import megatron_epp.mcore.loops.attached"),
]


def lint(folder: Path) -> Done:
    """What import-linter says of the package in ``folder``."""
    linter = Path(sys.executable).with_name("lint-imports")
    words = (linter, "--no-logo", "--no-cache", ROOT / "pyproject.toml")
    return run(*words, cwd=folder, COLUMNS="200")


def test_the_package_keeps_its_contracts_and_a_bad_import_breaks_them(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / NAME, ignore=ignored)
    kept = lint(tmp_path)
    assert kept.returncode == 0, kept.stdout
    for _, module, statement in BAD_IMPORTS:
        with (tmp_path / NAME / f"{module.replace('.', '/')}.py").open("a") as file:
            file.write(f"\n{statement}\n")
    (tmp_path / NAME / "attic").mkdir()
    (tmp_path / NAME / "attic" / "__init__.py").write_text("")
    broken = lint(tmp_path)
    assert broken.returncode == 1
    _, *sections = re.split(r"\n\n(?=[A-Z][^\n]*\n-+\n)", broken.stdout.partition("Broken ")[2])
    for contract, module, _ in BAD_IMPORTS:
        (section,) = [text for text in sections if text.startswith(contract)]
        assert re.search(rf"{NAME}\.{module} |\.{module.split('.')[1]} -> ", section), section
    assert "attic" in broken.stdout, "a new folder needs a layer"


# ------------------------------------------------------------------ inside functions, and circles


def test_planning_and_commands_are_imported_without_torch() -> None:
    """torch, Megatron and what imports them: inside functions only."""
    modules = [
        ".".join([NAME, *file.relative_to(PACKAGE).with_suffix("").parts])
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.relative_to(PACKAGE).parts[0].removesuffix(".py") in PLANNING | COMMANDS
    ]
    assert len(modules) > 100
    program = (
        "import importlib, sys\n"
        "for absent in ('torch', 'megatron', 'transformer_engine'): sys.modules[absent] = None\n"
        f"for name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph(NAME, cache_dir=None)
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(edges).prepare()
    edges[f"{NAME}.ir.op"].add(f"{NAME}.sim.play")
    with pytest.raises(CycleError):
        TopologicalSorter(edges).prepare()


def test_every_folder_is_a_package() -> None:
    """A folder without __init__.py works from a checkout and is missing from the wheel."""
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


# ------------------------------------------------------------------ the tests, from the package


def paths_into_tests(source: str) -> list[str]:
    """String constants of ``source``, docstrings apart, that name the folder of the tests."""
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in docstrings
        and re.search(r"(^|[/.])tests($|[/.])", node.value)
    ]


def test_the_package_opens_no_path_into_the_tests() -> None:
    """A wheel has no tests: nothing of the package may load code or data from them, except that
    one module names the emulation of Transformer Engine's kernels."""
    found = {file: paths_into_tests(file.read_text()) for file in PACKAGE.rglob("*.py")}
    engine = PACKAGE / "mcore" / "patching" / "emulated_engine.py"
    assert {file: paths for file, paths in found.items() if paths} == {engine: ["tests.engine"]}
    for line in ('Path(__file__).parents[3] / "tests"', 'import_module("tests.mcore.runs")'):
        assert paths_into_tests(f'"""tests/test_imports.py says more."""\n{line}') != []


# ------------------------------------------------------------------ whose names are assigned to


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
        if (getattr(node, "module", None) or name.name).split(".")[0] in (NAME, "tests", "scripts")
        or getattr(node, "level", 0)
        # Scripts beside each other import each other by their bare names.
        or (ROOT / "scripts" / "bench" / f"{name.name}.py").exists()
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del(), value=owner):
                pass
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, *_]):
                pass
            case _:
                continue
        if ast.unparse(owner).split(".")[0] in imported:
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_nobody_takes_over_a_module() -> None:
    outside = ("scripts", "examples", "tests")
    files = [file for folder in outside for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 90
    found = [f"{file}: {line}" for file in files for line in takeovers(file.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "def main():\n    from megatron_epp.mcore.trainer import setup\n    setup.obtain = dict",
        "from megatron_epp.mcore.model.stage import ModelStage\nModelStage.forward = print",
        "import megatron_epp.ir.plan\nmegatron_epp.ir.plan.Plan = print",
        "from tests.mcore import runs\nruns.VOCABULARY += 1",
        "from megatron_epp.mcore.trainer import setup\nsetattr(setup, 'obtain', print)",
        "import in_turns\nin_turns.told = print",
    ],
)
def test_a_takeover_is_found(source: str) -> None:
    assert len(takeovers(source)) == 1


def test_what_is_no_takeover() -> None:
    assert not takeovers(
        "import numpy\nfrom unittest.mock import patch\nfrom megatron_epp.mcore import trainer\n"
        "numpy.told, mine = 1, trainer.setup\nwith patch.object(trainer, 'setup'):\n    pass"
    )
