"""Megatron's ``pretrain`` from the command line: its own schedule and data path, or, with --epp,
ours.

The wheel of megatron-core holds the trainer but not the script that calls it. This is that script's
work: read the flags, build the configuration, hand over data, forward step and loss (stock.py),
train. Without ``--epp`` it computes the same numbers as Megatron-LM's own script, bit for bit
(scripts/compare_upstream.py).

A user's mistake ends every rank with status 2 and prints one line on one rank. It is told from a
bug by where it was raised: anything refused while flags are read, and afterwards a ValueError that
comes out of this package.
"""

from __future__ import annotations

import importlib.util
import linecache
import logging
import os
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

from megatron_epp.mcore import host, seams

logger = logging.getLogger(__name__)

BAD_INPUT = 2


def main(program_start: float | None = None) -> None:
    """Train as the command line says. ``program_start``: seconds since the epoch when the program
    started.
    """
    started = time.time() if program_start is None else program_start
    try:
        train(started)
    except Exception as error:
        if not is_users_mistake(error):
            raise
        logger.debug("where the refusal came from", exc_info=True)
        stop_with(str(error))


def train(program_start: float) -> None:
    """Read the command line and train. ValueError: the command line, or what it names, cannot be
    used.
    """
    host.install_cpu_host()
    seams.install(seams.ALWAYS_SEAMS)
    seams.check_seams()

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron_epp.mcore import stock

    set_startup_timestamps(program_start=program_start, main_entry=time.time())
    store = None
    args = read_flags()
    if args.inprocess_restart:
        pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    with refusals_as_value_errors():
        model = gpt_config_from_args(args)
        configuration = pretrain_cfg_container_from_args(args, model)
    forward_step, datasets = stock.forward_step, stock.datasets
    if getattr(args, "epp", False):
        from megatron_epp.mcore import elastic

        seams.install(seams.EPP_SEAMS)
        forward_step, datasets = elastic.setup(args, model)
    pretrain(
        configuration,
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=stock.embedding_ranks,
    )


# ------------------------------------------------------------------ flags


def read_flags() -> Namespace:
    """Megatron's flags and ours, validated and made Megatron's global arguments.

    ValueError: a flag that is unknown, or that Megatron or this host refuses.
    """
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_epp.mcore import stock

    with refusals_as_value_errors():
        # Once to look, before Megatron's own checks, so that a flag the CPU cannot do is named as
        # such.
        wanted = parse_args(prepare_parser)
        if host.is_cpu_host():
            host.refuse_gpu_flags(wanted)
        stock.refuse_unsupported(wanted)

        def prepare(parser: ArgumentParser) -> ArgumentParser:
            parser = prepare_parser(parser)
            if getattr(wanted, "epp", False):
                from megatron_epp.mcore.config import elastic_defaults

                parser.set_defaults(**elastic_defaults(wanted))
            return parser

        return parse_and_validate_args(
            prepare, args_defaults={"tokenizer_type": "GPT2BPETokenizer"}
        )


def prepare_parser(parser: ArgumentParser) -> ArgumentParser:
    """Add --epp's flags and this host's defaults to Megatron's parser, and make it raise where it
    would exit.
    """
    if importlib.util.find_spec("megatron_epp.mcore.config") is not None:
        from megatron_epp.mcore import config

        config.add_arguments(parser)
    # Megatron divides by --eval-interval even where nothing is evaluated (training.py:4481).
    parser.set_defaults(eval_interval=1000)
    if host.is_cpu_host():
        parser.set_defaults(**host.cpu_defaults())
    if _rank() != 0:
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
    parser.error = _refuse  # type: ignore[method-assign]
    return parser


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


@contextmanager
def refusals_as_value_errors() -> Iterator[None]:
    """Turn what Megatron raises while it reads flags into a ValueError that says why.

    Many of its checks are bare asserts: then the asserted condition is the message.
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
        raise ValueError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """One line for an exception raised in Megatron, with the place and the condition if it has no
    message.
    """
    message = " ".join(str(error).split())
    if message and not isinstance(error, KeyError):
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    source = " ".join(" ".join(lines).split())
    return (
        f"Megatron refuses the flags at {os.path.basename(frame.filename)}:{frame.lineno}: {source}"
    )


# ------------------------------------------------------------------ mistakes


def is_users_mistake(error: Exception) -> bool:
    """Whether ``error`` is about what the user gave, and not a bug: a ValueError raised by this
    package's code.
    """
    if not isinstance(error, ValueError) and not type(error).__module__.startswith("megatron_epp."):
        return False
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame
    return innermost is not None and str(innermost.f_globals.get("__name__", "")).startswith(
        "megatron_epp"
    )


def stop_with(message: str) -> NoReturn:
    """End this rank with status 2; of all ranks that end so, one prints the line, rank 0 if it is
    among them.
    """
    if _may_speak():
        print(f"megatron_epp: error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    sys.exit(BAD_INPUT)


def _may_speak(patience: timedelta = timedelta(seconds=2)) -> bool:
    """Whether this rank prints: rank 0 always, another only if rank 0 stays silent and it is the
    first.

    Before the process group exists every rank reads the same flags and rank 0 speaks. Afterwards
    the group's store, which needs no other rank's cooperation, tells who has spoken.
    """
    rank = _rank()
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is None or not torch_distributed.is_initialized():
        return rank == 0
    store = torch_distributed.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("megatron_epp/spoken", "rank 0")
        return True
    try:
        store.wait(["megatron_epp/spoken"], patience)
    except Exception:  # the wait ran out, or the store went with rank 0
        try:
            return store.add("megatron_epp/speakers", 1) == 1
        except Exception:
            return False
    return False


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
