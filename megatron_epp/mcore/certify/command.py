"""``python -m megatron_epp certify`` for Megatron's trainer."""

from collections.abc import Sequence

from megatron_epp.certify import command
from megatron_epp.mcore.certify.backend import MEGATRON
from megatron_epp.mcore.patching import releases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m megatron_epp certify``; return 0 if all comparisons pass, otherwise 1.

    Raises:
        ValueError: The arguments or the installed Megatron are not supported.

    Example:
        >>> from megatron_epp.mcore.certify.command import main
        >>> status = main(["--model", "llama3-8b", "--pp", "2", "--batches", "4"])
    """
    version = releases.installed_version()
    if version is not None and releases.release_of(version) is None:
        raise ValueError(
            f"certify: this environment's Megatron calls itself {version}; expected "
            f"{' or '.join(map(str, releases.RELEASES))}; scripts/upstream/megatron_matrix.py "
            f"--megatron {version} tries slices of training loops with it"
        )
    return command.main(MEGATRON, arguments)
