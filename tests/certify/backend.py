"""Backend of the project's own certificates; imports no Megatron or torch at the top."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from traceback import walk_tb
from typing import Any

from megatron_epp.certify import command
from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.protocol import REFERENCE, Role
from megatron_epp.certify.trial import Trial
from megatron_epp.mcore.certify.backend import MEGATRON, prepare_process
from tests.certify.trial import checked, read_checked


def make_server(role: Role, until_the_end: ExitStack) -> Any:
    """Return the object that this process serves: the reference model, or a rank under test.

    The classes of both objects differ between Megatron's trainer and external training loops.
    """
    prepare_process(role, until_the_end)
    if role.trial.loop:
        from tests.certify.loops.loop_rank import LoopRank
        from tests.certify.loops.reference_loop import ReferenceLoop

        return ReferenceLoop(role) if role.rank == REFERENCE else LoopRank(role)
    from tests.certify.rank import CheckedRank
    from tests.certify.reference import CheckedReference

    return CheckedReference(role) if role.rank == REFERENCE else CheckedRank(role)


def is_refusal(error: BaseException) -> bool:
    """Return whether the user's input caused ``error``, which this folder may raise, too."""
    if not isinstance(error, ValueError):
        return MEGATRON.is_refusal(error)
    *_, (innermost, _) = walk_tb(error.__traceback__)
    return innermost.f_globals["__name__"].startswith("tests.") or MEGATRON.is_refusal(error)


CHECKED = replace(MEGATRON, make_server=make_server, is_refusal=is_refusal)


def certify_checked(
    trial: Trial, show: Callable[[str], None] = lambda line: None
) -> list[BatchVerdict]:
    """Run the batches of ``trial``, with their messages and collectives checked."""
    return command.certify(CHECKED, checked(trial), show)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m tests.certify``; return 0 if all comparisons pass, else 1.

    Raises:
        ValueError: The arguments are not supported.
    """
    return command.run(CHECKED, read_checked(arguments))
