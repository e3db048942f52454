"""Answers of the processes of the trainer's certificate."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.certify.protocol import RankResult, Reference
from megatron_epp.certify.routed import RoutingRecord, differences


@dataclass(frozen=True, slots=True)
class TrainerReference(Reference):
    """Loss per token, of ``tokens``, in training and in evaluation, over ``replicas``; what its
    routers left. ``unit``: what the loss's error is told in."""

    loss: float
    evaluation_loss: float
    unit: float
    tokens: int
    replicas: int
    routed: RoutingRecord

    def loss_error(self, computed: Sequence["TrainerResult"]) -> float:
        pairs = (
            (self.loss, [one.training_loss for one in computed]),
            (self.evaluation_loss, [one.evaluation_loss for one in computed]),
        )
        return max(abs(self._loss(parts) - loss) / self.unit for loss, parts in pairs)

    def _loss(self, parts: Sequence[tuple[float, float]]) -> float:
        """Per token over all replicas; infinite if they counted other tokens than there are."""
        total, counted = map(sum, zip(*parts, strict=True))
        return total / self.tokens if counted == self.tokens else float("inf")

    def routing_differences(self, computed: Sequence["TrainerResult"], bound: float) -> list[str]:
        return differences([one.routed for one in computed], self.routed, self.replicas, bound)


@dataclass(frozen=True, slots=True)
class TrainerResult(RankResult):
    """Results of one rank of the trainer.

    training_loss   summed over its replica's tokens, and their number, from the rank of the last
                    stage that reports; zeros from the others. ``evaluation_loss`` likewise.
    routed          what its routers left beside gradients
    """

    training_loss: tuple[float, float]
    evaluation_loss: tuple[float, float]
    routed: RoutingRecord
