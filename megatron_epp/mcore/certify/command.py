"""``python -m megatron_epp certify`` of Megatron's trainer, and with ``--loop`` of loops."""

from collections.abc import Callable, Sequence

from megatron_epp.certify import command
from megatron_epp.certify.command import Judged, Trial
from megatron_epp.mcore.certify.backend import MEGATRON


def main(arguments: Sequence[str] | None = None) -> int:
    """0: certified; 1: not. ValueError: input that cannot be used."""
    if any(word.split("=")[0] == "--loop" for word in arguments or ()):
        from megatron_epp.certify.loops import command as loops_command  # imports torch

        return loops_command.main(MEGATRON, arguments)
    return command.main(MEGATRON, arguments)


def certify_training(trial: Trial, show: Callable[[str], None] = lambda line: None) -> list[Judged]:
    """Run the batches of ``trial`` (certify/command.py)."""
    return command.certify(MEGATRON, trial, show)
