"""Overrides of verl for a job."""

from collections.abc import Iterator

from megatron_epp.frameworks.stock_settings import (
    StockSettings,
    degrees,
    first_and_last_layers,
    recompute,
)

_ACTOR = "actor_rollout_ref.actor."


def verl_settings(job: StockSettings) -> Iterator[str]:
    """Yield the overrides for ``job``."""
    for name, value in degrees(job):
        yield f"{_ACTOR}megatron.{name}={value}"
    config = f"{_ACTOR}megatron.override_transformer_config."
    for name, value in recompute(job.recomputed):
        yield f"{config}{name}={value}"
    ends = first_and_last_layers(job.layers, "verl")
    for name, count in zip(("first", "last"), ends, strict=False):
        yield f"+{config}num_layers_in_{name}_pipeline_stage={count}"
    yield f"{_ACTOR}use_dynamic_bsz=True"
    yield f"{_ACTOR}ppo_max_token_len_per_gpu={job.tokens // job.layout.cp}"
