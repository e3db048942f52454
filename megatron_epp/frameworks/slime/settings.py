"""Flags of slime for a job: Megatron's flags, and tokens per GPU."""

from collections.abc import Iterator

from megatron_epp.frameworks.stock_settings import StockSettings, megatron_flags


def slime_settings(job: StockSettings) -> Iterator[str]:
    """Yield the flags for ``job``."""
    yield from megatron_flags(job)
    yield "--use-dynamic-batch-size"
    yield f"--max-tokens-per-gpu {job.tokens // job.layout.cp}"
