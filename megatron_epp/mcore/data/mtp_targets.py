"""Targets of a chunk's rows for multi-token prediction, read from the corpus.

    document            a b c d e f          inputs a to e
    next token          input  a b c d e     label  b c d e f
    MTP module 1        token  b c d e 0     label  c d e f -
    MTP module 2        token  c d e 0 0     label  d e f - -

Each column of the table is a row (token) of a chunk, in which an MTP module reads the token and
predicts the label. Labels written as - have no loss. The last rows of a slice read tokens of the
next slice, but never tokens of another document.

Shapes: D MTP modules, t rows of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from megatron_epp.mcore.data.global_batches import BatchDocument, TokenSource


@dataclass(frozen=True, slots=True)
class Predictions:
    """Number of tokens predicted for each row: the next token, and one token per MTP module.

    Attributes:
        depths: Number of MTP modules.
        scale: Weight of the mean of the MTP modules' losses (--mtp-loss-scaling-factor).
    """

    depths: int = 0
    scale: float = 0.0

    @classmethod
    def of(cls, config: Any, training: bool) -> "Predictions":
        """Return the predictions that Megatron's ``config`` (TransformerConfig) sets.

        If ``training`` is False, the model predicts only the next token.
        """
        depths = getattr(config, "mtp_num_layers", None) or 0
        return cls(depths, config.mtp_loss_scaling_factor) if depths and training else cls()

    @property
    def each(self) -> int:
        """Number of tokens predicted for each row."""
        return 1 + self.depths


class TargetRows:
    """Labels and loss weights of t = ``count`` rows of this rank; :meth:`add` sets those of a span.

    The number of labels per row is 1 + D, for the D MTP modules of ``predictions``. Rows of a
    shared prefix belong to several documents; their weights are summed over these documents.

    Attributes:
        labels: [1 + D, t] int64.
        weights: [1 + D, t] float32 (float64 with MTP): weights of the labels' losses. They are 0 on
            padding and for labels without a loss. As in Megatron with one document per micro-batch,
            the weighted losses of a document in one MTP module sum to m * ``scale`` / D * n. Here,
            m is the mean of the losses without weights, and n the document's number of next-token
            targets.
        mtp_mask: [D, t] float64, for the log: 1 for each MTP label with a loss, otherwise 0. In a
            shared prefix, these numbers are summed over the documents.
    """

    def __init__(self, predictions: Predictions, count: int):
        self.predictions = predictions
        self.labels = numpy.zeros((predictions.each, count), dtype=numpy.int64)
        kind = numpy.float64 if predictions.depths else numpy.float32
        self.weights = numpy.zeros((predictions.each, count), dtype=kind)
        self.mtp_mask = numpy.zeros((predictions.depths, count), dtype=kind)

    def add(
        self,
        rows: slice,
        documents: TokenSource,
        sample: BatchDocument,
        span: tuple[int, int],
        counts: Callable[[], numpy.ndarray],
    ) -> None:
        """Set labels and add weights in ``rows``, which contain inputs ``span`` of a document.

        Args:
            rows: Slice of this rank's rows.
            documents: Source of the tokens.
            sample: The document.
            span: Inputs [start, stop) of the document.
            counts: Function that returns :func:`target_counts` of the document. The method calls
                it only with MTP.
        """
        start, stop = span
        depths = self.predictions.depths
        labels, mask = documents.targets(sample.number, start, min(stop + depths, sample.length))
        targets = counts() if depths else None
        for depth in range(1 + depths):
            there = slice(depth, min(stop - start + depth, len(labels)))
            here = slice(rows.start, rows.start + max(0, there.stop - depth))
            self.labels[depth, here] = labels[there]
            if targets is None or not depth:
                self.weights[depth, here] += mask[there]
                continue
            mean = mask[there] / max(1.0, targets[depth])
            self.mtp_mask[depth - 1, here] += mask[there]
            self.weights[depth, here] += mean * (self.predictions.scale / depths * targets[0])


def target_counts(
    documents: TokenSource, sample: BatchDocument, predictions: Predictions
) -> numpy.ndarray:
    """Return a document's number of labels with a loss, for each prediction: float64 [1 + D].

    The function reads the labels and the loss mask of the full document.

    Args:
        documents: Source of the tokens.
        sample: The document.
        predictions: Number of tokens predicted for each row.
    """
    _, mask = documents.targets(sample.number, 0, sample.length)
    return numpy.array([mask[depth:].sum(dtype=numpy.float64) for depth in range(predictions.each)])


def mtp_tokens(
    documents: TokenSource, sample: BatchDocument, span: tuple[int, int], depths: int
) -> numpy.ndarray:
    """Return the input tokens of the MTP modules for a span: int64 [D, stop - start].

    Tokens after the end of the document are 0, as in Megatron.

    Args:
        documents: Source of the tokens.
        sample: The document.
        span: Inputs [start, stop) of the document.
        depths: Number of MTP modules.
    """
    start, stop = span
    end = max(start + 1, min(stop + depths, sample.length))
    read = documents.inputs(sample.number, start + 1, end)
    result = numpy.zeros((depths, stop - start), dtype=numpy.int64)
    for depth in range(depths):
        there = read[depth : depth + stop - start]
        result[depth, : len(there)] = there
    return result
