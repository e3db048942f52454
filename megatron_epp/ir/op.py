"""An op: one kind of work on one chunk on one stage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from megatron_epp.ir.errors import PlanError, quoted
from megatron_epp.ir.span import NUMBER


class Kind(Enum):
    """Kinds of work.

    A new kind of op is a member here and four answers: what it needs, makes and frees, and which
    ops a chunk must have (ir/rules); what it takes (the cost model, and sim/unit_table for pictures
    without one); what runs it (runtime/executor); how it is drawn (show/colours). Text form,
    checks, order, messages and simulation follow from these; ``tests/ir/test_costly_kind.py`` adds
    one that costs and frees.
    """

    FORWARD = "F"
    """The forward. Roughly: ``y = layers(x)``; keep what the backward wants; send y to stage + 1.
    The last stage makes the loss of y instead."""

    BACKWARD = "B"
    """The whole backward, I and W in one. Roughly: recompute what was not kept;
    ``dx, dw = vjp(dy)``; add dw to the weights' gradients; send dx to stage - 1."""

    INPUT = "I"
    """Its half on the critical path. Roughly: recompute what was not kept; ``dx = dy @ w``; keep
    (x, dy) of every linear layer for W; send dx to stage - 1."""

    WEIGHT = "W"
    """Its other half, which nobody waits for. Roughly: ``dw = dy.T @ x`` of every linear layer; add
    dw to the weights' gradients; drop (x, dy)."""

    HEAD = "H"
    """The stage's part of the vocabulary (vocabulary parallelism, see ir/rules). Roughly: logits of
    its rows for the chunk; merge their maximum, sum and weighted rows into what the stage before
    handed on; hand it on. The last stage makes the loss and the gradient of y."""

    HEAD_WEIGHT = "G"
    """Its weight gradient, which nobody waits for. Roughly: logits again; ``dw = (softmax - labels)
    .T @ y``; add dw to its rows' gradients; drop y."""

    SEND = "SEND"
    """Only after lowering. Roughly: ``isend(tensor, target)``; the op after it does not wait."""

    RECEIVE = "RECV"
    """Only after lowering. Roughly: wait for the ``irecv`` that was posted early."""


TRANSFERS = (Kind.SEND, Kind.RECEIVE)
COMPUTE = tuple(kind for kind in Kind if kind not in TRANSFERS)
# Every array of kinds holds these: F 0, B 1, I 2, W 3, H 4, G 5.
KIND_CODE: Mapping[Kind, int] = {kind: code for code, kind in enumerate(COMPUTE)}
BACKWARDS = (Kind.BACKWARD, Kind.INPUT)  # either of them hands the gradient on
OF_LAYERS = (Kind.FORWARD, *BACKWARDS, Kind.WEIGHT)  # ops that run a stage's layers
MAKE_GRADIENTS = (*BACKWARDS, Kind.WEIGHT, Kind.HEAD_WEIGHT)  # in plans for training alone
OF_HEAD = (Kind.HEAD, Kind.HEAD_WEIGHT)  # ops that run a stage's part of the output layer

_CODES = [kind.value for kind in COMPUTE]
_OP = re.compile(rf"([{''.join(_CODES)}])({NUMBER})")
_STAGE_OP = re.compile(rf"([{''.join(_CODES)}])({NUMBER})\.({NUMBER})")


@dataclass(frozen=True, slots=True, order=False)
class Op:
    """Work of ``kind`` (one of COMPUTE) on chunk ``chunk``; the stage is where it stands."""

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
            letters = f"{', '.join(_CODES[:-1])} or {_CODES[-1]}"
            raise PlanError(f"{quoted(text)} is no op; expected {letters} and a chunk, as in F0")
        return cls(Kind(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, order=False)
class StageOp:
    """``op`` of ``stage``, on a rank that computes several stages: ``F2.5`` is F of stage 2 on
    chunk 5."""

    stage: int
    op: Op

    @property
    def kind(self) -> Kind:
        return self.op.kind

    @property
    def chunk(self) -> int:
        return self.op.chunk

    def __str__(self) -> str:
        return f"{self.op.kind.value}{self.stage}.{self.op.chunk}"

    @classmethod
    def parse(cls, text: str) -> "StageOp":
        match = _STAGE_OP.fullmatch(text)
        if match is None:
            letters = f"{', '.join(_CODES[:-1])} or {_CODES[-1]}"
            raise PlanError(
                f"{quoted(text)} is no op of a stage; expected {letters}, a stage and a chunk, as "
                "in F2.0"
            )
        return cls(int(match[2]), Op(Kind(match[1]), int(match[3])))


class Payload(Enum):
    """Kinds of tensors that travel between stages."""

    ACTIVATION = "F"  # to the next stage
    GRADIENT = "B"  # to the previous one
    HEAD = "H"  # what H works on: from the last stage to the first, then to the next and the next


@dataclass(frozen=True, slots=True)
class Message:
    """The tensor of ``chunk`` that stage ``source`` hands to stage ``target``.

    ranks   of the two; None where stage i lies on rank i
    """

    payload: Payload
    chunk: int
    source: int
    target: int
    ranks: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def link(self) -> tuple[int, int]:
        """The ranks between which it travels; messages of one link arrive in the order sent."""
        return self.ranks or (self.source, self.target)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message: ``Kind.SEND`` at its source, ``Kind.RECEIVE`` at its target."""

    kind: Kind
    message: Message

    def __post_init__(self):
        if self.kind not in TRANSFERS:
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


@dataclass(frozen=True, slots=True)
class HandOver:
    """Hand-over, to another stage of the same rank, of what the op before it has made: ``message``
    goes nowhere, so it takes no time and is not recorded."""

    message: Message

    def __str__(self) -> str:
        return f"HAND:{self.message.payload.value}{self.message.chunk}>{self.message.target}"
