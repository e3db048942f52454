"""``tune``: which layout of a job is fastest on a corpus, and the script that launches it."""

from megatron_epp.cli.tune.command import run

__all__ = ["run"]
