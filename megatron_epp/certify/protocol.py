"""Messages to the certificate's processes and their answers; neither torch nor Megatron."""

import runpy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy

from megatron_epp.certify.compare import Shard
from megatron_epp.certify.trial import Trial

REFERENCE = -1  # the rank of the process with the plain model


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a process in ``trial``. ``folder`` holds its log and the file at which ranks meet.

    ``trial.interfere``: a Python file for tests that break the executor or put parts in its place:
    its ``around(number)`` is a context for the computation of batch ``number``, its ``HOOKS``
    (setup.py) are the job's. It may define either.
    """

    rank: int
    folder: Path
    trial: Trial

    @property
    def on_gpu(self) -> bool:
        """Whether this process computes on a GPU: the plain model never does."""
        return self.trial.device == "cuda" and self.rank != REFERENCE

    @property
    def patience(self) -> timedelta:
        return timedelta(seconds=self.trial.timeout)

    def interference(self) -> dict[str, Any]:
        """Names that the file ``interfere`` defines."""
        interfere = self.trial.interfere
        return {} if interfere is None else runpy.run_path(str(interfere))

    @property
    def name(self) -> str:
        return "the plain model" if self.rank == REFERENCE else f"rank {self.rank}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}.log"


@dataclass(frozen=True, slots=True)
class Backend:
    """How the certificate's processes compute. Its functions are looked up in the processes, so
    they stand at the top of a module that is light to import.

    choose_engine (trial): what the processes are started with; a line about it, or none
    make_server   (role, what ends with the process): the object whose methods are asked for
    is_refusal    whether an error is about what the user gave
    preloaded     modules that a fork server imports so that its processes need not
    """

    choose_engine: Callable[[Trial], str]
    make_server: Callable[[Role, ExitStack], Any]
    is_refusal: Callable[[BaseException], bool]
    preloaded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InputRefusal:
    """The user's input cannot be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """The request ended in an exception: its last line, and all of it."""

    reason: str
    traceback: str


# ------------------------------------------------------------------ whatever is certified


class Coverage(Protocol):
    """Numbers of what a batch makes the executor do.

    ERROR   the column of what is compared beside gradients
    HELD    what else held, where all is certified
    """

    ERROR: ClassVar[str]
    HELD: ClassVar[str]

    @property
    def cells(self) -> Mapping[str, object]:
        """By the name of their column."""
        ...

    @staticmethod
    def summary(every: Any) -> list[str]:
        """The first of the last lines, over ``every`` batch."""
        ...


class BatchSource(Protocol):
    """Draws batches for a model and a job: a Frame, or of loops a LoopFrame."""

    def draw(self, seed: int, number: int) -> Any:
        """Batch ``number``: the same on every process that asks for it."""
        ...

    def coverage(self, drawn: Any, computed: Sequence[Any]) -> Coverage:
        """``computed``: answers of all ranks; none where one failed."""
        ...


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """From the process with the plain model: what the ranks need to build theirs.

    ``args`` are Megatron's, pickled: the parent passes them on as they are.
    """

    args: bytes
    frame: Any  # a BatchSource
    weights: Mapping[str, numpy.ndarray]
    description: str


@dataclass(frozen=True, slots=True)
class Reference(ABC):
    """From the plain model.

    gradients   of every weight of the whole model by its key; buffers, such as the experts'
                biases, as they are afterwards
    own         the same in the format that is certified; None: it is the plain model's
    quantised   keys of weights whose products are in fp8, where that is compared exactly
    """

    gradients: Mapping[str, numpy.ndarray]
    own: Mapping[str, numpy.ndarray] | None
    quantised: frozenset[str]

    @abstractmethod
    def loss_error(self, computed: Sequence[Any]) -> float:
        """The largest error of what ranks returned beside gradients: relative, or in those of the
        plain model itself (``own``)."""

    def routing_differences(self, computed: Sequence[Any], bound: float) -> list[str]:
        """How routers differ, a line each."""
        return []


@dataclass(frozen=True, slots=True)
class RankResult:
    """Results of one rank for a batch.

    gradients     of its part of the model, over the tokens of the whole batch
    messages      sent and received in training
    collectives   issued in training, by their name on the list (allowed_collectives.py)
    problems      what went otherwise than planned, one line each
    """

    gradients: list[Shard]
    messages: int
    collectives: Counter[str]
    problems: list[str]
