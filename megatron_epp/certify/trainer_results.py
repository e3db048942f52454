"""Results of a certificate of Megatron's trainer: reference model, and ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.certify.protocol import RankResult, Reference
from megatron_epp.certify.routed import RoutingRecord, differences


@dataclass(frozen=True, slots=True)
class TrainerReference(Reference):
    """Results of the reference model.

    Attributes:
        loss: loss per token, in training and in evaluation.
        unit: divisor of the error of ``loss``.
        tokens: sum of the loss masks.
        replicas: number of replicas.
        routed: router statistics.
    """

    loss: float
    unit: float
    tokens: int
    replicas: int
    routed: RoutingRecord

    def loss_error(self, computed: Sequence["TrainerResult"]) -> float:
        """Return the larger error of training and evaluation loss, divided by ``unit``."""
        passes = (
            [one.training_loss for one in computed],
            [one.evaluation_loss for one in computed],
        )
        return max(abs(self._loss(parts) - self.loss) / self.unit for parts in passes)

    def _loss(self, parts: Sequence[tuple[float, float]]) -> float:
        """Return the loss per token of all ranks; infinite if the count shows other tokens."""
        total, counted = map(sum, zip(*parts, strict=True))
        return total / self.tokens if counted == self.tokens else float("inf")

    def routing_differences(self, computed: Sequence["TrainerResult"], bound: float) -> list[str]:
        """Return differences between routers, one line each."""
        return differences([one.routed for one in computed], self.routed, self.replicas, bound)


@dataclass(frozen=True, slots=True)
class TrainerResult(RankResult):
    """Results of one rank of the trainer.

    Attributes:
        training_loss: (sum of the losses, number of tokens) of the rank's replica, on the reporting
            rank of the last stage; zeros on other ranks.
        evaluation_loss: (sum of the losses, number of tokens) in evaluation, on the same rank.
        routed: router statistics.
    """

    training_loss: tuple[float, float]
    evaluation_loss: tuple[float, float]
    routed: RoutingRecord
