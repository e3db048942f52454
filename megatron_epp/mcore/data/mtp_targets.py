"""Targets of a chunk's rows where further tokens are predicted, from the corpus's rows.

    document            a b c d e f          inputs a to e
    depth 0, as ever    input  a b c d e     label  b c d e f
    depth 1             token  b c d e 0     label  c d e f -
    depth 2             token  c d e 0 0     label  d e f - -

A depth reads the token and predicts the label; - carries no loss. So a slice's rows have what
stands behind its border, and none has another document's.

D depths, t rows of this rank
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from megatron_epp.mcore.data.global_batches import TokenSource


@dataclass(frozen=True, slots=True)
class Predictions:
    """Tokens that are predicted of each row: the next, and one at each of ``depths``.

    scale   of the loss of all depths together (--mtp-loss-scaling-factor)
    """

    depths: int = 0
    scale: float = 0.0

    @classmethod
    def of(cls, config: Any, training: bool) -> "Predictions":
        """Those of Megatron's ``config`` (TransformerConfig); an evaluation reports the next
        token's alone."""
        depths = getattr(config, "mtp_num_layers", None) or 0
        return cls(depths, config.mtp_loss_scaling_factor) if depths and training else cls()

    @property
    def each(self) -> int:
        """Tokens predicted of a row."""
        return 1 + self.depths


class TargetRows:
    """Arrays for ``count`` rows of this rank, filled span by span.

    labels      [1 + D, t] int64
    weights     [1 + D, t] float32 (float64 with depths) of the labels' losses: 0 on padding, and
                where a label carries none. The loss of a depth is a document's mean, as often as
                the document has targets: Megatron's, where the document is a micro-batch
    means       [D, t] float64 weights in a document's mean, for the log
    documents   that begin in these rows
    """

    def __init__(self, predictions: Predictions, count: int):
        self.predictions = predictions
        self.labels = numpy.zeros((predictions.each, count), dtype=numpy.int64)
        kind = numpy.float64 if predictions.depths else numpy.float32
        self.weights = numpy.zeros((predictions.each, count), dtype=kind)
        self.means = numpy.zeros((predictions.depths, count), dtype=kind)
        self.documents = 0

    def fill(
        self,
        rows: slice,
        documents: TokenSource,
        sample: int,
        span: tuple[int, int],
        length: int,
        counts: Callable[[], numpy.ndarray],
    ) -> None:
        """``rows`` hold inputs ``span`` of a document of ``length`` inputs; ``counts``: the targets
        that it has at each depth (:func:`target_counts`), where there are any."""
        start, stop = span
        depths = self.predictions.depths
        labels, mask = documents.targets(sample, start, min(stop + depths, length))
        self.documents += start == 0
        targets = counts() if depths else None
        for depth in range(1 + depths):
            there = slice(depth, min(stop - start + depth, len(labels)))
            here = slice(rows.start, rows.start + max(0, there.stop - depth))
            self.labels[depth, here] = labels[there]
            if targets is None or not depth:
                self.weights[depth, here] = mask[there]
                continue
            mean = mask[there] / max(1.0, targets[depth])
            self.means[depth - 1, here] = mean
            self.weights[depth, here] = mean * (self.predictions.scale / depths * targets[0])


def target_counts(
    documents: TokenSource, sample: int, length: int, predictions: Predictions
) -> numpy.ndarray:
    """[1 + D] targets of a document at each depth; it is read from end to end, masks and all."""
    _, mask = documents.targets(sample, 0, length)
    return numpy.array([mask[depth:].sum(dtype=numpy.float64) for depth in range(predictions.each)])


def mtp_tokens(
    documents: TokenSource, sample: int, span: tuple[int, int], length: int, depths: int
) -> numpy.ndarray:
    """[D, stop - start] tokens that the depths read of inputs ``span`` of a document of ``length``
    inputs; 0 behind its end, as Megatron has it."""
    start, stop = span
    read = documents.inputs(sample, start + 1, max(start + 1, min(stop + depths, length)))
    result = numpy.zeros((depths, stop - start), dtype=numpy.int64)
    for depth in range(depths):
        there = read[depth : depth + stop - start]
        result[depth, : len(there)] = there
    return result
