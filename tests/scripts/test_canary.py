"""What moved in wheels, said from their sources, on small ones that are made up; and what is relied
on, which the code itself names."""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_epp.mcore.patching.patch_points import ALL_PATCH_POINTS
from megatron_epp.mcore.patching.releases import NEWEST
from tests.scripts.test_check_upstream import installed

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "upstream"))

import canary  # noqa: E402
import checkout  # noqa: E402

NAMES = ("f", "through", "Config", "Engine.step", "LIMIT", "moved_away")
BEFORE = {
    "packing.py": """
        from verl.inner import through

        LIMIT = 4

        def f(rows, each=1):
            '''Pad.'''
            return rows + each  # a comment

        class Config:
            rows: int = 1
            name = "a"

            def check(self):
                return True

        class Engine:
            def step(self):
                return 1

        def moved_away():
            pass
        """,
    "inner.py": "def through(x):\n    return x\n",
}


def made(folder: Path, version: str, changes: tuple[tuple[str, str, str], ...] = ()) -> None:
    """A wheel of verl: BEFORE, with ``changes`` of (file, old, new)."""
    files = {
        name: "\n".join(line.removeprefix(" " * 8) for line in text.splitlines())
        for name, text in BEFORE.items()
    }
    for name, old, new in changes:
        assert files[name].count(old) == 1
        files[name] = files[name].replace(old, new)
    with zipfile.ZipFile(folder / f"verl-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("verl/__init__.py", "raise ImportError('imported')")
        archive.writestr("verl/data.bin", b"\0")
        for name, text in files.items():
            archive.writestr(f"verl/{name}", text)


@pytest.fixture
def look(tmp_path, monkeypatch, capsys):
    """Runs the script over the wheels of a folder; version 1.9 of verl is read."""
    relied = tuple(f"verl.packing.{name}" for name in NAMES)
    monkeypatch.setattr(canary, "named_by_frameworks", lambda: relied)
    read, wheels = tmp_path / "read.json", tmp_path / "wheels"
    wheels.mkdir()
    made(wheels, "1.9")
    read.write_text(json.dumps({"verl": {"version": "none", "names": {}}}))

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


def test_nothing_moved(look) -> None:
    """Comments, layout and docstrings are no code."""
    status, (row,) = look()
    assert status == 0 and re.sub(" +", " ", row) == "verl read: 1.9 newest: 1.9 0 of 6 moved"
    changes = (
        ("packing.py", "'''Pad.'''", "'''Pad rows.'''"),
        ("packing.py", "rows + each  # a comment", "(rows +\n        each)"),
        ("packing.py", "def step(self):", "def other(self):\n        pass\n\n    def step(self):"),
        ("packing.py", "LIMIT = 4", "LIMIT = 5  # its value is not code that is read"),
    )
    made(look.wheels, "1.10", changes)
    status, (row,) = look()
    assert status == 0 and "newest: 1.10" in row and "0 of 6 moved" in row


def test_what_moved_is_named(look) -> None:
    changes = (
        ("packing.py", "each=1", "each=1, *, align"),
        ("packing.py", "rows + each", "rows * each, '--mix'"),
        ("packing.py", "    rows: int = 1\n", "    rows: int = 2\n    mixed: bool = False\n"),
        ("packing.py", '    name = "a"\n', ""),
        ("packing.py", "return True", "return False"),
        ("packing.py", "return 1\n", "return 2\n"),
        ("packing.py", "def moved_away", "def moved"),
        ("inner.py", "return x", "return -x"),
    )
    made(look.wheels, "1.10", changes)
    status, (row, *lines) = look()
    assert status == 1 and "read: 1.9" in row and "newest: 1.10" in row and "5 of 6 moved" in row
    said = [line.strip().removeprefix("verl.packing.") for line in lines]
    assert said == [
        "f: new: argument align, flag --mix; changed: its body",
        "through: changed: its body",
        "Config: new: mixed; gone: name; changed: check, rows",
        "Engine.step: changed: its body",
        "moved_away: gone",
    ]
    (look.wheels / "verl-1.9-py3-none-any.whl").unlink()  # as after a withdrawal
    assert look()[1][1].strip() == "verl.packing.f: changed"
    assert look("--accept", "verl")[0] == 0
    status, (row,) = look()
    assert status == 0 and "read: 1.10" in row


def test_what_became_relied_on_since_was_read_with_its_version(look, monkeypatch) -> None:
    names = tuple(f"verl.packing.{name}" for name in (*NAMES, "Engine"))
    monkeypatch.setattr(canary, "named_by_frameworks", lambda: names)
    assert look()[0] == 0
    made(look.wheels, "2.0", (("packing.py", "return 1\n", "return 2\n"),))
    assert [line.strip() for line in look()[1][1:]] == [
        "verl.packing.Engine.step: changed: its body",
        "verl.packing.Engine: changed: step",
    ]


def test_what_cannot_be_had(look, tmp_path, capsys) -> None:
    status, (row,) = look("--checkout", f"verl={tmp_path}")
    assert status == 2
    assert row.endswith(f"--checkout verl={tmp_path}: holds no package verl")
    (look.wheels / "verl-3.0-py3-none-any.whl").write_bytes(b"no archive")
    status, (row,) = look()
    assert status == 2 and row.endswith("verl-3.0-py3-none-any.whl: File is not a zip file")
    for wheel in look.wheels.iterdir():
        wheel.unlink()
    status, (row,) = look()
    assert status == 2 and row.endswith(f"{look.wheels}: holds no verl-*-*.whl")
    with pytest.raises(SystemExit) as ended:
        canary.main(["--checkout", "verl"])
    assert ended.value.code == 2
    assert "--checkout verl: expected NAME=PATH with one of Megatron" in capsys.readouterr().err


def test_a_package_without_wheels_is_looked_at_in_a_checkout(tmp_path, monkeypatch, capsys) -> None:
    relied = "slime.distributed.packing.pack"
    monkeypatch.setattr(canary, "named_by_frameworks", lambda: (relied,))
    read = tmp_path / "read.json"
    read.write_text(json.dumps({"slime": {"version": "8eb27cc2", "names": {}}}))
    words = ["--only", "slime", "--read", str(read)]
    assert canary.main(words) == 0
    said = capsys.readouterr().out
    assert "read: 8eb27cc2" in said and "no wheel: clone it for --checkout slime=PATH" in said
    folder = tmp_path / "src" / "slime" / "distributed"
    folder.mkdir(parents=True)
    (folder / "packing.py").write_text("def pack(x):\n    return x\n")
    words += ["--checkout", f"slime={tmp_path}"]
    assert canary.main(words) == 1 and f"{relied}: not read yet" in capsys.readouterr().out
    assert canary.main([*words, "--accept", "slime"]) == 0 == canary.main(words)


# ------------------------------------------------------------------ what is relied on

READ = json.loads(canary.READ.read_text())


def test_every_framework_names_what_its_adapter_relies_on() -> None:
    sources = checkout.Sources(ROOT / "nowhere")
    named = [set(canary.relied_on(name, sources)) for name in canary.FRAMEWORKS]
    assert all(named)
    assert set().union(*named) == set(canary.named_by_frameworks())
    for name, names in zip(canary.FRAMEWORKS, named, strict=True):
        assert names == set(READ[name]["names"]), (
            f"{name}: read it and run scripts/upstream/canary.py --only {name} --accept {name}"
        )
        assert canary.GONE not in READ[name]["names"].values()


def test_what_adapters_import_of_frameworks_is_relied_on() -> None:
    packages = tuple(canary.FRAMEWORKS.values())
    imported = set()
    for path in (ROOT / "megatron_epp" / "frameworks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(packages):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert len(imported) == 4
    for name in imported:
        assert any(f"{dotted}.".startswith(f"{name}.") for dotted in canary.named_by_frameworks())


def test_megatrons_fingerprints_are_those_of_the_installed_one() -> None:
    sources = checkout.Sources(installed())
    relied = canary.relied_on(canary.MEGATRON, sources)
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
