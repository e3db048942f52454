"""Environment variables of a launcher: the rank of a process, Slurm's tasks, gloo's interface."""

import os
from collections.abc import Mapping

import psutil

_INTERFACE = "GLOO_SOCKET_IFNAME"
_TASKS = "SLURM_STEP_NUM_TASKS"


def require_interface(environ: Mapping[str, str] = os.environ) -> None:
    """Raise a ValueError if GLOO_SOCKET_IFNAME names an interface that this host does not have."""
    interfaces = environ.get(_INTERFACE, "")
    there = psutil.net_if_addrs()
    if interfaces and not set(interfaces.split(",")) <= set(there):
        raise ValueError(
            f"{_INTERFACE}={interfaces[:80]!r} in the environment: expected one of "
            f"{', '.join(sorted(there))}"
        )


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
