"""Attacks the package as a careless user, a failing machine and an adversary would.

    .venv/bin/python -m tests.attack             everything; --collect-only lists it
    .venv/bin/python -m tests.attack -k "lines"  some of it

Run on demand, from the project's folder; the words are pytest's, whose suite tries a few attacks
(test_attack.py). A command line is bounded in memory and time.
"""

import os
import sys
from pathlib import Path

import pytest

PARTS = ("lines", "damaged_files", "training", "signals", "soak")

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    files = [str(Path(__file__).with_name(f"{part}.py")) for part in PARTS]
    sys.exit(pytest.main(["--verbose", *files, *sys.argv[1:]]))
