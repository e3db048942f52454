"""The head of a result, the same for every benchmark: date, commit, command, hardware."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = shlex.join(  # as it was typed: those that run Megatron give it other words
    [f"scripts/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
)


def heading(hardware: str) -> str:
    """Markdown, up to an empty line; ``hardware`` is what was measured, or computed, on."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"## {datetime.date.today()}, commit {commit or 'unknown'}\n\n`{_COMMAND}`\n\n"
        f"{hardware}.\n\n"
    )


def host() -> str:
    """This host's processor, as far as it gives its name."""
    cpuinfo = Path("/proc/cpuinfo")
    named = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else ())
        if line.startswith("model name")
    ]
    processor = named[0] if named else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{processor}, {cores} cores, Python {platform.python_version()}"


def write(path: str | None, text: str) -> None:
    """To the end of a file, where one was named."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as out:
            out.write(text)
