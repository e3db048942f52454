"""Global batches that the replicas do not divide, in Megatron's own counts.

Megatron counts the samples of a batch as replicas x micro-batch size x micro-batches of a replica.
With --epp a micro-batch is a document, and a replica has as many as balance its seconds. So the
last factor is a mean, which need not be an integer.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Any


class UnevenMicroBatches(int):
    """Mean number of micro-batches of a replica: rounded up as a number, exact in products.

    Three replicas have ``UnevenMicroBatches(7, 3)`` of 7 documents: 3, and 7 times three.
    """

    documents: int
    replicas: int

    def __new__(cls, documents: int, replicas: int) -> UnevenMicroBatches:
        """Return the mean over ``replicas`` of a batch of ``documents``."""
        self = super().__new__(cls, -(-documents // replicas))
        self.documents, self.replicas = documents, replicas
        return self

    def __mul__(self, factor: int) -> int:
        """Return the exact product."""
        return mean_micro_batches(self.documents * factor, self.replicas)

    __rmul__ = __mul__

    def __rtruediv__(self, other: float) -> float:
        """Return the exact quotient."""
        return other * self.replicas / self.documents


def mean_micro_batches(documents: int, replicas: int) -> int:
    """Return the mean number of documents of a replica, as a plain ``int`` if it is an integer."""
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
    """Build Megatron's calculator as for one replica, and count micro-batches of a replica.

    With --decrease-batch-size-if-needed, Megatron's own calculator is returned.

    Args:
        build: Megatron's function that builds a calculator.
        rank: Rank of this process.
        global_batch_size: Samples of a global batch.
        micro_batch_size: Samples of a micro-batch.
        data_parallel_size: Number of replicas.
        decrease_batch_size_if_needed: Value of the flag.
        *schedule: Further arguments of ``build``: batch sizes by iteration.
    """
    sizes = rank, global_batch_size, micro_batch_size
    if decrease_batch_size_if_needed:
        return build(*sizes, data_parallel_size, True, *schedule)
    calculator = build(*sizes, 1, False, *schedule)
    batches = calculator.get
    calculator.get = lambda: mean_micro_batches(batches(), data_parallel_size)
    return calculator


class _Undivided(int):
    """A number that every other number divides."""

    def __mod__(self, divisor: int) -> int:
        """Return no remainder."""
        return 0


def undivided_evaluation(parser: ArgumentParser) -> ArgumentParser:
    """Make ``parser`` return an --eval-global-batch-size that passes Megatron's check.

    The check is one of hundreds in a function that has no patch point. :func:`restore_evaluation`
    undoes it.
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
    """Convert the number of :func:`undivided_evaluation` to a plain int, as checkpoints save it."""
    args.eval_global_batch_size = int(args.eval_global_batch_size)


class SampleCount:
    """Comparison of the samples that Megatron counts with the documents that were read."""

    def __init__(self) -> None:
        """Start with the first iteration that is checked."""
        self._source: Any = None
        self._ahead = 0

    def check(self, source: Any, began: int, counted: int) -> None:
        """Check the counts at the start of an iteration of uneven batches.

        Args:
            source: The global batches of one phase of the training.
            began: Documents of it before this iteration.
            counted: Megatron's consumed samples.

        Raises:
            RuntimeError: Megatron's count does not advance by the documents that were read.
        """
        if source is not self._source:
            self._source, self._ahead = source, counted - began
        if counted - began != self._ahead:
            raise RuntimeError(
                f"Megatron counts {counted} consumed samples where {began + self._ahead} documents "
                "were read: this Megatron's trainer does not take the batch size as replicas times "
                "micro-batches; give a --global-batch-size that the data-parallel size divides"
            )
