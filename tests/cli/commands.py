"""Command lines, as they are typed, run in this process; and what they print."""

import json
import re
import shlex
from typing import Any

from megatron_epp.__main__ import main
from tests.show.plans import EXAMPLE

LENGTHS = (9000, 1500, 900, 300, 12, 4000, 2500)
LONG_AND_SHORT = (8000, 6000, 3000, 2500, 1500, 900, 500, 300)
# A small machine: plans in a blink.
MACHINE = "--model gpt-7b --device a100-80g --cp 8"
GPT = f"{MACHINE} --zero 3"
# For GPT, on two stages; nothing is recomputed.
PLAN = re.sub("recompute.*\n", "", EXAMPLE).replace("layers 4 4", "layers 16 16")


class Commands:
    """Runs command lines and returns what they print."""

    def __init__(self, capsys: Any):
        self._capsys = capsys

    def ran(self, line: str, status: int = 0) -> Any:
        """Both streams (out, err) of a command that ends with ``status``."""
        assert main(shlex.split(line)) == status, self._capsys.readouterr().err
        return self._capsys.readouterr()

    def said(self, line: str) -> str:
        return self.ran(line).out

    def joined(self, line: str) -> str:
        """What it says, as one line: the commands wrap theirs."""
        return " ".join(self.said(line).split())

    def facts(self, line: str) -> Any:
        return json.loads(self.said(f"{line} --json"))

    def refused(self, line: str) -> str:
        """The one line of a refusal."""
        error = self.ran(line, 2).err
        assert error.startswith("megatron_epp: error: ")
        assert error.count("\n") == 1 and error.endswith("\n")
        return error
