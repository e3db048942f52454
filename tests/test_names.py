"""One name, one meaning, and a plain one: names are unique, classes are nouns.

What the guards let pass stands here, with its reason.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_epp"

# Every module of a kind has one: commands, programs, planners; every command and planner a module.
ENTRIES = {"main", "run", "draft", "plan", "install", "add_arguments"}
FRAMEWORK_MODULES = {"shapes", "slices", "settings"}
ENTRY_MODULES = {"command", "planner"}
# Every layer kind is a folder of mcore/kinds with the same modules (CONTRIBUTING, "Add a kind of
# layer").
KIND_MODULES = {"kind", "module", "local", "certificate"}

# What each reader and adapter of a framework was read of (scripts/upstream/canary.py).
FRAMEWORK_CONSTANTS = {"RELIES_ON"}

FIELD_TERMS = {"Timed": "a line of a .timed file"}
IRREGULAR = "Ran Told Held Given Drawn Written Made Kept Meant Lent Taken Found Known Shown Split"
ADJECTIVES = "Alone Small Plain Worst Local Again Adaptive Predicting"


@cache
def modules(root: Path) -> list[tuple[str, ast.Module]]:
    paths = sorted(root.rglob("*.py"))
    return [(str(path.relative_to(root)), ast.parse(path.read_text())) for path in paths]


def defined(tree: ast.Module, kind: type[ast.ClassDef] | type[ast.FunctionDef]) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, kind) and not node.name.startswith("_"):
            yield node.name


def constants(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n for target in targets for n in ast.walk(target)):
                constant = isinstance(name, ast.Name) and re.fullmatch(r"[A-Z][A-Z0-9_]*", name.id)
                if constant and name.id not in FRAMEWORK_CONSTANTS:
                    yield name.id


def twice(root: Path, names: Callable[[ast.Module], Iterator[str]]) -> dict[str, list[str]]:
    """The modules that define each name that several do."""
    where = defaultdict(list)
    for path, tree in modules(root):
        for name in dict.fromkeys(names(tree)):
            where[name].append(path)
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def classes_twice(root: Path) -> dict[str, list[str]]:
    return twice(root, lambda tree: defined(tree, ast.ClassDef))


def functions_twice(root: Path) -> dict[str, list[str]]:
    found = twice(root, lambda tree: defined(tree, ast.FunctionDef))
    return {name: paths for name, paths in found.items() if name not in ENTRIES}


def modules_twice(root: Path) -> dict[str, list[str]]:
    """Names of modules that a folder at the top has several of, anywhere in it.

    The files that every layer kind or framework may have are not counted.
    """
    where = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        repeated = path.stem in ENTRY_MODULES
        repeated |= path.stem in KIND_MODULES and path.parts[-3] == "kinds"
        repeated |= path.stem in FRAMEWORK_MODULES and root.name == "frameworks"
        if path.name != "__init__.py" and not repeated:
            where[path.stem].append(str(path.relative_to(root)))
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def constants_twice(root: Path) -> dict[str, list[str]]:
    return twice(root, constants)


def participles(root: Path) -> dict[str, list[str]]:
    """Public classes whose last word says what was done to something, or how it is: no noun.

    An exception may say what happened.
    """
    where = defaultdict(list)
    for path, tree in modules(root):
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                last = re.findall(r"[A-Z][a-z]*", node.name)[-1]
                noun = not re.fullmatch(r"[A-Z][a-z]*[^e]ed", last)
                noun &= last not in f"{IRREGULAR} {ADJECTIVES}".split()
                raised = any(
                    re.search(r"(Error|Exception|Exit|Failed)$", ast.unparse(b)) for b in node.bases
                )
                if not (noun or raised or node.name in FIELD_TERMS):
                    where[node.name].append(path)
    return where


def in_folders(found: Callable[[Path], Mapping[str, object]]) -> set[str]:
    """``folder/name`` for what is found in each folder at the top."""
    folders = sorted(path for path in PACKAGE.iterdir() if path.is_dir())
    return {f"{folder.name}/{name}" for folder in folders for name in found(folder)}


def test_no_class_name_is_used_twice() -> None:
    assert classes_twice(PACKAGE) == {}


def test_no_function_name_is_used_twice() -> None:
    assert functions_twice(PACKAGE) == {}


def test_no_module_name_is_used_twice_in_a_folder() -> None:
    assert in_folders(modules_twice) == set()


def test_no_constant_is_defined_twice_in_a_folder() -> None:
    assert in_folders(constants_twice) == set()


def test_classes_are_nouns() -> None:
    assert participles(PACKAGE) == {}


@pytest.mark.parametrize(
    ("guard", "bad", "name"),
    [
        (classes_twice, "class Rows: ...\nclass _Own: ...\n", "Rows"),
        (functions_twice, "def rows(): ...\ndef _own(): ...\ndef main(): ...\n", "rows"),
        (constants_twice, "SLACK, _OWN = 1, 2\nlower = 3\n", "SLACK"),
        (constants_twice, "SLACK: int = 1\n", "SLACK"),
    ],
)
def test_a_guard_sees_a_second_one(tmp_path: Path, guard, bad: str, name: str) -> None:
    for module in ("a.py", "b.py"):
        (tmp_path / module).write_text(bad)
    assert guard(tmp_path) == {name: ["a.py", "b.py"]}


def test_the_guard_sees_a_second_module(tmp_path: Path) -> None:
    for path in ("rows.py", "below/rows.py", "below/other.py", "__init__.py", "below/__init__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    assert modules_twice(tmp_path) == {"rows": ["below/rows.py", "rows.py"]}


@pytest.mark.parametrize("name", ["Played", "LoopJudged", "Told", "Alone"])
def test_the_guard_sees_a_participle(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.py").write_text(
        f"class {name}: ...\nclass Need: ...\nclass Lost(RuntimeError): ...\n"
    )
    assert set(participles(tmp_path)) == {name}
