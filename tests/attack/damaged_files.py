"""Damaged files of every kind: refused in one line, or read as what they still are.

Others are tests: every bit of an index in tests/corpus/test_idx_file.py, numbers of profiles and
devices in tests/cost/test_named.py, files beside a checkpoint in tests/control/test_kept_state.py,
tests/mcore/test_budget.py and test_fallbacks.py, links in tests/cli/test_cli.py.
"""

import gzip
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.attack.lines import EITHER, REFUSED, RUNS, Line, run_lines
from tests.attack.material import Material

SEED = 20260101
FLIPS = 24  # bits of one file, at random
# Good files that belong to the damaged one.
BESIDE = {
    "corpus.idx": ("corpus.bin",),
    "masked_mask.idx": ("masked_mask.bin", "masked.bin", "masked.idx"),
    "masked_mask.bin": ("masked_mask.idx", "masked.bin", "masked.idx"),
}


# The command line that reads a file in the place of a good one.
READERS: dict[str, Callable[[Material, str], tuple[str, ...]]] = {
    "good.plan": lambda good, path: ("check", path),
    "good.step": lambda good, path: ("simulate", path, *good.machine_words),
    "good.timed": lambda good, path: ("draw", str(good("good.plan")), "--records", path),
    "lens.txt": lambda good, path: (*good.plan_words, "--lengths", path),
    "corpus.idx": lambda good, path: (*good.plan_words, "--lengths", path),
    "masked_mask.idx": lambda good, path: (*good.plan_words, "--lengths", _masked(path)),
    "masked_mask.bin": lambda good, path: (*good.plan_words, "--lengths", _masked(path)),
    "model.json": lambda good, path: (*good.plan_words, "--model", path),
    "device.json": lambda good, path: (*good.plan_words, "--device", path),
    "profile.json": lambda good, path: (
        *good.plan_words,
        *("--cost-model", path, "--layers", "2", "2"),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_refused_in_one_line_or_read(
    material: Material, tmp_path: Path, name: str
) -> None:
    run_lines(list(damaged(material, name, tmp_path)), tmp_path)


def _masked(path: str) -> str:
    """The index of the tokens to which a file of their masks belongs."""
    mask = Path(path)
    return str(mask.with_name(mask.name.partition("_mask")[0]).with_suffix(".idx"))


def damaged(material: Material, name: str, folder: Path, every: int = 1) -> Iterator[Line]:
    """The file emptied, cut, flipped, doubled, recoded, nested; of these, every so manieth."""
    good = material(name)

    def reads(path: Path) -> tuple[str, ...]:
        return READERS[name](material, str(path))

    drawn = random.Random(f"{SEED} {name}")
    data = good.read_bytes()
    yield Line(reads(good), RUNS)
    cases: dict[str, tuple[bytes, str]] = {
        "empty": (b"", REFUSED),
        "blank": (b"\n \n\t\n", REFUSED),
        "nul": (b"\0" * 64, REFUSED),
        "not-text": (bytes(range(256)) * 4, REFUSED),
        "one-byte": (data[:1], EITHER),
        "twice": (data + data, EITHER),
        "backwards": (data[::-1], EITHER),
        "bom": (b"\xef\xbb\xbf" + data, EITHER),
        "crlf": (data.replace(b"\n", b"\r\n"), EITHER),
        "utf-16": (data.decode("latin-1").encode("utf-16"), EITHER),
        "deep": (b"[" * 200_000, REFUSED),
        "long-line": (b"9" * 1_000_000, REFUSED),
        "gz": (gzip.compress(data)[:-9], EITHER),
    }
    for number in range(8):
        cases[f"cut-{number}"] = (data[: drawn.randrange(1, len(data))], EITHER)
    for number in range(FLIPS):
        flipped = bytearray(data)
        flipped[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
        cases[f"flip-{number}"] = (bytes(flipped), EITHER)
    for number in range(FLIPS):  # a number of it is another one
        cases[f"number-{number}"] = (_other_number(data, drawn), EITHER)
    for case, (content, may) in list(cases.items())[::every]:
        path = folder / f"{case}-{name}{'.gz' * (case == 'gz')}"
        path.write_bytes(content)
        for other in BESIDE.get(name, ()):
            shutil.copy(good.with_name(other), path.with_name(f"{case}-{other}"))
        yield Line(reads(path), may)
    yield Line(reads(folder), REFUSED)
    yield Line(reads(folder / f"missing-{name}"), REFUSED)
    loop = folder / f"loop-{name}"
    loop.symlink_to(loop)
    yield Line(reads(loop), REFUSED)


_OTHER = (b"0", b"-1", b"99999999999999999999", b"1e308", b"nan", b"1.5", b"", b"x", b"Infinity")


def _other_number(data: bytes, drawn: random.Random) -> bytes:
    """``data`` with one run of digits replaced."""
    starts = [
        place
        for place in range(len(data))
        if data[place : place + 1].isdigit() and not data[place - 1 : place].isdigit()
    ]
    if not starts:
        return data[:-1]
    start = stop = drawn.choice(starts)
    while data[stop : stop + 1].isdigit():
        stop += 1
    return data[:start] + drawn.choice(_OTHER) + data[stop:]
