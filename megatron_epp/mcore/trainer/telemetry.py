"""Elastic pipelines in TensorBoard and Weights & Biases, through Megatron's own writers."""

from collections.abc import Mapping

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_epp.control.accept import AcceptedStep
from megatron_epp.control.report import IterationReport
from megatron_epp.cost.catalogue.devices import GIB


def scalars(step: AcceptedStep, report: IterationReport, truncated: int) -> dict[str, float]:
    """Scalars that are drawn for an iteration, by name.

    ``truncated``: documents of the training set that are longer than the context.
    """
    values: dict[str, float] = {
        "tokens-per-second": step.tokens / report.seconds,
        "seconds": report.seconds,
        "bubble-ratio": report.bubble_ratio,
        "recomputed-layers-ratio": report.recomputed,
        "recomputed-in-part-ratio": report.recomputed_in_part,
        "chunks": report.chunks,
        "planner-wait-seconds": step.planning.waited_seconds,
        "planner-iterations-ahead": step.planning.ahead,
        "planner-discarded-plans": step.planning.discarded,
        "truncated-documents": truncated,
    }
    for rank, peak in enumerate(report.peak_bytes):
        values[f"peak-gib-rank-{rank}"] = peak / GIB
        values[f"peak-gib-stage-{rank}"] = peak / GIB  # its name before ranks had several stages
    if step.predicted_seconds:
        values["predicted-seconds"] = step.predicted_seconds
    return values


def wanted() -> bool:
    """Whether this rank has one of Megatron's writers."""
    return get_tensorboard_writer() is not None or get_wandb_writer() is not None


def write(values: Mapping[str, float], iteration: int) -> None:
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in values.items():
        if tensorboard is not None:
            tensorboard.add_scalar(f"epp/{name}", value, iteration)
    if wandb is not None:
        wandb.log({f"epp/{name}": value for name, value in values.items()}, iteration)
