"""What moved in wheels, said from their sources, on small ones that are made up; and what is relied
on, which the code itself names."""

import ast
import json
import re
import zipfile
from pathlib import Path

import canary
import checkout
import pytest

from megatron_epp.mcore.patching.patch_points import ALL_PATCH_POINTS
from megatron_epp.mcore.patching.releases import NEWEST
from tests.programs import ROOT
from tests.scripts.test_check_upstream import installed

pytestmark = pytest.mark.everything

NAMES = ("f", "Config", "LIMIT", "moved_away")
BEFORE = """
LIMIT = 4

def f(rows, each=1):
    '''Pad.'''
    return rows + each  # a comment

class Config:
    rows: int = 1
    name = "a"

    def check(self):
        return True

def moved_away():
    pass
"""


def made(folder: Path, version: str, *changes: tuple[str, str]) -> None:
    """A wheel of verl: BEFORE, with ``changes`` of (old, new)."""
    text = BEFORE
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    with zipfile.ZipFile(folder / f"verl-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("verl/__init__.py", "raise ImportError('imported')")
        archive.writestr("verl/packing.py", text)


@pytest.fixture
def look(tmp_path, capsys):
    """Runs the script over the wheels of a folder; version 1.9 of verl is read."""
    relied = tuple(f"verl.packing.{name}" for name in NAMES)
    read, wheels = tmp_path / "read.json", tmp_path / "wheels"
    wheels.mkdir()
    made(wheels, "1.9")
    read.write_text(json.dumps({"verl": {"version": "none", "names": dict.fromkeys(relied)}}))

    def run(*words: str) -> tuple[int, list[str]]:
        checkout._tree.cache_clear()
        shared = ["--only", "verl", "--read", str(read), "--wheels", str(wheels)]
        status = canary.main([*shared, *words])
        return status, capsys.readouterr().out.splitlines()

    status, lines = run()
    assert status == 1 and lines[1:] == [f"    {name}: not read yet" for name in relied]
    assert run("--accept", "verl")[0] == 0
    assert set(json.loads(read.read_text())["verl"]["names"]) == set(relied)
    run.wheels, run.read = wheels, read
    return run


def test_comments_layout_and_docstrings_are_no_code(look) -> None:
    made(
        look.wheels,
        "1.10",
        ("'''Pad.'''", "'''Pad rows.'''"),
        ("rows + each  # a comment", "(rows +\n        each)"),
        ("LIMIT = 4", "LIMIT = 5  # its value is not code that is read"),
    )
    status, (row,) = look()
    assert status == 0
    assert re.sub(" +", " ", row) == "verl read: 1.9 newest: 1.10 0 of 4 moved"


def test_what_moved_is_named(look) -> None:
    made(
        look.wheels,
        "1.10",
        ("each=1", "each=1, *, align"),
        ("rows + each", "rows * each, '--mix'"),
        ("    rows: int = 1\n", "    rows: int = 2\n    mixed: bool = False\n"),
        ('    name = "a"\n', ""),
        ("return True", "return False"),
        ("def moved_away", "def moved"),
    )
    status, (row, *lines) = look()
    assert status == 1 and "read: 1.9" in row and "newest: 1.10" in row and "3 of 4 moved" in row
    assert [line.strip().removeprefix("verl.packing.") for line in lines] == [
        "Config: new: mixed; gone: name; changed: check, rows",
        "f: new: argument align, flag --mix; changed: its body",
        "moved_away: gone",
    ]
    assert look("--accept", "verl")[0] == 0
    status, (row,) = look()
    assert status == 0 and "read: 1.10" in row


def test_what_cannot_be_had_is_said_in_the_row(look, tmp_path) -> None:
    status, (row,) = look("--checkout", f"verl={tmp_path}")
    assert status == 2
    assert row.endswith(f"--checkout verl={tmp_path}: holds no package verl")


# ------------------------------------------------------------------ what is relied on

READ = json.loads(canary.READ.read_text())


def test_what_is_relied_on_of_frameworks_was_read() -> None:
    for name, package in canary.FRAMEWORKS.items():
        names = READ[name]["names"]
        assert names and all(dotted.startswith(f"{package}.") for dotted in names)
        assert not {None, canary.GONE} & set(names.values()), (
            f"{name}: read it and run scripts/upstream/canary.py --only {name} --accept {name}"
        )


def test_what_adapters_import_of_frameworks_is_relied_on() -> None:
    packages = tuple(canary.FRAMEWORKS.values())
    imported = {
        f"{node.module}.{alias.name}"
        for path in (ROOT / "megatron_epp" / "frameworks").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(packages)
        for alias in node.names
    }
    assert len(imported) == 4
    named = [dotted for name in canary.FRAMEWORKS for dotted in READ[name]["names"]]
    for name in imported:
        assert any(f"{dotted}.".startswith(f"{name}.") for dotted in named)


def test_megatrons_fingerprints_are_those_of_the_installed_one() -> None:
    sources = checkout.Sources(installed())
    relied = canary.relied_on_of_megatron(sources)
    assert {one.target for one in ALL_PATCH_POINTS} < set(relied)
    used = {
        "megatron.core.pipeline_parallel.schedules.forward_step_calc_loss",  # by attribute
        "megatron.core.transformer.transformer_config.TransformerConfig",
        "megatron.training.arguments._add_moe_args",
        "megatron.training.arguments.parse_and_validate_args",
    }
    assert used < set(relied)
    read = READ[canary.MEGATRON]
    assert read["version"] == NEWEST
    found = {name: canary.fingerprint(sources, name) for name in relied if name in read["names"]}
    assert found == {name: read["names"][name] for name in found}
    assert len(found) > 150


def test_the_page_says_which_version_was_read() -> None:
    page = (ROOT / "docs" / "guides" / "frameworks.md").read_text()
    for name in canary.FRAMEWORKS:
        (row,) = re.findall(rf"^\| {name} \| (.+?) \|", page, flags=re.MULTILINE)
        assert row == READ[name]["version"]
    assert set(READ) == set(canary.NAMES)
