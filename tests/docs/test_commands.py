"""Every command in README.md, CONTRIBUTING.md and docs/ runs; of long ones, flags and paths exist.

A command is an indented line that begins with one of PROGRAMS. Commands of a page run one after
the other in one empty folder, in this process. LONG ones (training, minutes of work, what needs
another run's files) are only parsed, by Megatron's parser, torchrun's or the script's own: a flag
that is gone, a value that is refused, a path that has moved fail all the same. What needs several
nodes, a cluster or another checkout is marked "not run here" in the text in front of it.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments
from torch.distributed.run import get_args_parser

from megatron_epp.__main__ import main
from megatron_epp.certify.trial import certify_parser
from megatron_epp.cli.options import DOING, parse
from megatron_epp.flag_fields import add_flags
from megatron_epp.mcore.flags.config import add_arguments
from megatron_epp.mcore.trainer.profile_command import ProfileFlags
from tests.certify.trial import CheckedTrial
from tests.corpus.test_idx_file import write_pair

pytestmark = pytest.mark.everything

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("python", ".venv/bin/python", "bash", "torchrun", "export", "git", "sbatch", "srun")
QUICK = {"plan", "compare", "simulate", "draw", "check"}
# What would take minutes, or needs the files of a training run.
LONG = ("--batches 3", "records/iteration")
PYTHONS = ("python", ".venv/bin/python")
# Flags of Megatron follow: entry scripts, and launch scripts that append their arguments.
ENTRY = re.compile(r"megatron_epp\.pretrain_(gpt|hybrid)|examples/pretrain_gpt_epp\.sh|\w+\.sh")
FRAMEWORKS = ("frameworks", "verl")  # flags of theirs
ELSEWHERE = re.compile(r"sbatch|srun|.*--nnodes|.*Megatron-LM/")


def commands(text: str) -> list[list[str]]:
    """The words of every command, lines that end with a backslash joined, comments cut."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"^    (\S.*)$", joined, re.M)
    words = [shlex.split(line, comments=True) for line in found if line.split()[0] in PROGRAMS]
    return [[word.strip("<>") for word in line] for line in words]


def require(words: list[str], folder: Path) -> None:
    """Run the command, or check what can be without running it."""
    line = " ".join(words)
    for word in words:
        # Only paths of the repository have both a folder of it in front and an ending.
        if re.fullmatch(r"(scripts|examples|docs|tests|patches|megatron_epp)/\S+", word):
            path, _, test = word.partition("::")
            assert (ROOT / path).exists(), f"{line}: there is no {path}"
            if test:
                assert f"def {test}(" in (ROOT / path).read_text(), f"{line}: there is no {test}"
    entry = next((i for i, word in enumerate(words) if ENTRY.fullmatch(word)), 0)
    if entry and words[0] in ("torchrun", "bash"):
        if words[0] == "torchrun":
            get_args_parser().parse_args([*words[1:entry], "script"])
        require_flags(line, words[entry + 1 :])
    elif words[1:3] == ["-m", "tests.certify"]:
        require_flags(line, certify_parser(CheckedTrial).parse_known_args(words[3:])[1])
    elif words[1:3] == ["-m", "megatron_epp"]:
        command, *rest = words[3:]
        if command in DOING:
            own = certify_parser() if command == "certify" else argparse.ArgumentParser()
            if command == "profile":
                add_flags(own, ProfileFlags)
            require_flags(line, own.parse_known_args(rest)[1])
            return
        parse([command, *rest])
        if command in QUICK and not any(mark in line for mark in LONG):
            assert main([command, *rest]) == 0, line
    elif words[0] in PYTHONS and words[1].endswith(".py") and (ROOT / words[1]).exists():
        script = (ROOT / words[1]).read_text()
        for flag in (word.split("=")[0] for word in words if word.startswith("--")):
            assert f'"{flag}"' in script, f"{line}: {words[1]} has no {flag}"


def require_flags(line: str, words: list[str]) -> None:
    """Parse flags of a training job as Megatron does, and ours among them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    flags = [word for word in words if word not in ("FLAGS", "Megatron-LM", "flags")]
    _, unknown = add_arguments(add_megatron_arguments(parser)).parse_known_args(flags)
    assert not unknown, f"{line}: there is no {' '.join(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_pair(tmp_path / "my", [9001, 1501, 901, 301, 13, 4001, 2501, 60001] * 4)
    for words in commands(page.read_text()):
        require(words, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_alone_are_some_of_megatron(page: Path) -> None:
    """A block of flags, to add to a command of the page."""
    if page.stem not in FRAMEWORKS:
        for line in re.findall(r"\n\n    (--\w[^:\n]*)\n\n", page.read_text()):
            require_flags(line, shlex.split(line, comments=True))


def test_what_runs_elsewhere_is_marked() -> None:
    """Several nodes, a cluster, another checkout: "not run here" stands in front."""
    for page in PAGES:
        for block in re.findall(r"(?m)(?:^\S.*\n)*\n(?:^    .*\n)+", page.read_text()):
            text, *_ = block.partition("\n\n")
            for words in commands(block):
                if ELSEWHERE.match(" ".join(words)):
                    assert "not run here" in text, f"{page.name}: {' '.join(words)}"


def test_pages_have_commands() -> None:
    """The extraction finds them: the README alone has these."""
    readme = [" ".join(words[:4]) for words in commands(PAGES[0].read_text())]
    for command in ("tune", "compare", "certify"):
        assert f"python -m megatron_epp {command}" in readme
    assert "bash examples/quickstart.sh" in readme


@pytest.mark.parametrize(
    "line",
    [
        "    python -m megatron_epp plan --lengths wlb --stages 4",
        "    torchrun -m megatron_epp.pretrain_gpt FLAGS --epp --epp-levels all",
        "    torchrun -m megatron_epp.pretrain_gpt FLAGS --epp --num-layers many",
        "    torchrun --nprocs 2 -m megatron_epp.pretrain_gpt FLAGS --epp",
        "    bash go.sh --train-iter 3",
        "    python scripts/lost_work.py --machines 3",
        "    bash scripts/set_up.sh",
        "    python -m pytest tests/ir/test_text.py::test_of_nothing",
        "    python -m megatron_epp certify --steps 20",
    ],
)
def test_a_wrong_command_is_found(line: str, tmp_path: Path) -> None:
    (words,) = commands(line)
    with pytest.raises((AssertionError, ValueError, SystemExit, argparse.ArgumentError)):
        require(words, tmp_path)


def test_links_and_paths_exist() -> None:
    """What the pages name between backticks as a path of the repository is there."""
    package = {child.name for child in (ROOT / "megatron_epp").iterdir()}
    missing = []
    for page in PAGES:
        for word in re.findall(r"`([\w.-]+/[\w./-]*)`", page.read_text()):
            first = word.split("/")[0]
            base = ROOT / "megatron_epp" if first in package else ROOT
            if "NAME" in word or "DATE" in word:  # of a kind, a framework, a day
                continue
            if (base / first).is_dir() and not (base / word).exists():
                missing.append(f"{page.relative_to(ROOT)}: {word}")
    assert not missing
