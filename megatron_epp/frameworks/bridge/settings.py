"""Fields of a Megatron-Bridge recipe for a job."""

from collections.abc import Iterator

from megatron_epp.frameworks.stock_settings import StockSettings, degrees, recompute
from megatron_epp.planner.choose.partition import layout_text


def bridge_settings(job: StockSettings) -> Iterator[str]:
    """Yield assignments to fields of a recipe for ``job``."""
    for name, value in degrees(job):
        yield f"cfg.model.{name} = {value}"
    if job.layout.tp > 1:
        yield "cfg.model.sequence_parallel = True"
    if len(set(job.layers)) > 1:
        yield f'cfg.model.pipeline_model_parallel_layout = "{layout_text(job.layers)}"'
    for name, value in recompute(job.recomputed):
        yield f"cfg.model.{name} = {value if value.isdecimal() else repr(value)}"
    yield f"cfg.model.seq_length = cfg.dataset.seq_length = {job.tokens}"
