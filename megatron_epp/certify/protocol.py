"""Messages to the certificate's processes and their answers; neither torch nor Megatron."""

import runpy
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy

from megatron_epp.certify.batches import Frame
from megatron_epp.certify.compare import Shard
from megatron_epp.certify.routed import Routed

PLAIN = -1  # the rank of the process with the plain model


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a process. ``folder`` holds its log and the file at which ranks meet.

    ``device``: cpu, or cuda where every rank has a GPU of its own.

    ``interfere``: a Python file for tests that break the executor or put parts in its place: its
    ``around(number)`` is a context for the computation of batch ``number``, its ``HOOKS``
    (setup.py) are the job's. It may define either. ``loop``: the ranks are a training loop's.
    """

    rank: int
    ranks: int
    seed: int
    folder: Path
    patience_seconds: float
    interfere: Path | None = None
    device: str = "cpu"
    loop: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether this process computes on a GPU: the plain model never does."""
        return self.device == "cuda" and self.rank != PLAIN

    @property
    def patience(self) -> timedelta:
        return timedelta(seconds=self.patience_seconds)

    def interference(self) -> dict[str, Any]:
        """Names that the file ``interfere`` defines."""
        return {} if self.interfere is None else runpy.run_path(str(self.interfere))

    @property
    def name(self) -> str:
        return "the plain model" if self.rank == PLAIN else f"rank {self.rank}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name.replace(' ', '-')}.log"


@dataclass(frozen=True, slots=True)
class Backend:
    """How the certificate's processes compute. Its functions are looked up in the processes, so
    they stand at the top of a module that is light to import.

    make_server   (role, what ends with the process): the object whose methods are asked for
    is_refusal    whether an error is about what the user gave
    preloaded     modules that a fork server imports so that its processes need not
    """

    make_server: Callable[[Role, ExitStack], Any]
    is_refusal: Callable[[BaseException], bool]
    preloaded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InputRefused:
    """The user's input cannot be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an exception: its last line, and all of it."""

    reason: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """From the process with the plain model: what the ranks need to build theirs.

    ``args`` are Megatron's, pickled: the parent passes them on as they are.
    """

    args: bytes
    frame: Frame
    weights: Mapping[str, numpy.ndarray]
    description: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Loss per token, and the gradient of every weight of the whole model by its key; buffers, such
    as the experts' biases, as they are afterwards."""

    loss: float
    gradients: Mapping[str, numpy.ndarray]
    routed: Routed = field(default_factory=Routed)


@dataclass(frozen=True, slots=True)
class Computed:
    """Results of one rank for a batch.

    training_loss    summed over its replica's tokens, and their number, from the rank of the last
                     stage that reports; zeros from the others. ``evaluation_loss`` likewise.
    gradients        of its part of the model, over the tokens of the whole batch
    messages         sent and received in training
    collectives      issued in training, by their name on the list (allowed_collectives.py)
    problems         what went otherwise than planned, one line each
    routed           what its routers left beside gradients
    """

    training_loss: tuple[float, float]
    evaluation_loss: tuple[float, float]
    gradients: list[Shard]
    messages: int
    collectives: Counter[str]
    problems: list[str]
    routed: Routed = field(default_factory=Routed)
