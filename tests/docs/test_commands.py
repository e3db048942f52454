"""Every command in README.md, CONTRIBUTING.md and docs/ runs; of long ones, flags and paths exist.

A command is an indented line that begins with one of PROGRAMS. Commands of a page run one after
the other in one empty folder, in this process. LONG ones (training, minutes of work, what needs
another run's files) are only parsed: a flag that is gone, a path that has moved fail all the same.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cli.options import DOING, parse
from tests.corpus.test_idx_file import write_pair

pytestmark = pytest.mark.everything

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("python", ".venv/bin/python", "bash", "torchrun", "export", "git")
QUICK = {"plan", "compare", "simulate", "draw", "check"}
# What would take minutes, or needs the files of a training run.
LONG = ("--batches 3", "records/iteration")
# Flags of the programs that stand in front of ours.
LAUNCHERS = {"--nproc-per-node", "--nnodes", "--standalone"}


def commands(text: str) -> list[list[str]]:
    """The words of every command, lines that end with a backslash joined, comments cut."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"^    (\S.*)$", joined, re.M)
    words = [shlex.split(line, comments=True) for line in found if line.split()[0] in PROGRAMS]
    return [[word.strip("<>") for word in line] for line in words]


def epp_flags() -> set[str]:
    from megatron_epp.mcore.flags.config import add_arguments

    return _flags(add_arguments(argparse.ArgumentParser()))


def require(words: list[str], folder: Path) -> None:
    """Run the command, or check what can be without running it."""
    line = " ".join(words)
    for word in words:
        if word.startswith("--epp"):
            assert word in epp_flags(), f"{line}: there is no flag {word}"
        # Only paths of the repository have both a folder of it in front and an ending.
        if re.fullmatch(r"(scripts|examples|docs|tests|patches|megatron_epp)/\S+", word):
            path, _, test = word.partition("::")
            assert (ROOT / path).exists(), f"{line}: there is no {path}"
            if test:
                assert f"def {test}(" in (ROOT / path).read_text(), f"{line}: there is no {test}"
    if words[1:3] != ["-m", "megatron_epp"]:
        return
    command, *rest = words[3:]
    if command in DOING:
        from megatron_epp.certify.trial import certify_parser

        known = _flags(certify_parser()) | _megatron_flags()
        for flag in (word.split("=")[0] for word in rest if word.startswith("--")):
            assert flag in known, f"{line}: there is no flag {flag}"
        return
    parse([command, *rest])
    if command in QUICK and not any(mark in line for mark in LONG):
        assert main([command, *rest]) == 0, line


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def _megatron_flags() -> set[str]:
    """What `profile` hands to Megatron, as its parser would spell it."""
    from megatron.training.arguments import add_megatron_arguments

    return _flags(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_pair(tmp_path / "my", [9001, 1501, 901, 301, 13, 4001, 2501, 60001] * 4)
    for words in commands(page.read_text()):
        require(words, tmp_path)


def test_pages_have_commands() -> None:
    """The extraction finds them: the README alone has these."""
    readme = [" ".join(words[:4]) for words in commands(PAGES[0].read_text())]
    for command in (*QUICK, "certify"):
        assert f"python -m megatron_epp {command}" in readme
    assert "bash examples/quickstart.sh" in readme


@pytest.mark.parametrize(
    "line",
    [
        "    python -m megatron_epp plan --lengths wlb --stages 4",
        "    torchrun -m megatron_epp.pretrain_gpt FLAGS --epp --epp-levels all",
        "    bash scripts/set_up.sh",
        "    python -m pytest tests/ir/test_text.py::test_of_nothing",
        "    python -m megatron_epp certify --steps 20",
    ],
)
def test_a_wrong_command_is_found(line: str, tmp_path: Path) -> None:
    (words,) = commands(line)
    with pytest.raises((AssertionError, ValueError)):
        require(words, tmp_path)


def test_links_and_paths_exist() -> None:
    """What the pages name between backticks as a path of the repository is there."""
    package = {child.name for child in (ROOT / "megatron_epp").iterdir()}
    missing = []
    for page in PAGES:
        for word in re.findall(r"`([\w.-]+/[\w./-]*)`", page.read_text()):
            first = word.split("/")[0]
            base = ROOT / "megatron_epp" if first in package else ROOT
            if "NAME" in word:  # of a kind, a framework
                continue
            if (base / first).is_dir() and not (base / word).exists():
                missing.append(f"{page.relative_to(ROOT)}: {word}")
    assert not missing
