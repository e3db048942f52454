"""Megatron job that is nearest to a row of stock: samples, flags and predicted time.

A row of stock in the table of ``tune`` packs whole documents, each batch to its own best length. In
Megatron, all samples have ``--seq-length`` tokens, and the end of a sample cuts a document. The job
therefore has one length of samples for all batches, the fastest one. Its samples hold about the
tokens of a batch. If samples of this length would not be full, they are shorter.
"""

import math
from dataclasses import dataclass

from megatron_epp.cli.tune.job import TunedJob
from megatron_epp.cost.catalogue.devices import BLACKWELL
from megatron_epp.cost.catalogue.megatron_flags import ModelFlags
from megatron_epp.cost.overlap import overlaps_experts
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.survey import Choice

# Largest relative difference of the tokens of an iteration from those of the row.
CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class StockJob:
    """A job with one of Megatron's own schedules.

    Attributes:
        tokens: tokens of a sample.
        samples: samples of a global batch.
        seconds: predicted time of an iteration.
        flags: flags besides those of model, layout and optimizer, in groups that share a line.
        note: sentences on how samples differ from the documents of the row.
    """

    tokens: int
    samples: int
    seconds: float
    flags: list[list[str]]
    note: str


def stock_job(job: TunedJob, choice: Choice, of_model: ModelFlags) -> StockJob:
    """Return the Megatron job that is nearest to ``choice``.

    Args:
        job: devices and model.
        choice: row of the table of ``tune`` that uses one of Megatron's own schedules (stock).
        of_model: Megatron's flags of the model.

    Raises:
        ValueError: if Megatron has no such job; the message is the reason.
    """
    stock = choice.stock
    if stock is None or stock.static is None:
        raise ValueError("no length of samples fits all batches")
    tokens, samples = _samples(choice, stock.static.tokens)
    seconds = choice.seconds
    if len(stock.batches) > 1:  # the row packs each batch to another length
        seconds = stock.static.seconds + choice.exchange_seconds
    note = f"Megatron cuts documents at the ends of samples, here of {tokens} tokens."
    if tokens < stock.static.tokens:
        note += f" Packs of {stock.static.tokens} tokens would not be full."
    flags = [*_schedule_flags(choice, samples), *_overlap_flags(job, choice, of_model.hybrid)]
    if stock.static.recomputed:
        recompute = ["--recompute-granularity", "full", "--recompute-method", "block"]
        flags.append([*recompute, "--recompute-num-layers", str(stock.static.recomputed)])
    if not of_model.fuses_rope:
        flags.append(["--no-rope-fusion"])
    if choice.layout.cp > 1:
        if of_model.indexed:
            raise ValueError(
                "Megatron runs attention with an indexer and CP by --cp-comm-type allgather only"
            )
        flags.append(["--cp-comm-type", "a2a"])
    if job.device.name == "cpu":  # Transformer Engine alone reads the ends of documents
        flags.append(["--reset-position-ids", "--reset-attention-mask"])
    else:
        flags.append(["--dataloader-inter-document-masking"])
    return StockJob(tokens, samples, seconds, flags, note)


def connections(job: TunedJob, choice: Choice) -> int:
    """Return the value of CUDA_DEVICE_MAX_CONNECTIONS for a row.

    It is 1 for Megatron's own schedules with tensor or context parallelism on devices before
    Blackwell, because their overlap depends on the order in which kernels start. Otherwise the
    value is 32.
    """
    split = choice.layout.tp * choice.layout.cp > 1
    return 1 if choice.stock and split and job.device.name not in BLACKWELL else 32


def length_multiple(layout: Layout) -> int:
    """Return the number that must divide Megatron's --seq-length."""
    return layout.tp * layout.cp * (2 if layout.cp > 1 else 1)


def _samples(choice: Choice, packed: int) -> tuple[int, int]:
    """Return the tokens of a sample, and the samples of a global batch.

    Args:
        choice: a row of stock.
        packed: length to which the row packs documents.

    Raises:
        ValueError: if no such batch has the tokens of the row's batches.
    """
    layout, batch = choice.layout, choice.seconds * choice.tokens_per_second
    multiple = length_multiple(layout)
    least = layout.pp if choice.place else 1  # interleaved stages need a micro-batch for each rank
    tokens = -(-packed // multiple) * multiple
    micro_batches = max(least, round(batch / layout.dp / tokens))
    if abs(micro_batches * layout.dp * tokens / batch - 1) > CLOSE:
        micro_batches = max(least, math.ceil(batch / layout.dp / tokens))
        tokens = max(1, round(batch / layout.dp / micro_batches / multiple)) * multiple
    samples = micro_batches * layout.dp
    if abs(samples * tokens / batch - 1) > CLOSE:
        raise ValueError(
            f"{samples} samples of {tokens} tokens are more than {CLOSE:.0%} off the {batch:.0f} "
            "tokens of a batch"
        )
    return tokens, samples


def _schedule_flags(choice: Choice, samples: int) -> list[list[str]]:
    """Return the size of interleaved groups if Megatron refuses its default, the pipeline size."""
    ranks, micro_batches = choice.layout.pp, samples // choice.layout.dp
    if not choice.place or micro_batches % ranks == 0:
        return []
    sizes = range(ranks + 1, micro_batches + 1)
    size = next(n for n in sizes if micro_batches % n == 0 or micro_batches % n >= ranks)
    return [["--microbatch-group-size-per-virtual-pipeline-stage", str(size)]]


def _overlap_flags(job: TunedJob, choice: Choice, hybrid: bool) -> list[list[str]]:
    """Return the flag of the overlap that the row has.

    Raises:
        ValueError: if Megatron does not overlap on this device or in this model.
    """
    stock = choice.stock
    if stock is None or not stock.overlap:
        return []
    if job.device.name == "cpu":
        raise ValueError("Megatron overlaps exchanges on GPUs only")
    if not overlaps_experts(stock.cost):
        return [["--tp-comm-overlap"]]
    if hybrid:
        raise ValueError("Megatron overlaps experts' exchanges in GPT models only, not in hybrids")
    return [["--overlap-moe-expert-parallel-comm"]]
