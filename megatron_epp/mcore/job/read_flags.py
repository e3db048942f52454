"""Flags of Megatron and of --epp: read once, refused in one line.

Any exception that Megatron raises while it reads flags counts as the user's mistake.
"""

from __future__ import annotations

import os
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any, NoReturn

from megatron_epp.mcore.flags import config, replaced
from megatron_epp.mcore.hybrid.segments import SEGMENTS
from megatron_epp.mcore.job.job_exit import reason
from megatron_epp.mcore.job.launch_environment import rank_of
from megatron_epp.mcore.kinds.registry import replaced_by_kinds
from megatron_epp.mcore.patching import cpu_host, patch_points
from megatron_epp.mcore.patching.uneven_batches import restore_evaluation, undivided_evaluation
from megatron_epp.mcore.placing import virtual_flags

type Watch = Callable[[ArgumentParser], ArgumentParser]


def _as_typed(parser: ArgumentParser) -> ArgumentParser:
    return parser


def read_flags(watch: Watch = _as_typed) -> Namespace:
    """Return the validated flags of Megatron and --epp, and set Megatron's global arguments.

    ``watch`` may make the parser return other values than those typed.

    Raises:
        ValueError: A flag is unknown, or Megatron or this host refuses it.
    """
    from megatron.training import global_vars
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_epp.mcore.capabilities import refusals
    from megatron_epp.mcore.data.data_flags import require_data_flags
    from megatron_epp.mcore.job import megatron_gpt
    from megatron_epp.mcore.job.checkpoint_folders import require_complete, require_local
    from megatron_epp.mcore.kinds.registry import kind_defaults, require_pattern
    from megatron_epp.mcore.placing.placeholder import placeholder

    with refusals_as_value_errors():
        # First pass, before Megatron's own checks, to name features that the CPU lacks.
        wanted = parse_args(lambda parser: watch(prepare_parser(parser)))
        if cpu_host.is_cpu_host():
            refusals.refuse_gpu_flags(wanted)
        megatron_gpt.refuse_unsupported(wanted)
        require_pattern(wanted)
        refusals.require_parts(wanted)
        if wanted.epp:
            refusals.require_equal_stages(wanted)
            patch_points.allow_uneven_batches()

        def prepare(parser: ArgumentParser) -> ArgumentParser:
            parser = watch(prepare_parser(parser))
            if wanted.epp:
                parser.set_defaults(**config.elastic_defaults(wanted) | kind_defaults(wanted))
                parser.set_defaults(**placeholder(wanted))
                undivided_evaluation(parser)
            return parser

        # Megatron warns about an overridden default, so set only defaults that will be used.
        defaults = {} if wanted.tokenizer_type else {"tokenizer_type": "GPT2BPETokenizer"}
        try:
            args = parse_and_validate_args(prepare, args_defaults=defaults)
        except Exception:
            if wanted.epp:  # --epp's refusals of a feature come before Megatron's conditions on it
                refusals.refuse_by_name(parse_args(prepare))
            raise
        if args.epp:
            restore_evaluation(args)
        require_data_flags(args)
        require_local(args)
        require_complete(args)
        # Later versions of Megatron (#7418) leave tokenizer, timers and writers to the caller, who
        # may build the configuration first; this needs the vocabulary size.
        start = getattr(global_vars, "initialize_runtime_services", None)
        if start is not None:
            start(args)
        return args


def prepare_parser(parser: ArgumentParser) -> ArgumentParser:
    """Add --epp's flags and this host's defaults to Megatron's parser; it raises, never exits."""
    with_our_flags(parser)
    # Megatron divides by --eval-interval even without evaluation (training.py:4481).
    parser.set_defaults(eval_interval=1000)
    if cpu_host.is_cpu_host():
        parser.set_defaults(**cpu_host.cpu_defaults())
    if rank() != 0:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
    parser.error = _refuse  # type: ignore[method-assign]
    for action in parser._actions:
        if isinstance(action.type, FunctionType):
            action.type = _naming_its_flag(action.type)
    return parser


def with_our_flags(parser: ArgumentParser) -> ArgumentParser:
    """Return Megatron's ``parser`` with --epp's flags.

    With --epp, it also removes flags that layer kinds replace, and segments of interleaved
    pipelines.
    """
    extended = config.add_arguments(virtual_flags.watch_virtual_stages(parser))
    return replaced.watch(extended, (*replaced_by_kinds(), *SEGMENTS))


def _naming_its_flag(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a type function so that an exception in Megatron's ``eval`` becomes an argparse error.

    argparse then names the flag. An example is a pattern of layers, "[0]*1+[1]*3".
    """

    @wraps(read)
    def reading(text: str) -> Any:
        try:
            return read(text)
        except (ArithmeticError, AssertionError, LookupError, NameError, SyntaxError) as error:
            raise ValueError(text) from error

    return reading


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


@contextmanager
def refusals_as_value_errors() -> Iterator[None]:
    """Convert exceptions that Megatron raises while it reads flags to ValueErrors with a reason.

    Many of its checks are bare asserts; the message is then the asserted condition.
    """
    try:
        yield
    except (
        AssertionError,
        ImportError,
        KeyError,
        NotImplementedError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        raise ValueError(reason(error)) from error


def be_the_only_process() -> None:
    """Set the variables that torchrun would set for a single process, for a start without it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": str(port)}).items():
        os.environ.setdefault(name, value)


def rank() -> int:
    """Return this process's rank in the world, 0 without a launcher."""
    return rank_of()[0]
