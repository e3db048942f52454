r"""The ``serve`` command: the planner process of a training job.

The trainer starts this process, which answers each line on stdin with a line on stdout, in order.
The process ends when stdin ends. Cost model, levers and effort are fixed by options, so a reply
depends on the request alone. If a request cannot be planned, the reply contains an error, and the
process continues.

    request   {"id": 7, "lengths": [900, 41], "replicas": 1, "planner": "epp",
               "forward_only": false}
              id: any JSON value; the reply repeats it
              planner, forward_only: optional
              replica: number of a replica; the reply then has only the part of the step for the
              replica's lockstep group. null or absent: the full step
    reply     {"id": 7, "step": "step v1\ndeal 0: ...", "seconds": 0.031,
               "predicted": {"seconds": 1.9, "bubble_ratio": 0.03, "peak_bytes": [...], ...},
               "lower_bound_seconds": 1.8, "error": null}
              step: text of ir.Step, or of ir.StepPart for a replica's part, for which predicted
              and lower_bound_seconds are null
              seconds: time of planning
              predicted: prediction for the slowest replica; null for a forward-only plan
              error: null, or one line of text; step, predicted and lower_bound_seconds are then
              null

Only replies are written to stdout; other output goes to stderr.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from megatron_epp.cli import machine
from megatron_epp.cli.documents import require_batch
from megatron_epp.cli.flags import AUTO
from megatron_epp.cli.options import UsageError
from megatron_epp.cli.outcome import outcome
from megatron_epp.cli.plan import options_of
from megatron_epp.cost.cost import Cost
from megatron_epp.ir.errors import quoted
from megatron_epp.planner import (
    Options,
    evaluation_part,
    evaluation_step,
    plan_part,
    planner_of,
)

_REQUEST = {"id", "lengths", "replicas", "replica", "planner", "forward_only"}
_PREDICTED = (
    *("planner", "seconds", "gap", "bubble_ratio", "recompute_ratio", "comm_ratio"),
    *("peak_bytes", "chunks", "pipelines", "fits", "plan_seconds"),
)
_WARM_UP = (4096, 1024, 512, 256)


def run(arguments: argparse.Namespace) -> int:
    """Run the ``serve`` command until stdin ends, and return its exit status.

    Example::

        options = ["serve", "--model", "llama3-8b", "--device", "h100-80g", "--pp", "4"]
        status = run(parse(options))  # parse of cli.options; requests on stdin

    Raises:
        UsageError: if an option is auto, or --devices is given.
    """
    if AUTO in (arguments.pp, arguments.cp):
        raise UsageError("--pp auto, --cp auto: a job that runs has its degrees; expected numbers")
    if arguments.devices is not None:
        raise UsageError("--devices: a job that runs has its degrees; expected --pp and --cp alone")
    if arguments.vocab_parallel == "auto":
        raise UsageError("--vocab-parallel auto: a job that runs has decided; expected on or off")
    if arguments.placement == machine.AUTO_PLACEMENT:
        raise UsageError("--placement auto: a job that runs has decided; expected a placement")
    from megatron_epp.control.planner_process import end_with_reader

    cost = machine.planning_cost(arguments)
    options = options_of(arguments)
    # If the last reply has no reader, closing the pipe raises BrokenPipeError, too.
    with (
        suppress(BrokenPipeError),
        os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as replies,
    ):
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        threading.Thread(target=end_with_reader, args=(replies.fileno(),), daemon=True).start()
        _warm_up(cost, options)
        serve(sys.stdin, replies, lambda request: answer(request, cost, options))
    return 0


def serve(
    requests: TextIO, replies: TextIO, answered: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> None:
    """Answer every line by ``answered``, until ``requests`` ends or ``replies`` has no reader."""
    for line in iter(requests.readline, ""):
        if not line.strip():
            continue
        began = time.perf_counter()
        name = None
        try:
            request = _request(line)
            name = request.get("id")
            if unknown := sorted(set(request) - _REQUEST):
                known = ", ".join(sorted(_REQUEST))
                raise ValueError(f"request: unknown field {quoted(unknown[0])}; known: {known}")
            reply = answered(request)
        except Exception as error:
            # The job must go on after any error: it has a fallback plan.
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            text = kind + (str(error).split("\n")[0] or "no reason given")
            reply = dict.fromkeys(("step", "predicted", "lower_bound_seconds")) | {"error": text}
        seconds = time.perf_counter() - began
        frame = {"id": name, "seconds": seconds, "error": None} | reply
        try:
            replies.write(json.dumps(frame) + "\n")
            replies.flush()
        except BrokenPipeError:
            return


def _request(line: str) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"request: no JSON ({error})") from error
    if not isinstance(request, dict):
        raise ValueError("request: expected a JSON object with lengths and replicas")
    return request


def answer(request: Mapping[str, Any], cost: Cost, options: Options) -> dict[str, Any]:
    """Return the reply to one request, without id and seconds.

    Raises:
        ValueError: if a field is invalid or the batch cannot be planned.
    """
    lengths, replicas = request.get("lengths"), request.get("replicas", 1)
    planner, forward_only = request.get("planner", "epp"), request.get("forward_only", False)
    if not isinstance(lengths, list) or not all(
        isinstance(length, int) and not isinstance(length, bool) and 1 <= length < 10**15
        for length in lengths
    ):
        raise ValueError(
            "request: lengths: expected a list of whole numbers of at least 1 and at most 15 digits"
        )
    require_batch(lengths, "request: lengths")
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        raise ValueError(
            f"request: replicas {quoted(replicas)}: expected a whole number of at least 1"
        )
    replica = request.get("replica")
    if replica is not None and (type(replica) is not int or not 0 <= replica < replicas):
        raise ValueError(
            f"request: replica {quoted(replica)}: expected null or a whole number below {replicas}"
        )
    if not isinstance(planner, str):
        raise ValueError(f"request: planner {quoted(planner)}: expected a name")
    if not isinstance(forward_only, bool):
        raise ValueError(f"request: forward_only {quoted(forward_only)}: expected true or false")
    text = None
    if forward_only and replica is not None:
        text = str(evaluation_part(lengths, cost, options, replicas, replica))
    elif forward_only:
        text = str(evaluation_step(lengths, cost, options, replicas))
    elif replica is not None:
        text = str(plan_part(lengths, cost, options, planner, replicas, replica))
    if text is not None:
        return {"step": text, "predicted": None, "lower_bound_seconds": None}
    planner_of(planner)  # refuses what this job's pipelines cannot run
    result = outcome(0, lengths, cost, options, planner, replicas)
    facts = result.facts()
    return {
        "step": str(result.step),
        "predicted": {name: facts[name] for name in _PREDICTED},
        "lower_bound_seconds": result.lower_bound_seconds,
    }


def _warm_up(cost: Cost, options: Options) -> None:
    """Load solver and compiled code before the first request."""
    try:
        width = options.lockstep
        answer({"lengths": list(_WARM_UP) * width, "replicas": width}, cost, options)
    except ValueError:
        return  # the budget is too small for these documents; requests will report it
