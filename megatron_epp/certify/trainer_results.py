"""Results of a certificate of Megatron's trainer: reference model, ranks, and their routers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from megatron_epp.certify.protocol import RankResult, Reference


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Router statistics of a part of the model, or of the full model.

    Attributes:
        counts: for each layer, number of tokens that chose each expert [experts].
        losses: by name of an auxiliary loss, its values [layers] summed over documents, before
            multiplication by the coefficient.
    """

    counts: Mapping[int, numpy.ndarray] = field(default_factory=dict)
    losses: Mapping[str, numpy.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainerReference(Reference):
    """Results of the reference model.

    Attributes:
        loss: loss per token, which is the same in training and in evaluation.
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


def differences(
    parts: Sequence[RoutingRecord], reference: RoutingRecord, replicas: int, bound: float
) -> list[str]:
    """Return the differences between router statistics of the ranks and of the reference model.

    The statistics are summed over the ranks. Each rank counts the tokens of its own rows. Its
    losses are its part of the replica's losses, divided by the number of replicas.

    Args:
        parts: statistics of the ranks.
        reference: statistics of the reference model.
        replicas: number of replicas, by which the sums of losses are multiplied.
        bound: bound of the relative error of losses.

    Returns:
        One line per difference.
    """
    counts = _sums(part.counts for part in parts)
    losses = _sums(part.losses for part in parts)
    messages = []
    for layer in sorted(counts.keys() | reference.counts.keys()):
        actual, expected = counts.get(layer), reference.counts.get(layer)
        if actual is None or expected is None:
            messages.append(
                f"layer {layer}: experts counted {'twice' if expected is None else 'never'}"
            )
        elif differing := int((actual != expected).sum()):
            messages.append(
                f"layer {layer}: {differing} of {len(expected)} experts counted other tokens: "
                f"{actual.sum():g} in all where the reference model has {expected.sum():g}"
            )
    for name in sorted(losses.keys() | reference.losses.keys()):
        expected = reference.losses.get(name, numpy.zeros(1))
        actual = losses.get(name, numpy.zeros(1)) * replicas
        difference = abs(actual - expected)
        if not (difference <= bound * abs(expected).max()).all():
            layer = int(difference.argmax())
            messages.append(
                f"{name} of layer {layer + 1}: {actual[layer % len(actual)]:.12g} where the "
                f"reference model has {expected[layer % len(expected)]:.12g}"
            )
    return messages


def _sums(parts: Any) -> dict[Any, numpy.ndarray]:
    sums: dict[Any, numpy.ndarray] = {}
    for part in parts:
        for key, value in part.items():
            sums[key] = sums[key] + value if key in sums else value
    return sums
