"""Every file that a user names is read within a bound; every output is whole, and follows no link.

The last tests read the package's source: a reader or writer of its own that is not on the list
below fails, so that the next one is bounded and whole as well.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_epp.safe_files import (
    bounded_lines,
    bounded_text,
    open_regular,
    read_bounded,
    replace_file,
)

PACKAGE = Path(__file__).parents[1] / "megatron_epp"
READERS = {"read_text", "read_bytes", "open", "load"}
WRITERS = {"write_text", "write_bytes"}
# What reads or writes files by itself, and why it may.
ALLOWED = {
    "safe_files.py": "the reader and the writer",
    "control/files.py": "a lock in a folder that nobody else can enter",
    "cli/files.py": "writes to devices and pipes, as they are",
    "cli/megatron_flags.py": "the source of Megatron and of this package",
    "certify/processes.py": "a log in a folder of its own",
    "corpus/idx_file.py": "maps an index, whose header says how long it is",
    "corpus/lengths.py": "reads as much as the bound allows; its own file of distributions",
    "mcore/trainer/profile_command.py": "a log in a folder of its own",
    "mcore/calibrate/profile_file.py": "/proc/cpuinfo",
    "mcore/data/chat_cache.py": "a digest, block by block",
    "mcore/job/job_cost.py": "/sys/fs/cgroup",
    "runtime/malloc_trim.py": "/proc/self/statm",
    "show/page.py": "parts of the page, in the package",
    "__main__.py": "/dev/null",
    "cost/catalogue/accuracy.py": "data of the package",
    "mcore/patching/releases.py": "Megatron's own version",
}


def unbounded(source: str) -> Iterator[int]:
    """Lines that read or write a file without safe_files."""
    tree = ast.parse(source)
    bounded = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").endswith(("safe_files", ".files"))
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        method = getattr(node.func, "attr", None)
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if method == "load" and owner not in ("json", "np", "numpy", "torch", "pickle"):
            continue
        name = method or getattr(node.func, "id", "")
        if name in READERS | WRITERS and (method is not None or name not in bounded):
            yield node.lineno


def test_every_file_is_read_within_a_bound_and_written_whole() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := list(unbounded(path.read_text())))
    }
    assert {name: lines for name, lines in found.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() - found.keys() == set()


@pytest.mark.parametrize(
    "source",
    [
        "Path(name).read_text()",
        "json.load(file)",
        "with open(name) as file: pass",
        "read_placement(text, 2, lambda path: Path(path).read_text('utf-8'))",
        "path.write_text('x')",
    ],
)
def test_a_reader_of_its_own_is_found(source: str) -> None:
    assert list(unbounded(source)) == [1]
    assert not list(
        unbounded("from megatron_epp.safe_files import read_text\nread_text(name, 'x')")
    )


def test_what_has_no_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="longer than 16 MiB; expected a list"):
        bounded_text("/dev/zero", "a list")
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe; expected a list in a regular file"):
        read_bounded(pipe, 1, "a list")
    with pytest.raises(ValueError, match="/dev/zero, line 1: longer than 16 MiB; expected words"):
        list(bounded_lines("/dev/zero", "words"))
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"is not UTF-8 text .* at byte 2"):
        bounded_text(tmp_path / "binary", "a list")


def test_a_link_under_the_name_of_an_output_is_replaced(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    output = tmp_path / "iteration-000001.step"
    output.symlink_to(victim)
    replace_file(output, "step v1\n")
    assert victim.read_text() == "precious"
    assert not output.is_symlink() and output.read_text() == "step v1\n"
    output.unlink()
    os.mkfifo(output)  # opening it would wait for a reader
    replace_file(output, b"step v1\n")
    assert output.read_bytes() == b"step v1\n"


def test_an_output_that_cannot_be_whole_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    output = tmp_path / "a.plan"
    output.write_text("old")
    output.chmod(0o640)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(output, "new", durable=True)
    assert output.read_text() == "old" and os.listdir(tmp_path) == ["a.plan"]
    replace_file(output, "newer")
    assert output.read_text() == "newer" and output.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_a_lock_is_taken_on_a_plain_file_alone(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "epp-job.lock", tmp_path / "victim"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(victim)
        if kind == "link":
            victim.write_text("precious")
    with pytest.raises(OSError):
        os.close(open_regular(path))
    assert victim.exists() == (kind == "link")
    assert not victim.exists() or victim.read_text() == "precious"
