"""Command to run a script in scheduling mode: ``python -m megatron_epp.run SCRIPT [ARGUMENTS]``.

    torchrun --nproc-per-node 8 -m megatron_epp.run pretrain_gpt.py ARGUMENTS
    python -m megatron_epp.run -m PACKAGE.MODULE ARGUMENTS

MEGATRON_EPP=0 runs the script unchanged. Other processes that the script starts, such as Ray's
workers, need the variable MEGATRON_EPP=1: see docs/guides/frameworks.md.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_epp.autoload import VARIABLE, asked, switch_on

USAGE = "python -m megatron_epp.run SCRIPT [ARGUMENTS], or -m MODULE [ARGUMENTS]"


def main(words: Sequence[str]) -> int:
    """Run a script or module and return the exit status.

    Returns:
        0 after the script has run; 2 if there is no such script, or if the value of MEGATRON_EPP
        is invalid. A script that calls ``sys.exit`` sets the exit status itself.
    """
    module = words[:1] == ["-m"]
    rest = list(words[module:])
    try:
        if not rest:
            raise ValueError(f"no script is named; usage: {USAGE}")
        if not module and not Path(rest[0]).is_file():
            raise ValueError(f"no script {rest[0]}; usage: {USAGE}")
        if asked(os.environ.get(VARIABLE, "1")):
            switch_on()
    except ValueError as refusal:
        print(f"megatron_epp: error: {refusal}", file=sys.stderr)
        return 2
    sys.argv = rest
    if module:
        sys.path[:0] = [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [str(Path(rest[0]).resolve().parent)]
        runpy.run_path(rest[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
