"""Elastic pipelines in TensorBoard and Weights & Biases, through Megatron's own writers."""

from collections.abc import Mapping

from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from megatron_epp.control.report import IterationReport
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir import FULL, KEEP, OFFLOAD, Step


def scalars(
    step: Step, report: IterationReport, planning_seconds: float, truncated: int
) -> dict[str, float]:
    """Scalars that are drawn for an iteration, by name.

    ``planning_seconds``: how long training waited for the plan; ``truncated``: documents of the
    training set that are longer than the context.
    """
    tokens = sum(plan.tokens for plan in step.plans)
    modes = [x for plan in step.plans for stage in plan.recompute for c in stage for x in c]
    values: dict[str, float] = {
        "tokens-per-second": tokens / report.seconds,
        "seconds": report.seconds,
        "bubble-ratio": report.bubble_ratio,
        "recomputed-layers-ratio": modes.count(FULL) / max(1, len(modes)),
        "recomputed-in-part-ratio": sum(x not in (KEEP, FULL, OFFLOAD) for x in modes)
        / max(1, len(modes)),
        "chunks": sum(len(plan.chunks) for plan in step.plans),
        "planner-wait-seconds": planning_seconds,
        "truncated-documents": truncated,
    }
    for rank, peak in enumerate(report.peak_bytes):
        values[f"peak-gib-rank-{rank}"] = peak / GIB
        values[f"peak-gib-stage-{rank}"] = peak / GIB  # its name before ranks had several stages
    predictions = [plan.predicted for plan in step.plans if plan.predicted is not None]
    if predictions:
        values["predicted-seconds"] = max(one.seconds for one in predictions)
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
