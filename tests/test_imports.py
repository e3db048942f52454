"""Imports keep to the contracts of import-linter (pyproject.toml), and torch stays out of planning.

The package opens no path into the tests.
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
    ("A layer imports only", "certify.trial", "def late():\n    import megatron_epp.mcore.certify"),
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
    """Names in ``source`` (strings without blanks) of the folder of the tests, or below it."""
    return [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"(\S+[/.])?tests([/.]\S*)?", node.value)
    ]


def test_the_package_opens_no_path_into_the_tests() -> None:
    """A wheel has no tests: nothing of the package may load code or data from them, except that
    one module names the emulation of Transformer Engine's kernels."""
    found = {file: paths_into_tests(file.read_text()) for file in PACKAGE.rglob("*.py")}
    engine = PACKAGE / "mcore" / "patching" / "emulated_engine.py"
    assert {file: paths for file, paths in found.items() if paths} == {engine: ["tests.engine"]}
    for line in ('Path(__file__).parents[3] / "tests"', 'import_module("tests.mcore.runs")'):
        assert paths_into_tests(f'"""tests/test_imports.py says more."""\n{line}') != []
