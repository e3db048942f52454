"""The ``tune`` command: the fastest layout of a job on a corpus, and its launch script."""

from megatron_epp.cli.tune.command import run

__all__ = ["run"]
