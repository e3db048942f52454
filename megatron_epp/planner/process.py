"""Child side of a planner process: ``python -m megatron_epp.planner.process FD``.

The trainer starts this process (control/planner_process.py). ``FD`` is the file descriptor of this
process's end of a pipe (multiprocessing.connection.Pipe). All messages are pickled:

    PlannerSettings  first: what is equal for all requests
    Request          documents to plan for
    Answer           one for each request, in order: the plan's text, or an error

An answer depends on the settings and the request alone. If a request cannot be planned, the answer
contains an error, and the process continues. The process ends when the pipe is closed, even while
it plans.
"""

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

from megatron_epp.corpus.shared_prefixes import Batch, lengths_of
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options

_WARM_UP = (4096, 1024, 512, 256)  # documents of a replica


class PlannerSettings(NamedTuple):
    """Cost model, options and place of a planner process."""

    cost: Cost
    options: Options
    planner: str  # name of the planner
    replicas: int  # data-parallel size
    replica: int  # first replica of the lockstep group to plan for


class Request(NamedTuple):
    """Documents to plan for."""

    name: str
    batch: Batch  # the global batch
    forward_only: bool


class Answer(NamedTuple):
    """Result of a request."""

    name: str
    seconds: float  # planning time
    step: str  # text of ir.StepPart; empty after an error
    error: str  # one line; empty if there is a plan


def receive(pipe: Connection, put: Callable[[Any], None]) -> threading.Thread:
    """Start a thread that calls ``put`` for each message of ``pipe``, and with None at its end."""

    def run() -> None:
        with suppress(EOFError, OSError):
            while True:
                put(pipe.recv())
        put(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def plan_text(settings: PlannerSettings, batch: Batch, forward_only: bool) -> str:
    """Return, as text, the part of a step that the settings' lockstep group runs.

    With ``forward_only``, the plans are for an evaluation.

    Raises:
        ValueError: if the planner is unknown, or the documents cannot be planned.
    """
    # Imported late: solver and compiler take seconds to load.
    from megatron_epp.planner.replicas import evaluation_part, plan_part

    cost, options, planner, replicas, replica = settings
    if forward_only:
        return str(evaluation_part(lengths_of(batch), cost, options, replicas, replica))
    return str(plan_part(batch, cost, options, planner, replicas, replica))


def answer(settings: PlannerSettings, request: Request) -> Answer:
    """Return the answer to one request."""
    began = time.perf_counter()
    step = error = ""
    try:
        step = plan_text(settings, request.batch, request.forward_only)
    except Exception as raised:  # the job must go on after any error: it has a fallback plan
        kind = "" if isinstance(raised, ValueError) else f"{type(raised).__name__}: "
        error = kind + (str(raised).split("\n")[0] or "no reason given")
    return Answer(request.name, time.perf_counter() - began, step, error)


def main() -> None:
    """Answer requests until the pipe ends."""
    pipe = Connection(int(sys.argv[1]))
    # numpy's overflow warning does not say which input was wrong.
    warnings.filterwarnings("error", ".* encountered in ", RuntimeWarning)
    settings: PlannerSettings = pipe.recv()
    requests: SimpleQueue[Request] = SimpleQueue()
    receive(pipe, lambda message: os._exit(0) if message is None else requests.put(message))
    # Loads solver and compiled code. A budget that is too small is reported by the requests.
    width = settings.options.lockstep
    warm_up = settings._replace(planner="epp", replicas=width, replica=0)
    answer(warm_up, Request("", _WARM_UP * width, False))
    while True:
        pipe.send(answer(settings, requests.get()))


if __name__ == "__main__":
    # By its name: messages of classes of __main__ could not be unpickled by the trainer.
    with suppress(BrokenPipeError, EOFError, KeyboardInterrupt):
        import_module("megatron_epp.planner.process").main()
