"""One name, one meaning: no public class name stands for two things in the package."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "megatron_epp"


def public_classes(root: Path) -> dict[str, list[str]]:
    """The modules that define each public class."""
    where = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(root)))
    return where


def shared(root: Path) -> dict[str, list[str]]:
    return {name: paths for name, paths in public_classes(root).items() if len(paths) > 1}


def test_no_class_name_is_used_twice() -> None:
    assert shared(PACKAGE) == {}


def test_the_guard_sees_a_second_class(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Rows: ...\nclass _Own: ...\n")
    (tmp_path / "b.py").write_text("class Rows: ...\nclass _Own: ...\n")
    assert shared(tmp_path) == {"Rows": ["a.py", "b.py"]}
