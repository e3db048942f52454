"""Examples that start ranks of their own, all of them forked from the tests' server.

As they stand, by torch.multiprocessing.spawn, they run in ``test_prove_it.py``.
"""

import runpy
import sys
from functools import partial
from pathlib import Path

from tests.mcore.runs import Run, train


def run_forked(program: Path) -> Run:
    """Run ``program``, whose ``spawn`` forks."""
    return train([str(program)], processes=0, program=(__file__,))


if __name__ == "__main__":
    import torch.multiprocessing

    torch.multiprocessing.spawn = partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    runpy.run_path(sys.argv[1], run_name="__main__")
