"""Results and counts of a certificate of an external training loop."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from megatron_epp.certify.protocol import RankResult, Reference
from tests.certify.frame import summary_of_collectives


@dataclass(frozen=True, slots=True)
class LoopReference(Reference):
    """Results of the reference model.

    Attributes:
        values: loss of each micro-batch, [replica][number].
        sums: sum of the token losses of each micro-batch, [replica][number].
        units: divisors of the errors in (``values``, ``sums``), [replica][number].
    """

    values: tuple[tuple[float, ...], ...]
    sums: tuple[tuple[float, ...], ...]
    units: tuple[tuple[tuple[float, float], ...], ...]

    def loss_error(self, computed: Sequence["LoopResult"]) -> float:
        """Return the largest error in ``values`` (training) and ``sums`` (forward-only passes).

        Errors are divided by ``units``. The result is infinite if a value is missing.
        """
        worst, replicas = 0.0, set()
        for one in computed:
            if not one.values:
                continue
            replicas.add(one.replica)
            of_values, of_sums = zip(*self.units[one.replica], strict=True)
            for losses, wanted, unit in (
                (one.values, self.values[one.replica], of_values),
                (one.collected, self.sums[one.replica], of_sums),
            ):
                if len(losses) != len(wanted):
                    return float("inf")
                errors = [abs(a - b) / u for a, b, u in zip(losses, wanted, unit, strict=True)]
                worst = max(worst, *errors)
        return worst if replicas == set(range(len(self.values))) else float("inf")


@dataclass(frozen=True, slots=True)
class LoopResult(RankResult):
    """Results of one rank of a loop.

    Attributes:
        replica: replica of this rank.
        values: loss of each micro-batch; () on ranks without the last stage.
        collected: sum of the token losses of each micro-batch, from a forward-only pass; () on
            ranks without the last stage.
        chunks: number of chunks of the plan.
        halved: number of W ops of all stages.
        branches: number of documents that continue another document.
        messages: number of messages sent and received in training.
        collectives: number of collectives by name (allowed_collectives.py).
    """

    replica: int
    values: tuple[float, ...]
    collected: tuple[float, ...]
    chunks: int
    halved: int
    branches: int
    messages: int
    collectives: Counter[str]


@dataclass(frozen=True, slots=True)
class LoopCoverage:
    """Numbers of micro-batches, chunks and split backwards of a batch.

    ``cut`` is the number of chunks minus the number of micro-batches.
    """

    ERROR: ClassVar = "value error"
    HELD: ClassVar = "values in the caller's order, collectives all on the list"

    loss: str
    micro_batches: int
    chunks: int = 0
    cut: int = 0
    halved: int = 0
    branches: int = 0
    messages: int = 0
    collectives: Counter[str] = field(default_factory=Counter)

    @property
    def cells(self) -> Mapping[str, object]:
        """Values of a table row, by column name."""
        return {
            "loss": self.loss,
            "micro-batches": self.micro_batches,
            "chunks": self.chunks,
            "slices": self.cut,
            "I+W": self.halved,
            "messages": self.messages,
        }

    @staticmethod
    def summary(every: Sequence["LoopCoverage"]) -> list[str]:
        """Return the summary lines over all batches."""
        branches = sum(batch.branches for batch in every)
        shared = f", {branches} documents that continue others" if branches else ""
        losses = sorted(Counter(batch.loss for batch in every).items())
        return [
            f"losses: {', '.join(f'{name} {count}' for name, count in losses)}; "
            f"{sum(batch.chunks for batch in every)} chunks of "
            f"{sum(batch.micro_batches for batch in every)} micro-batches{shared}, "
            f"{sum(batch.halved for batch in every)} backwards in two halves",
            summary_of_collectives(every),
        ]
