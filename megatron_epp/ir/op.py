"""An op: one kind of work on one chunk on one stage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatron_epp.ir.errors import PlanError
from megatron_epp.ir.span import NUMBER


class Kind(Enum):
    """Kinds of work. A new kind brings four answers: rules, simulator, executor, picture."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward
    INPUT = "I"  # its half on the critical path: the gradient of the input
    WEIGHT = "W"  # its other half: the gradient of the weights, which nobody waits for
    SEND = "SEND"  # only after lowering
    RECEIVE = "RECV"  # only after lowering


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
# Every array of kinds holds these: F 0, B 1, I 2, W 3.
KIND_CODE: Mapping[Kind, int] = {kind: code for code, kind in enumerate(COMPUTE)}
BACKWARDS = (Kind.BACKWARD, Kind.INPUT)  # either of them hands the gradient on

_OP = re.compile(rf"([FBIW])({NUMBER})")


@dataclass(frozen=True, slots=True, order=False)
class Op:
    """Work of ``kind`` (F, B, I or W) on chunk number ``chunk``; the stage is where it stands."""

    kind: Kind
    chunk: int

    def __post_init__(self):
        if self.kind not in COMPUTE:
            raise PlanError(f"{self.kind.value} is a transfer, not an op of a plan")

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        match = _OP.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is no op; expected F, B, I or W and a chunk, as in F0")
        return cls(Kind(match[1]), int(match[2]))


class Payload(Enum):
    """What travels between neighbouring stages."""

    ACTIVATION = "F"  # to the next stage
    GRADIENT = "B"  # to the previous one


@dataclass(frozen=True, slots=True)
class Message:
    """The tensor of ``chunk`` that stage ``source`` hands to stage ``target``."""

    payload: Payload
    chunk: int
    source: int
    target: int

    @property
    def link(self) -> tuple[int, int]:
        """The directed link it travels on; messages of one link arrive in the order sent."""
        return self.source, self.target


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message: ``Kind.SEND`` at its source, ``Kind.RECEIVE`` at its target."""

    kind: Kind
    message: Message

    def __post_init__(self):
        if self.kind not in (Kind.SEND, Kind.RECEIVE):
            raise PlanError(f"{self.kind.value} is no transfer; expected SEND or RECV")

    @property
    def chunk(self) -> int:
        return self.message.chunk

    def __str__(self) -> str:
        message = self.message
        if self.kind is Kind.SEND:
            return f"SEND:{message.payload.value}{message.chunk}>{message.target}"
        return f"RECV:{message.payload.value}{message.chunk}<{message.source}"


@dataclass(frozen=True, slots=True)
class Post:
    """From here on the target of ``message`` takes it in; it takes no time and is not recorded."""

    message: Message

    def __str__(self) -> str:
        return f"POST:{self.message.payload.value}{self.message.chunk}<{self.message.source}"
