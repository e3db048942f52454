"""Metrics for TensorBoard and Weights & Biases, written by Megatron's own writers."""

from collections.abc import Mapping

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_epp.control.accept import AcceptedStep
from megatron_epp.control.report import IterationReport
from megatron_epp.cost.catalogue.devices import GIB


def scalars(step: AcceptedStep, report: IterationReport, truncated: int) -> dict[str, float]:
    """Return the scalars of an iteration for TensorBoard and Weights & Biases, by name.

    Args:
        step: The iteration's step.
        report: Reports of all ranks.
        truncated: Number of training documents that were truncated to the context.
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
        values[f"peak-gib-stage-{rank}"] = peak / GIB  # former name of the entry
    if step.predicted_seconds:
        values["predicted-seconds"] = step.predicted_seconds
    return values


def wanted() -> bool:
    """Return whether this rank has a TensorBoard or Weights & Biases writer of Megatron."""
    return get_tensorboard_writer() is not None or get_wandb_writer() is not None


def write(values: Mapping[str, float], iteration: int) -> None:
    """Log ``values`` under ``epp/`` to the writers that this rank has."""
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in values.items():
        if tensorboard is not None:
            tensorboard.add_scalar(f"epp/{name}", value, iteration)
    if wandb is not None:
        wandb.log({f"epp/{name}": value for name, value in values.items()}, iteration)
