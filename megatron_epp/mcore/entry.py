"""Megatron's ``pretrain`` from the command line, with its own schedule and data or with ours.

The wheel of megatron-core holds the trainer but not the script that calls it. This is that script's
work: read the flags, build the configuration, hand over data, forward step and loss (stock.py),
train. Without ``--epp`` it computes the same numbers as Megatron-LM's own script, bit for bit
(scripts/compare_upstream.py).

A user's mistake ends every rank with status 2 and one line (ending.py). Whatever Megatron raises
while it reads the flags counts as one.
"""

from __future__ import annotations

import linecache
import os
import socket
import sys
import time
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from megatron_epp.mcore import config, job_exit
from megatron_epp.mcore.patching import cpu_host, cuda_host, seams


def main(program_start: float | None = None) -> None:
    """Train as the command line says; a user's mistake ends the process with status 2.

    ``program_start``: seconds since the epoch when the program started.
    """
    try:
        train(time.time() if program_start is None else program_start)
    except Exception as error:
        if not job_exit.is_users_mistake(error):
            raise
        job_exit.refuse(error)
    job_exit.finish()


def train(program_start: float) -> None:
    """Read the command line and train.

    ValueError: the command line, or a file that it names, cannot be used.
    """
    if "RANK" not in os.environ:
        be_the_only_process()
    if _rank() != 0:
        # One rank's word is enough, as Megatron-LM's script has it.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    cuda_host.prepare(sys.argv[1:])
    cpu_host.install_cpu_host()
    seams.install(seams.ALWAYS_SEAMS)
    seams.check_seams()

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron_epp.mcore import megatron_gpt

    set_startup_timestamps(program_start=program_start, main_entry=time.time())
    store = None
    args = read_flags()
    if args.inprocess_restart:
        pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    with refusals_as_value_errors():
        model = gpt_config_from_args(args)
    forward_step, datasets = megatron_gpt.forward_step, megatron_gpt.datasets
    if args.epp:
        from megatron_epp.mcore import setup

        seams.install(seams.EPP_SEAMS)
        forward_step, datasets = setup.setup(args, model)
    with refusals_as_value_errors():
        configuration = pretrain_cfg_container_from_args(args, model)
    pretrain(
        configuration,
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=megatron_gpt.embedding_ranks,
    )


# ------------------------------------------------------------------ flags


def read_flags() -> Namespace:
    """Megatron's flags and ours, validated and made Megatron's global arguments.

    ValueError: a flag that is unknown, or that Megatron or this host refuses.
    """
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_epp.mcore import megatron_gpt

    with refusals_as_value_errors():
        # Once to look, before Megatron's own checks: what the CPU cannot do is named as such.
        wanted = parse_args(prepare_parser)
        if cpu_host.is_cpu_host():
            cpu_host.refuse_gpu_flags(wanted)
        megatron_gpt.refuse_unsupported(wanted)

        def prepare(parser: ArgumentParser) -> ArgumentParser:
            parser = prepare_parser(parser)
            if wanted.epp:
                parser.set_defaults(**config.elastic_defaults(wanted))
            return parser

        # Megatron warns of a default that is overridden, so only where it will be used.
        defaults = {} if wanted.tokenizer_type else {"tokenizer_type": "GPT2BPETokenizer"}
        return parse_and_validate_args(prepare, args_defaults=defaults)


def prepare_parser(parser: ArgumentParser) -> ArgumentParser:
    """Add --epp's flags and this host's defaults to Megatron's parser; it raises, never exits."""
    config.add_arguments(parser)
    # Megatron divides by --eval-interval even where nothing is evaluated (training.py:4481).
    parser.set_defaults(eval_interval=1000)
    if cpu_host.is_cpu_host():
        parser.set_defaults(**cpu_host.cpu_defaults())
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
    """One line for an exception of Megatron's; the place and condition if it says nothing."""
    message = " ".join(str(error).split())
    if message and not isinstance(error, KeyError):
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    lines = linecache.getlines(frame.filename)[(frame.lineno or 1) - 1 : frame.end_lineno]
    source = " ".join(" ".join(lines).split())
    return (
        f"Megatron refuses the flags at {os.path.basename(frame.filename)}:{frame.lineno}: {source}"
    )


def be_the_only_process() -> None:
    """What torchrun would say to a single process, for a start without it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": str(port)}).items():
        os.environ.setdefault(name, value)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
