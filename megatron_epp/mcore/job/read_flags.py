"""Reader of Megatron's flags and the flags of --epp, with validation.

Invalid flags raise a one-line ValueError. Any exception that Megatron raises while it reads flags
counts as an error in the flags.
"""

from __future__ import annotations

import os
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any, NoReturn

from megatron_epp.flag_fields import did_you_mean
from megatron_epp.mcore.flags import config, replaced
from megatron_epp.mcore.hybrid.segments import SEGMENTS
from megatron_epp.mcore.job.job_exit import reason
from megatron_epp.mcore.job.launch_environment import rank_of
from megatron_epp.mcore.kinds.registry import replaced_by_kinds
from megatron_epp.mcore.patching import cpu_host, patch_points
from megatron_epp.mcore.patching.uneven_batches import restore_evaluation, undivided_evaluation
from megatron_epp.mcore.placing.placeholder import placeholder, watch_virtual_stages

type Watch = Callable[[ArgumentParser], ArgumentParser]


def _as_typed(parser: ArgumentParser) -> ArgumentParser:
    return parser


def read_flags(watch: Watch = _as_typed) -> Namespace:
    """Return the validated flags of Megatron and --epp, and set Megatron's global arguments.

    ``watch`` is a function that changes the parser and returns it, for example to replace values of
    the user.

    Raises:
        ValueError: A flag is unknown or invalid, this host does not support it, or the checkpoint
            to load is missing or incomplete.
    """
    from megatron.training import global_vars
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_epp.mcore.capabilities import refusals
    from megatron_epp.mcore.data.data_flags import require_data_flags
    from megatron_epp.mcore.job import megatron_gpt
    from megatron_epp.mcore.job.checkpoint_folders import require_complete, require_local
    from megatron_epp.mcore.kinds.registry import kind_defaults, require_pattern

    with refusals_as_value_errors():
        # The first pass, before Megatron's own checks, finds features that a CPU does not support.
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
            if wanted.epp:  # prefer the error that --epp does not support the feature
                refusals.refuse_by_name(parse_args(prepare))
            raise
        if args.epp:
            restore_evaluation(args)
        require_data_flags(args)
        require_local(args)
        require_complete(args)
        # Later versions of Megatron (#7418) let the caller start tokenizer, timers and writers. The
        # configuration needs the tokenizer's vocabulary size, so they are started here.
        start = getattr(global_vars, "initialize_runtime_services", None)
        if start is not None:
            start(args)
        return args


def prepare_parser(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of --epp and this host's defaults to Megatron's parser, and return it.

    The parser raises a ValueError for invalid flags.
    """
    with_our_flags(parser)
    # Megatron divides by --eval-interval even without evaluation (training.py:4481).
    parser.set_defaults(eval_interval=1000)
    if cpu_host.is_cpu_host():
        parser.set_defaults(**cpu_host.cpu_defaults())
    if rank() != 0:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
    parser.error = partial(_refuse, parser)  # type: ignore[method-assign]
    for action in parser._actions:
        if isinstance(action.type, FunctionType):
            action.type = _naming_its_flag(action.type)
    return parser


def with_our_flags(parser: ArgumentParser) -> ArgumentParser:
    """Add the flags of --epp to Megatron's ``parser``, and return the parser.

    With --epp, the parser also resets flags that have no effect, and joins the segments of
    interleaved pipelines to one segment per stage.
    """
    extended = config.add_arguments(watch_virtual_stages(parser))
    return replaced.watch(extended, (*replaced_by_kinds(), *SEGMENTS))


def _naming_its_flag(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap ``read``, a flag's type function, so that its exceptions become argparse errors.

    argparse then names the flag. For example, Megatron evaluates a layer pattern such as
    "[0]*1+[1]*3" with ``eval``, which may raise any exception.
    """

    @wraps(read)
    def reading(text: str) -> Any:
        try:
            return read(text)
        except (ArithmeticError, AssertionError, LookupError, NameError, SyntaxError) as error:
            raise ValueError(text) from error

    return reading


def _refuse(parser: ArgumentParser, message: str) -> NoReturn:
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown != message:
        flag = unknown.split()[0].split("=")[0]
        hint = did_you_mean(flag, parser._option_string_actions, cutoff=0.8)
        message += f"; {hint}" if hint else ""
    raise ValueError(message)


@contextmanager
def refusals_as_value_errors() -> Iterator[None]:
    """Convert exceptions that Megatron raises while it reads flags to ValueErrors with a reason.

    Many of Megatron's checks are asserts without a message. The reason is then the source line.

    Raises:
        ValueError: Megatron refuses the flags inside the ``with`` block.
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
    """Set the environment variables of a job with one process, for a start without torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": str(port)}).items():
        os.environ.setdefault(name, value)


def rank() -> int:
    """Return this process's global rank; 0 without a launcher."""
    return rank_of()[0]
