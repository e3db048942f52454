"""Messages to the processes of a certificate, and their answers; imports no torch or Megatron."""

import runpy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy

from megatron_epp.certify.compare import Shard
from megatron_epp.certify.trial import Trial

REFERENCE = -1  # rank of the process with the reference model


@dataclass(frozen=True, slots=True)
class Role:
    """Rank and settings of a process; ``folder`` contains its log and the rendezvous file.

    ``trial.interfere`` is a Python file with which tests break or replace parts of the executor.
    The file may define ``HOOKS``, the trainer's hooks (mcore/trainer/hooks.py). It may also define
    ``around(number)``, which returns a context manager for the computation of batch ``number``.
    """

    rank: int
    folder: Path
    trial: Trial

    @property
    def on_gpu(self) -> bool:
        """Whether this process computes on a GPU; the reference model never does."""
        return self.trial.device == "cuda" and self.rank != REFERENCE

    @property
    def patience(self) -> timedelta:
        """Longest time to wait for another process."""
        return timedelta(seconds=self.trial.timeout)

    def interference(self) -> dict[str, Any]:
        """Return the globals of the file ``trial.interfere``; {} without a file."""
        interfere = self.trial.interfere
        return {} if interfere is None else runpy.run_path(str(interfere))

    @property
    def name(self) -> str:
        """Name of the process in messages."""
        return "the reference model" if self.rank == REFERENCE else f"rank {self.rank}"

    @property
    def log(self) -> Path:
        """Path of the log file of this process."""
        return self.folder / f"{self.name.replace(' ', '-')}.log"


@dataclass(frozen=True, slots=True)
class Backend:
    """Functions with which the processes of a certificate compute.

    The functions are pickled by name, so they are defined at the top level of a module that is
    cheap to import.

    Attributes:
        choose_engine: function that selects an emulation of Transformer Engine if a trial needs it,
            and returns a line about it, or "".
        make_server: function that takes (role, exit stack), and returns the object whose methods
            answer requests.
        is_refusal: function that returns whether the user's input caused an exception.
        preloaded: modules that the fork server imports once for all child processes.
    """

    choose_engine: Callable[[Trial], str]
    make_server: Callable[[Role, ExitStack], Any]
    is_refusal: Callable[[BaseException], bool]
    preloaded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InputRefusal:
    """Answer of a process that cannot use the user's input."""

    reason: str


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Answer after an exception; ``reason`` has the rank, the error and its file and line."""

    reason: str
    traceback: str


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Data from which the ranks build their models; the reference model's process sends it.

    Attributes:
        args: Megatron's arguments, pickled; the parent process forwards them without unpickling.
        frame: source of the batches, such as a ``Frame`` (batches.py).
        weights: weights by key.
        description: description of the model, and a line on flags without effect.
    """

    args: bytes
    frame: Any
    weights: Mapping[str, numpy.ndarray]
    description: str


@dataclass(frozen=True, slots=True)
class Reference(ABC):
    """Results of the reference model.

    Attributes:
        gradients: by key, the gradient of every weight, and the value of every buffer (such as
            expert biases) after the step.
        own: the same values, computed in the certified dtype or without fp8. Their error is the
            unit of other errors. None: errors are relative to ``gradients``.
        quantised: keys of the weights in fp8 products; empty if errors are in units of ``own``.
    """

    gradients: Mapping[str, numpy.ndarray]
    own: Mapping[str, numpy.ndarray] | None
    quantised: frozenset[str]

    @abstractmethod
    def loss_error(self, computed: Sequence[Any]) -> float:
        """Return the largest error of values other than gradients.

        The error is relative, or in units of the reference model's own error (``own``).
        """

    def routing_differences(self, computed: Sequence[Any], bound: float) -> list[str]:
        """Return differences between routers, one line each."""
        return []


@dataclass(frozen=True, slots=True)
class RankResult:
    """Results of one rank for a batch.

    Attributes:
        gradients: gradients of the rank's part of the model, over the tokens of the full batch.
        problems: deviations from the plan, one line each.
    """

    gradients: list[Shard]
    problems: list[str]
