"""Elastic Pipeline Parallelism for Megatron-LM: plans made for the documents of every iteration."""

from collections.abc import Callable, Sequence
from typing import Any


def add_arguments(parser: Any) -> Any:
    """Add the ``--epp`` flags to Megatron's parser: an ``extra_args_provider`` for scripts of your
    own."""
    from megatron_epp.mcore.config import add_arguments

    return add_arguments(parser)


def install(
    args: Any,
    model_config: Any,
    items: Callable[[Sequence[int]], Sequence[Any]] | None = None,
) -> tuple[Any, Any]:
    """Put elastic pipelines into Megatron's trainer; for entry scripts of your own.

    Call it between reading the flags and ``pretrain``: ``args`` are Megatron's, with those of
    :func:`add_arguments`; ``model_config`` is what ``gpt_config_from_args`` made of them. Returns
    the forward step and the data provider to hand to ``pretrain``. On a host without a GPU call
    :func:`prepare_host` before the first import of Megatron. A ValueError says in one line what
    cannot run.

    ``items`` gives documents of your own in the place of --data-path: called with the samples that
    training, validation and test want, it returns a dataset for each, or None. A dataset has a
    length, ``original_seq_lens`` (the length of every item, known ahead), and items that are
    mappings of tokens, labels, loss_mask and original_seq_len; docs/data.md.
    """
    from megatron_epp.mcore import setup
    from megatron_epp.mcore.patching import seams

    seams.install(seams.ALWAYS_SEAMS)
    seams.install(seams.EPP_SEAMS)
    return setup.setup(args, model_config, setup.Hooks(items=items))


def prepare_host() -> bool:
    """Make Megatron run on a host without a GPU; returns whether this is one."""
    from megatron_epp.mcore.patching import cpu_host

    return cpu_host.install_cpu_host()
