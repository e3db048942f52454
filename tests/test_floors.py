"""The house keeps its floors: imports point down, never sideways.

    floor 7  frameworks/*/slices          adapters for slices
    floor 6  mcore                        the only folder that imports megatron
    floor 5  certify  frameworks          the judge of a trainer, frameworks' micro-batches; torch,
                                          no megatron
    floor 4  control  frameworks/settings the loop around an iteration; torch, no megatron.
                                          Settings for `tune --for`; no torch
    floor 3  planner  show     | layers   layers imports transformer_engine,
    floor 2  sim
    floor 1  corpus  cost      | runtime  te_reference: its kernels for CPU-only hosts
    floor 0  ir  flag_fields  safe_files  autoload    the standard library only
             thinking            doing    two towers: they share ir and meet in control and mcore

The thinking tower never imports torch. ``__init__``, ``__main__`` and ``cli`` belong to it, and may
import the rest of the package inside functions only; nothing imports cli but ``__main__``.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "megatron_epp"
ROOT = Path(__file__).parents[1] / PACKAGE
FLOORS = {
    "ir": 0,
    "flag_fields": 0,
    "safe_files": 0,
    "autoload": 0,
    "corpus": 1,
    "cost": 1,
    "runtime": 1,
    "te_reference": 1,
    "sim": 2,
    "planner": 3,
    "show": 3,
    "layers": 3,
    "control": 4,
    "certify": 5,
    "frameworks": 5,
    "integrations": 5,
    "mcore": 6,
    "frameworks.settings": 4,
    "frameworks.slices": 7,
}
STANDARD = {"ir", "flag_fields", "safe_files"}
THINKING = {"corpus", "cost", "sim", "planner", "show", "frameworks.settings"}
# Import paths of before, which only import what is in frameworks now.
COMPATIBLE = {"integrations"}
ADAPTERS = {"slime_samples", "verl_samples", "nemo_samples", "swift_packs"}
DOING = {"runtime", "layers", "te_reference"}
# Light to import; the doing tower only inside functions. cli holds __main__'s commands.
FRONT_DOORS = {"__init__", "__main__", "cli", "autoload", "adaptor", "plugin", "run"}
ENTRY = {"pretrain_gpt", "pretrain_hybrid"}  # above mcore


def imports(source: str, module: str) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute name, inside a function) of every import; import_module("...") is one."""
    package = module.split(".")

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[int, str, bool]]:
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield node.lineno, name.name, lazy
            case ast.ImportFrom(module=origin, names=names, level=level):
                # A relative import climbs from the folder of the module.
                base = package[: len(package) - level] if level else []
                origin_parts = base + (origin.split(".") if origin else [])
                for name in names:
                    yield node.lineno, ".".join([*origin_parts, name.name]), lazy
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if getattr(
                func, "id", getattr(func, "attr", "")
            ) in {"import_module", "__import__"}:
                yield node.lineno, name, lazy
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy)

    yield from visit(ast.parse(source), False)


def floor_of(module: str) -> str:
    """The folder of a module of the package, or the file beside the folders; of frameworks, where
    settings and slices have floors of their own, which of these."""
    first, *others = module.split(".")
    if first == "frameworks" and {"settings", "stock_settings"} & set(others):
        return "frameworks.settings"
    if (first == "frameworks" and "slices" in others) or ADAPTERS & set(others):
        return "frameworks.slices"
    return first


def refusal(own: str, imported: str, lazy: bool) -> str:
    """Why ``own`` (a folder, or a file beside the folders) may not import; empty if it may."""
    outer = imported.split(".")[0]
    thinks = own in STANDARD or own in THINKING or own in FRONT_DOORS
    if outer == "megatron" and own != "mcore":
        return "only mcore imports megatron"
    if outer == "transformer_engine" and own not in {"layers", "te_reference"}:
        return "only layers and te_reference import transformer_engine"
    if outer in {"torch", "triton"} and thinks:
        return "the thinking tower never imports torch"
    if outer != PACKAGE:
        if own in STANDARD and outer not in sys.stdlib_module_names:
            return f"{own} stands on the standard library only"
        return ""

    target = floor_of(imported.partition(".")[2]) if "." in imported else "__init__"
    if own in FRONT_DOORS and lazy:
        return ""
    if target == own or own in ENTRY or (own in COMPATIBLE and target == "frameworks"):
        return ""
    if target not in FLOORS:
        # ``from megatron_epp import __version__`` names the package itself.
        return "" if own in FRONT_DOORS else f"{target} is no floor below {own}"
    if own in FRONT_DOORS:
        return (
            ""
            if FLOORS[target] == 0 or target in THINKING
            else f"{own} imports {target} lazily only"
        )
    if FLOORS[target] >= FLOORS[own]:
        return f"{own} (floor {FLOORS[own]}) may not import {target} (floor {FLOORS[target]})"
    if (own in THINKING and target in DOING) or (own in DOING and target in THINKING):
        return f"{own} and {target} stand in different towers, which meet in mcore"
    return ""


def violations(path: Path, source: str) -> list[str]:
    """Forbidden imports of the file at ``path``, relative to the package."""
    own = floor_of(".".join(path.with_suffix("").parts))
    if own not in FLOORS and own not in FRONT_DOORS | ENTRY:
        return [f"{path}: {own} has no floor"]
    module = ".".join([PACKAGE, *path.with_suffix("").parts])
    return [
        f"{path}:{line}: imports {name}: {reason}"
        for line, name, lazy in imports(source, module)
        if (reason := refusal(own, name, lazy))
    ]


def test_imports_keep_the_floors() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert files
    found = [
        line for file in files for line in violations(file.relative_to(ROOT), file.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


def paths_into_tests(source: str) -> list[str]:
    """String constants of ``source``, docstrings apart, that name the folder of the tests."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in docstrings
        and re.search(r"(^|[/.])tests($|[/.])", node.value)
    ]


def test_the_package_opens_no_path_into_the_tests() -> None:
    """A wheel has no tests: nothing of the package may load code or data from them."""
    found = {
        str(file.relative_to(ROOT)): paths
        for file in sorted(ROOT.rglob("*.py"))
        if (paths := paths_into_tests(file.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'ROOT = Path(__file__).parents[3] / "tests" / "te_reference"',
        'open("tests/golden/00-wlb.plan")',
        'import_module("tests.mcore.runs")',
        'open(f"{root}/tests/material.py")',
    ],
)
def test_a_path_into_the_tests_is_found(source: str) -> None:
    assert paths_into_tests(f'"""tests/test_floors.py says more."""\n{source}') != []


def test_every_folder_is_a_package() -> None:
    """A folder without __init__.py works from a checkout and is missing from the wheel."""
    folders = {file.parent for file in ROOT.rglob("*.py")}
    floors = {floor for floor in FLOORS if "." not in floor} - {
        "flag_fields",
        "safe_files",
        "autoload",
    }
    assert {ROOT / floor for floor in floors} <= folders
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ir/plan.py", "import numpy"),
        ("ir/plan.py", "from megatron_epp.sim import play"),
        ("cost/model.py", "from megatron_epp.sim.play import play"),  # sideways
        ("cost/model.py", "from ..sim import play"),
        ("sim/play.py", "import torch"),
        ("sim/play.py", "def late():\n    import torch.nn"),
        ("planner/epp/planner.py", "from megatron_epp.show import text"),
        (
            "planner/epp/planner.py",
            "from megatron_epp.runtime import link",
        ),  # down, but the other tower
        ("layers/attention/cpu.py", "from megatron_epp.cost import model"),
        ("runtime/link.py", "import megatron.core"),
        ("runtime/link.py", "from megatron_epp.mcore.trainer import setup"),
        ("control/report.py", "from megatron.core import parallel_state"),
        ("control/report.py", "from megatron_epp.mcore.trainer import setup"),
        ("control/report.py", "from megatron_epp.certify import compare"),
        ("certify/command.py", "from megatron.core import parallel_state"),
        ("certify/child.py", "def server():\n    from megatron_epp.mcore.certify import rank"),
        ("layers/attention/cpu.py", "from megatron_epp.control import report"),
        ("mcore/job/read_flags.py", "import transformer_engine.pytorch"),
        ("mcore/job/read_flags.py", "from megatron_epp import pretrain_gpt"),
        ("pretrain_gpt.py", "from megatron.training import pretrain"),
        ("show/svg.py", "from importlib import import_module\nimport_module('torch')"),
        ("__main__.py", "from megatron_epp.mcore import certify"),
        ("__main__.py", "def main():\n    import torch"),
        ("__init__.py", "import megatron_epp.layers"),
        ("cli/plan.py", "from megatron_epp.mcore import certify"),
        ("cli/plan.py", "import torch"),
        ("planner/epp/planner.py", "from megatron_epp.cli import plan"),
        ("mcore/job/job_cost.py", "from megatron_epp.cli import serve"),
        ("attic/old.py", ""),
    ],
)
def test_a_bad_import_is_found(path: str, source: str) -> None:
    assert len(violations(Path(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ir/plan.py", "import hashlib\nfrom megatron_epp.ir.span import Span\nfrom . import op"),
        ("sim/play.py", "import numba\nfrom megatron_epp.ir import rules"),
        (
            "planner/epp/planner.py",
            "from ..cost.model import seconds\nfrom megatron_epp.sim import play",
        ),
        ("layers/attention/cpu.py", "import torch\nimport transformer_engine.pytorch as te"),
        ("runtime/link.py", "import torch.distributed\nfrom megatron_epp.ir.plan import Plan"),
        (
            "mcore/trainer/elastic_schedule.py",
            "import megatron.core\nfrom megatron_epp.planner import epp",
        ),
        ("control/report.py", "import torch\nfrom megatron_epp.cost import cost"),
        ("pretrain_gpt.py", "from megatron_epp.mcore.trainer import entry"),
        (
            "__main__.py",
            "import megatron_epp.show\ndef f():\n    import megatron_epp.mcore",
        ),
    ],
)
def test_a_good_import_passes(path: str, source: str) -> None:
    assert violations(Path(path), source) == []


def test_thinking_tower_answers_without_torch() -> None:
    """Every thinking module is imported in a Python that has neither torch nor megatron."""
    thinking = {"ir", *THINKING, *FRONT_DOORS}
    modules = [
        ".".join([PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        for file in sorted(ROOT.rglob("*.py"))
        if file.relative_to(ROOT).parts[0].removesuffix(".py") in thinking
    ]
    program = f"""
import importlib, sys
for absent in ("torch", "megatron", "transformer_engine"):
    sys.modules[absent] = None
for name in {modules!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent, check=True)
