"""Checks of the environment variables with which a launcher sets the rank of a process."""

import os
from collections.abc import Mapping

import psutil

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_INTERFACE = "GLOO_SOCKET_IFNAME"
_TASKS = "SLURM_STEP_NUM_TASKS"


def require_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Raise a ValueError that names the first variable with an invalid value."""
    numbers = {name: _number(name, environ[name]) for name in _NUMBERS if name in environ}
    if "RANK" not in numbers and numbers.get("WORLD_SIZE", 1) > 1:
        raise _bad("WORLD_SIZE", environ["WORLD_SIZE"], "RANK as well, or neither")
    for name, most in (
        ("WORLD_SIZE", 10**7),
        ("LOCAL_WORLD_SIZE", numbers.get("WORLD_SIZE", 10**7)),
        ("MASTER_PORT", 65535),
    ):
        if not 1 <= numbers.get(name, 1) <= most:
            raise _bad(name, environ[name], f"a number from 1 to {most}")
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        most = numbers.get(size, 10**7) - 1
        if not 0 <= numbers.get(name, 0) <= most:
            raise _bad(name, environ[name], f"a number from 0 to {most}, below {size}")
    if "RANK" in environ and not environ.get("MASTER_ADDR", "127.0.0.1").strip():
        raise _bad("MASTER_ADDR", environ["MASTER_ADDR"], "a host's name or address")
    interfaces = environ.get(_INTERFACE, "")
    there = psutil.net_if_addrs()
    if interfaces and not set(interfaces.split(",")) <= set(there):
        raise _bad(_INTERFACE, interfaces, f"one of {', '.join(sorted(there))}")


def lone_copies(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if several Slurm tasks would each train as a separate job, else None."""
    tasks = environ.get(_TASKS, "")
    if "RANK" in environ or not tasks.isdecimal() or int(tasks) < 2:
        return None
    return (
        f"{_TASKS}={tasks} and no RANK in the environment: each of these tasks trains by itself; "
        "start torchrun with srun, one on each node, as examples/slurm does"
    )


def rank_of(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, world size) from the environment; missing or invalid values are 0 and 1."""
    numbers = []
    for name, default in (("RANK", 0), ("WORLD_SIZE", 1)):
        try:
            numbers.append(int(environ.get(name, default)))
        except ValueError:
            numbers.append(default)
    return numbers[0], numbers[1]


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _bad(name, text, "a whole number") from None


def _bad(name: str, text: str, expected: str) -> ValueError:
    return ValueError(
        f"{name}={text[:80]!r} in the environment: expected {expected}, as torchrun sets it; start "
        "with torchrun, or unset it"
    )
