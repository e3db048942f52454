"""Arguments of ms-swift for a job: Megatron's flags in ms-swift's spelling, and packing."""

from collections.abc import Iterator

from megatron_epp.frameworks.stock_settings import StockSettings, megatron_flags


def swift_settings(job: StockSettings) -> Iterator[str]:
    """Yield the arguments for ``job``."""
    for line in megatron_flags(job):
        name, *value = line.split(" ", 1)
        yield f"--{name[2:].replace('-', '_')} {value[0] if value else 'true'}"
    yield "--packing true"
    yield f"--max_length {job.tokens}"
