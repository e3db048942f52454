"""Strikes: a process is killed, stopped or cut off from the network at a named moment of training.

The last rank of a job takes the strikes that its environment lists, in their order and each once,
at the moment itself: nothing depends on how fast anything is. No strike needs privileges; a process
closes or silences its own sockets when another asks it to by a signal (:func:`listen`). Imports no
torch: agents of torchrun listen, too.
"""

import ctypes
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LIST, FOLDER = "EPP_ATTACK_STRIKES", "EPP_ATTACK_STRIKES_FOLDER"
# "close": the other ends see the connections close. "silence": what others send is dropped without
# an answer, as by a switch that fails.
CLOSE, SILENCE = signal.SIGRTMIN + 4, signal.SIGRTMIN + 5
HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "close": CLOSE, "silence": SILENCE}
MOMENTS = ("iteration", "save", "evaluation", "restart")
# Of two nodes with a rank each: the last rank, the first, the agent of the last rank's node, the
# agent of the first's, which keeps the rendezvous, the last rank's whole node, all ranks.
TARGETS = ("rank", "first", "agent", "keeper", "node", "ranks")
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0 bytes


@dataclass(frozen=True, slots=True)
class Strike:
    """``how`` and ``target`` at a moment of an iteration; at a restart, of whichever it is."""

    how: str
    target: str
    moment: str
    iteration: int = 0

    def __str__(self) -> str:
        """Return the words that :meth:`read` reads."""
        return f"{self.how} {self.target} {self.moment} {self.iteration}"

    @classmethod
    def read(cls, text: str) -> "Strike":
        """Read what was printed."""
        how, target, moment, iteration = text.split()
        return cls(how, target, moment, int(iteration))


def environment(strikes: Sequence[Strike], folder: Path) -> dict[str, str]:
    """Return the variables by which a job's ranks know what to do."""
    return {LIST: ";".join(map(str, strikes)), FOLDER: str(folder)}


# ------------------------------------------------------------------ in a rank


def join() -> None:
    """Listen, say that this rank starts, and let the last one know its process."""
    listen()
    os.write(1, f"\nstart: rank {os.environ['RANK']}\n".encode())
    if folder := os.environ.get(FOLDER):
        path = Path(folder, f"rank-{os.environ['RANK']}")
        whole = path.with_name(f"new-{path.name}")
        whole.write_text(f"{os.getpid()} {os.getppid()}")
        whole.rename(path)


def strike_if_due(moment: str, iteration: int, environ: Mapping[str, str] = os.environ) -> None:
    """Take the next strike of the list if it is for this moment and this is the last rank."""
    if not environ.get(LIST) or int(environ["RANK"]) + 1 != int(environ["WORLD_SIZE"]):
        return
    folder = Path(environ[FOLDER])
    for number, text in enumerate(environ[LIST].split(";")):
        strike, marker = Strike.read(text), folder / f"strike-{number}"
        if marker.exists():
            continue
        if strike.moment == moment and strike.iteration in (0, iteration):
            marker.touch()
            os.write(1, f"\nstrike {number}: {strike}\n".encode())
            for process in _processes(strike.target, folder):
                _send(process, HOW[strike.how])
        return


def _processes(target: str, folder: Path) -> Iterator[int]:
    """Yield the processes of ``target``, this one last."""
    first, keeper = map(int, (folder / "rank-0").read_text().split())
    rank, agent = os.getpid(), os.getppid()
    yield from {
        "rank": (rank,),
        "first": (first,),
        "agent": (agent,),
        "keeper": (keeper,),
        "node": (agent, rank),
        "ranks": (first, rank),
    }[target]


def _send(process: int, number: int) -> None:
    if process == os.getpid() and number in (CLOSE, SILENCE):
        cut_off(number)
    else:
        os.kill(process, number)


# ------------------------------------------------------------------ in any process


def listen() -> None:
    """Have a thread cut this process off when it gets one of the signals, and print that it did.

    To be called before any other thread is there: the signals end a process in which one thread
    does not block them.
    """
    numbers = {CLOSE, SILENCE}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def wait() -> None:
        while True:
            number = signal.sigwait(numbers)
            cut_off(number)
            if number == SILENCE:
                os.write(1, f"\nsilenced: {os.getpid()}\n".encode())

    threading.Thread(target=wait, name="strikes", daemon=True).start()


def cut_off(number: int) -> None:
    """Close or silence all of this process's connections to the network, and where it listens."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if number == SILENCE:
                    program = struct.pack("HL", 1, ctypes.addressof(_DROP_ALL))
                    one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
                else:
                    one.shutdown(socket.SHUT_RDWR)
