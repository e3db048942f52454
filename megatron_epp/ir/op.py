"""Op: one kind of work on one chunk on one stage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from megatron_epp.ir.errors import PlanError, quoted
from megatron_epp.ir.span import NUMBER


class Kind(Enum):
    """Kinds of ops.

    A new kind needs a member here and these changes:

    - ir/rules lists what the op needs, makes and frees, and which ops a chunk must have.
    - The cost model gives the op's time; sim/unit_table gives the time in pictures that are drawn
      without a cost model.
    - runtime/executor has the method that runs the op.
    - show/colours defines the op's appearance.

    The text form, checks, orders, messages and simulation need no further change. The test
    ``tests/ir/test_costly_kind.py`` adds a kind that takes time and frees memory.
    """

    FORWARD = "F"
    """Forward.

    ``y = layers(x)``; save activations; send y to stage + 1. The last stage computes the loss of y
    instead of sending it.
    """

    BACKWARD = "B"
    """Full backward, I and W in one.

    Recompute what was not saved; ``dx, dw = vjp(dy)``; accumulate dw; send dx to stage - 1.
    """

    INPUT = "I"
    """Input gradients, the half of the backward on the critical path.

    Recompute what was not saved; ``dx = dy @ w``; save (x, dy) of every linear layer for W; send dx
    to stage - 1.
    """

    WEIGHT = "W"
    """Weight gradients, the half of the backward that no other op needs.

    ``dw = dy.T @ x`` of every linear layer; accumulate dw; free (x, dy).
    """

    HEAD = "H"
    """LM head on the stage's vocabulary rows (vocabulary parallelism, see ir/rules).

    Compute the logits of the stage's rows; merge their maximum, exponential sum and weighted rows
    into the result of the previous stage; send the merged result to the next stage. The last stage
    computes the loss and the gradient of y instead of sending.
    """

    HEAD_WEIGHT = "G"
    """Weight gradient of the LM head, which no other op needs.

    Recompute the logits; ``dw = (softmax - labels).T @ y``; accumulate dw; free y.
    """

    SEND = "SEND"
    """Send, in lowered programs only: ``isend(tensor, target)``; the next op does not wait."""

    RECEIVE = "RECV"
    """Receive, in lowered programs only: wait for the ``irecv`` that a :class:`Post` started."""


TRANSFERS = (Kind.SEND, Kind.RECEIVE)
COMPUTE = tuple(kind for kind in Kind if kind not in TRANSFERS)
# Order of kinds in arrays: F 0, B 1, I 2, W 3, H 4, G 5
KIND_CODE: Mapping[Kind, int] = {kind: code for code, kind in enumerate(COMPUTE)}
BACKWARDS = (Kind.BACKWARD, Kind.INPUT)  # each of them sends the gradient to the previous stage
OF_LAYERS = (Kind.FORWARD, *BACKWARDS, Kind.WEIGHT)  # ops that run a stage's layers
MAKE_GRADIENTS = (*BACKWARDS, Kind.WEIGHT, Kind.HEAD_WEIGHT)  # in training plans only
OF_HEAD = (Kind.HEAD, Kind.HEAD_WEIGHT)  # ops that run a stage's rows of the LM head

_CODES = [kind.value for kind in COMPUTE]
_OP = re.compile(rf"([{''.join(_CODES)}])({NUMBER})")
_STAGE_OP = re.compile(rf"([{''.join(_CODES)}])({NUMBER})\.({NUMBER})")


@dataclass(frozen=True, slots=True, order=False)
class Op:
    """Op of ``kind`` (one of COMPUTE) on ``chunk``.

    The op does not name its stage: a plan has one list of ops for every stage.

    Raises:
        PlanError: ``kind`` is a transfer.
    """

    kind: Kind
    chunk: int

    def __post_init__(self):
        if self.kind not in COMPUTE:
            raise PlanError(f"{self.kind.value} is a transfer, not an op of a plan")

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}"

    @classmethod
    def parse(cls, text: str) -> "Op":
        """Return the op in ``text``, such as ``F0``.

        Raises:
            PlanError: the text is not an op.
        """
        match = _OP.fullmatch(text)
        if match is None:
            letters = f"{', '.join(_CODES[:-1])} or {_CODES[-1]}"
            raise PlanError(
                f"{quoted(text)} is not an op; expected {letters} and a chunk, as in F0"
            )
        return cls(Kind(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, order=False)
class StageOp:
    """Op with its stage, for ranks with several stages: ``F2.5`` is F of stage 2 on chunk 5."""

    stage: int
    op: Op

    @property
    def kind(self) -> Kind:
        """Kind of the op."""
        return self.op.kind

    @property
    def chunk(self) -> int:
        """Chunk of the op."""
        return self.op.chunk

    def __str__(self) -> str:
        return f"{self.op.kind.value}{self.stage}.{self.op.chunk}"

    @classmethod
    def parse(cls, text: str) -> "StageOp":
        """Return the op and stage in ``text``, such as ``F2.0``.

        Raises:
            PlanError: the text is not an op with a stage.
        """
        match = _STAGE_OP.fullmatch(text)
        if match is None:
            letters = f"{', '.join(_CODES[:-1])} or {_CODES[-1]}"
            raise PlanError(
                f"{quoted(text)} is not an op of a stage; expected {letters}, a stage and a chunk, "
                "as in F2.0"
            )
        return cls(int(match[2]), Op(Kind(match[1]), int(match[3])))


class Payload(Enum):
    """Kinds of tensors that stages send to each other."""

    ACTIVATION = "F"  # to the next stage
    GRADIENT = "B"  # to the previous stage
    HEAD = "H"  # input of H: from the last stage to the first, then from each stage to the next


@dataclass(frozen=True, slots=True)
class Message:
    """Tensor of one chunk that a stage sends to another.

    Attributes:
        payload: kind of the tensor.
        chunk: number of the chunk.
        source: stage that sends the tensor.
        target: stage that receives the tensor.
        ranks: pipeline ranks of ``source`` and ``target``; None if stage i is on rank i.
    """

    payload: Payload
    chunk: int
    source: int
    target: int
    ranks: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def link(self) -> tuple[int, int]:
        """Sending and receiving rank; messages of one link arrive in the order of their sends."""
        return self.ranks or (self.source, self.target)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message: ``Kind.SEND`` at its source, ``Kind.RECEIVE`` at its target."""

    kind: Kind
    message: Message

    def __post_init__(self):
        if self.kind not in TRANSFERS:
            raise PlanError(f"{self.kind.value} is not a transfer; expected SEND or RECV")

    @property
    def chunk(self) -> int:
        """Chunk of the message."""
        return self.message.chunk

    def __str__(self) -> str:
        message = self.message
        if self.kind is Kind.SEND:
            return f"SEND:{message.payload.value}{message.chunk}>{message.target}"
        return f"RECV:{message.payload.value}{message.chunk}<{message.source}"


@dataclass(frozen=True, slots=True)
class Post:
    """Start of the target's ``irecv`` of ``message``, which takes no time and is not recorded."""

    message: Message

    def __str__(self) -> str:
        return f"POST:{self.message.payload.value}{self.message.chunk}<{self.message.source}"


@dataclass(frozen=True, slots=True)
class HandOver:
    """Hand-over of the preceding op's result to another stage of the same rank.

    Nothing is sent between ranks, so the hand-over takes no time and is not recorded.
    """

    message: Message

    def __str__(self) -> str:
        return f"HAND:{self.message.payload.value}{self.message.chunk}>{self.message.target}"
