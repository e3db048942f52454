"""Megatron's sample counts for global batches that the number of replicas does not divide.

Megatron counts the samples of a batch as replicas x micro-batch size x micro-batches per replica.
With --epp a micro-batch is a document, and the planner balances the replicas' seconds, not their
numbers of documents. So the last factor is a mean, which need not be an integer.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any


class UnevenMicroBatches(int):
    """Mean number of micro-batches per replica: an integer, rounded up, with exact products.

    With 7 documents on 3 replicas, ``UnevenMicroBatches(7, 3)`` equals 3, but its product with 3 is
    7.
    """

    documents: int
    replicas: int

    def __new__(cls, documents: int, replicas: int) -> UnevenMicroBatches:
        """Return the mean number of documents per replica."""
        self = super().__new__(cls, -(-documents // replicas))
        self.documents, self.replicas = documents, replicas
        return self

    def __mul__(self, factor: int) -> int:
        """Return the exact mean times ``factor``."""
        return mean_micro_batches(self.documents * factor, self.replicas)

    __rmul__ = __mul__

    def __rtruediv__(self, other: float) -> float:
        """Return ``other`` divided by the exact mean."""
        return other * self.replicas / self.documents


def mean_micro_batches(documents: int, replicas: int) -> int:
    """Return the mean number of documents per replica; a plain ``int`` if it is an integer."""
    if documents % replicas:
        return UnevenMicroBatches(documents, replicas)
    return documents // replicas


def build_calculator(
    build: Callable[..., Any],
    rank: int,
    global_batch_size: int | None,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool,
    *schedule: Any,
) -> Any:
    """Build Megatron's micro-batch calculator for batches of any number of samples.

    Megatron builds the calculator as for one replica. Its ``get`` is replaced and returns the mean
    number of micro-batches per replica. With --decrease-batch-size-if-needed, the function returns
    Megatron's calculator unchanged.

    Args:
        build: Megatron's function that builds a calculator.
        rank: Rank of this process.
        global_batch_size: Number of samples in a global batch.
        micro_batch_size: Number of samples in a micro-batch.
        data_parallel_size: Number of replicas.
        decrease_batch_size_if_needed: Value of the flag.
        *schedule: Last arguments of ``build``: the schedule of batch sizes.
    """
    sizes = rank, global_batch_size, micro_batch_size
    if decrease_batch_size_if_needed:
        return build(*sizes, data_parallel_size, True, *schedule)
    calculator = build(*sizes, 1, False, *schedule)
    batches = calculator.get
    calculator.get = lambda: mean_micro_batches(batches(), data_parallel_size)
    return calculator


class _Undivided(int):
    """Integer that is a multiple of every integer: its remainders are 0."""

    def __mod__(self, divisor: int) -> int:
        """Return 0."""
        return 0


def undivided_evaluation(parser: ArgumentParser) -> ArgumentParser:
    """Make ``parser`` return an --eval-global-batch-size that passes Megatron's divisibility check.

    Megatron's check is in a function with hundreds of checks, which has no patch point.
    :func:`restore_evaluation` restores the plain integer.
    """
    parse = parser.parse_args

    def parse_args(words: Sequence[str] | None = None, namespace: Any = None) -> Any:
        args = parse(words, namespace)
        size = args.eval_global_batch_size
        size = args.global_batch_size if size is None else size
        args.eval_global_batch_size = None if size is None else _Undivided(size)
        return args

    parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    return parser


def restore_evaluation(args: Any) -> None:
    """Convert --eval-global-batch-size back to a plain int, because checkpoints save ``args``."""
    args.eval_global_batch_size = int(args.eval_global_batch_size)


class SampleCount:
    """Comparison of Megatron's count of consumed samples with the number of documents read."""

    def __init__(self) -> None:
        """Start without a source; the first :meth:`check` stores the difference of both counts."""
        self._source: Any = None
        self._ahead = 0

    def check(self, source: Any, began: int, counted: int) -> None:
        """Check both counts at the start of an iteration of uneven batches.

        Args:
            source: The source of global batches; a new source resets the stored difference.
            began: Number of documents read from ``source`` before this iteration.
            counted: Megatron's count of consumed samples.

        Raises:
            RuntimeError: Megatron's count has not grown by the number of documents read.
        """
        if source is not self._source:
            self._source, self._ahead = source, counted - began
        if counted - began != self._ahead:
            raise RuntimeError(
                f"Megatron counts {counted} consumed samples where {began + self._ahead} documents "
                "were read: this Megatron's trainer does not take the batch size as replicas times "
                "micro-batches; give a --global-batch-size that the data-parallel size divides"
            )
