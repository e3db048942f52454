"""torchrun in a process that has Megatron imported (tests/forks.py), and forks its ranks.

torchrun's own code, from its command line on: only where it would start a new Python for a rank, a
process is forked from it that has everything imported. An agent with two ranks takes a second of a
core and not twenty. It can be cut off from the network (strikes.py).
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

from tests.attack import strikes
from tests.forks import become, with_megatron

EXIT_BARRIER_SECONDS = 30.0  # how long agents wait for each other's end; torchrun has no flag


def start_agent(
    folder: Path, log: Path, environment: Mapping[str, str], words: Sequence[str]
) -> ForkServerProcess:
    """Start torchrun with ``words``: its own, a program's path and the program's words."""
    given = (str(folder), str(log), dict(environment), list(words))
    process = with_megatron().Process(target=_agent, args=given)
    process.start()
    return process


def _agent(folder: str, log: str, environment: dict[str, str], words: list[str]) -> None:
    become(environment, folder, log)
    strikes.listen()
    from torch.distributed import run
    from torch.distributed.elastic.agent.server import SimpleElasticAgent
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    exit_barrier = SimpleElasticAgent._exit_barrier

    def shorter(self: SimpleElasticAgent) -> None:
        self._exit_barrier_timeout = EXIT_BARRIER_SECONDS
        exit_barrier(self)

    def forked(self: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> _ForkedRank:
        return _ForkedRank(args, env, log)

    SimpleElasticAgent._exit_barrier, SubprocessHandler._popen = shorter, forked
    # For a record that nobody reads, an agent looks up the source of its whole stack, twice a step.
    dynamic_rendezvous.get_method_name = lambda depth=2: "step"
    run.main(words)


class _ForkedRank:
    """What torchrun asks of subprocess.Popen, of a forked process."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], log: str):
        """Start ``python -u PROGRAM WORDS ...``."""
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _rank(args[2:], env, log)

    def poll(self) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            if process:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout or 0)
            time.sleep(0.02)
        return status


def _rank(words: Sequence[str], environment: dict[str, str], log: str) -> NoReturn:
    from tests.mcore.runs import execute

    status = 1
    try:
        for number in signal.valid_signals():  # torchrun's handlers
            with suppress(OSError, ValueError):
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # its sockets
        become(environment, os.getcwd(), log)
        execute(tuple(words[:1]), list(words[1:]))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
