"""Writes or compares the golden plans of ``tests/golden``: 50 batches through the command line.

    python tests/planner/golden_plans.py           # names the plans that changed, exit status 1
    python tests/planner/golden_plans.py --write   # rewrites them, to be reviewed as a diff

A plan is a pure function of lengths, flags and cost model, so its text may change only where
somebody meant to change what the planner does.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "golden"

_LLAMA = "--model llama3-8b --device h100-80g"
_GPT = "--model gpt-13b --device a100-80g --zero 3"
_LINES = (
    f"wlb 0 {_GPT} --pp 4 --cp 8 --context 98304 --global-batch-size 64",
    f"prolong 1 {_LLAMA} --pp 4 --cp 8 --context 98304 --global-batch-size 64",
    f"wikipedia 2 {_LLAMA} --pp 4 --cp 8 --context 65536 --global-batch-size 64",
    f"wlb 3 {_LLAMA} --pp 8 --cp 4 --context 98304 --global-batch-size 48",
    f"wlb 4 {_GPT} --pp 2 --cp 8 --context 32768 --global-batch-size 64",
    f"prolong 5 {_LLAMA} --pp 4 --cp 4 --context 65536 --global-batch-size 32",
    f"wlb 6 {_LLAMA} --pp 4 --cp 8 --context 98304 --global-batch-size 64 --zero 1",
    f"wlb 7 {_GPT} --pp 4 --cp 8 --context 98304 --global-batch-size 64 --memory-budget-gib 30",
    f"wlb 8 {_LLAMA} --pp 4 --cp 8 --context 65536 --global-batch-size 64 --multiple 128",
    f"wlb 9 {_LLAMA} --pp 4 --cp 8 --context 65536 --global-batch-size 64 --effort 1",
    f"wlb 0 {_LLAMA} --pp 4 --cp 8 --context 131072 --global-batch-size 64",
    f"prolong 1 {_LLAMA} --pp 4 --tp 8 --context 65536 --global-batch-size 64 --placement auto",
    f"wikipedia 2 {_LLAMA} --pp 4 --tp 4 --context 32768 --global-batch-size 64",
    f"wlb 3 {_LLAMA} --pp 2 --tp 8 --context 65536 --global-batch-size 32 --placement auto",
    f"wlb 4 {_LLAMA} --pp 8 --tp 4 --context 65536 --global-batch-size 64",
    f"wlb 5 {_LLAMA} --pp 1 --tp 8 --context 32768 --global-batch-size 32",
    f"wlb 6 {_LLAMA} --pp 4 --tp 8 --dp 2 --context 65536 --global-batch-size 64 --placement auto",
    f"wikipedia 7 {_LLAMA} --pp 2 --tp 8 --dp 4 --context 16384 --global-batch-size 64",
    f"wlb 8 {_LLAMA} --pp 4 --tp 8 --context 65536 --global-batch-size 32 --layers 9 8 8 7",
    f"wlb 9 {_LLAMA} --pp 4 --tp 8 --context 65536 --global-batch-size 32 --layers 9 8 8 7",
    f"wlb 10 {_LLAMA} --pp 4 --tp 4 --context 65536 --global-batch-size 32 --overlong drop"
    " --placement auto",
    f"wlb 11 {_LLAMA} --pp 4 --tp 4 --context 16384 --global-batch-size 32 --overlong split",
    f"wlb 12 {_LLAMA} --pp 4 --tp 8 --context 65536 --global-batch-size 64 --forward-only",
    f"wlb 13 {_LLAMA} --pp 2 --tp 8 --dp 2 --context 65536 --global-batch-size 64 --forward-only",
    "wlb 0 --model gpt-7b --device a100-40g --zero 3 --pp 4 --cp 8 --context 98304"
    " --global-batch-size 64",
    "prolong 1 --model gpt-30b --device a100-80g --zero 3 --pp 8 --cp 4 --context 65536"
    " --global-batch-size 64",
    "wlb 2 --model llama3-70b --device h200-141g --pp 8 --tp 8 --context 131072"
    " --global-batch-size 32 --placement auto",
    "wlb 3 --model llama3-70b --device h100-80g --pp 8 --tp 8 --cp 2 --context 65536"
    " --global-batch-size 32",
    f"wlb 0 {_GPT} --pp 4 --cp 8 --context 98304 --global-batch-size 64 --planner infinipipe",
    f"prolong 1 {_LLAMA} --pp 4 --cp 8 --context 65536 --global-batch-size 64 --planner infinipipe",
    f"wlb 2 {_LLAMA} --pp 4 --tp 8 --dp 2 --context 65536 --global-batch-size 64"
    " --planner infinipipe",
    f"wlb 3 {_GPT} --pp 4 --cp 8 --context 98304 --global-batch-size 64 --planner packing",
    f"wikipedia 4 {_LLAMA} --pp 4 --tp 8 --dp 2 --context 32768 --global-batch-size 64"
    " --planner packing",
    f"wlb 5 {_GPT} --pp 4 --cp 8 --context 65536 --global-batch-size 64 --planner seq1f1b",
    f"prolong 6 {_LLAMA} --pp 4 --tp 8 --context 65536 --global-batch-size 32 --planner seq1f1b",
    f"wlb 7 {_LLAMA} --pp 4 --cp 8 --context 65536 --global-batch-size 64 --planner chunkflow",
    f"wikipedia 8 {_LLAMA} --pp 8 --tp 4 --context 32768 --global-batch-size 64"
    " --planner chunkflow",
    f"wlb 20 {_LLAMA} --pp 4 --cp 8 --context 98304 --global-batch-size 128 --effort 0",
    f"wlb 21 {_LLAMA} --pp 3 --cp 8 --context 49152 --global-batch-size 64 --layers 11 11 10",
    f"wikipedia 22 {_LLAMA} --pp 4 --cp 8 --context 196608 --global-batch-size 64",
    f"wlb 23 {_LLAMA} --pp 4 --cp 8 --context 65536 --global-batch-size 128 --effort 1",
    # Interleaved and V placements, with ample and with tight memory, planned by ``epp``.
    f"wlb 0 {_LLAMA} --pp 2 --tp 8 --placement interleaved 2 --context 65536"
    f" --global-batch-size 32",
    f"wlb 1 {_LLAMA} --pp 2 --tp 8 --placement v --context 65536 --global-batch-size 32"
    f" --memory-budget-gib 11",
    f"prolong 2 {_GPT} --pp 4 --cp 8 --placement v --context 65536 --global-batch-size 32",
    f"wikipedia 3 {_LLAMA} --pp 4 --tp 8 --placement interleaved 2 --context 32768"
    " --global-batch-size 64",
    "wlb 4 --model gpt-7b --device a100-40g --zero 3 --pp 4 --cp 8 --placement interleaved 2"
    " --context 98304 --global-batch-size 64 --memory-budget-gib 14",
    "wlb 5 --model llama3-70b --device h200-141g --pp 4 --tp 8 --placement v --context 65536"
    " --global-batch-size 16",
    f"wlb 6 {_LLAMA} --pp 4 --tp 4 --cp 2 --placement v --context 65536 --global-batch-size 32"
    f" --vocab-parallel on",
    f"prolong 7 {_LLAMA} --pp 2 --tp 8 --dp 2 --placement interleaved 2 --context 65536"
    f" --global-batch-size 32 --vocab-parallel off --memory-budget-gib 10",
    f"wikipedia 8 {_LLAMA} --pp 4 --tp 8 --dp 2 --placement interleaved 2 --context 32768"
    " --global-batch-size 32 --planner packing-best",
)


def cases() -> Iterator[tuple[Path, list[str]]]:
    """The file of every golden plan, and the command line that makes it."""
    for number, line in enumerate(_LINES):
        lengths, batch, *options = line.split()
        placed = "-placed" if "--placement" in options else ""
        if not placed:
            options += ["--placement", "even"]
        yield (
            FOLDER / f"{number:02}-{lengths}{placed}.plan",
            ["plan", "--lengths", lengths, "--batch", batch, *options],
        )


def make(arguments: list[str]) -> str:
    """The text that the command line prints; ``ValueError`` where it refuses."""
    from megatron_epp.__main__ import main

    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        status = main(arguments)
    if status:
        raise ValueError(f"{' '.join(arguments)}: exit status {status}: {told.getvalue()}")
    return printed.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="rewrite the golden files")
    write = parser.parse_args().write
    changed = []
    every = list(cases())
    for path, arguments in every:
        text = make(arguments)
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            changed.append(path.name)
            print(f"{path.name}: changed: {' '.join(arguments)}")
    print(f"{len(every)} plans, {len(changed)} changed" if not write else "written")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
