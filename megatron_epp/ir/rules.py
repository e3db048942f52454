"""Rule table: what each op needs, makes and frees.

Checker, random plans, simulator and pictures read this table. Lowering makes a message of every
need that another stage meets, and the executor runs the lowered programs. The planner's compiled
loops (planner/order/compiled) repeat the needs for speed. The table checks and simulates their
plans, and tests compare the times (tests/planner/test_placed_schedules.py).

``c`` is the op's chunk, ``s`` its stage. Slices of one document link their chunks, and so does a
document that continues another. ``earlier`` is the chunk with the preceding slice. ``later`` are
the chunks with a following slice: one, or several where documents branch.

    op  needs                                    makes                      frees
    F   F of c on s-1   (its input)              activations of c           workspace
        F of earlier on s (the context's K, V)   K/V of the document (1st)
                                                 workspace
    B   F of c on s     (what it saved)          K/V gradients (last)       activations of c
        B|I of c on s+1 (its output's gradient)  workspace                  K/V, K/V grads (1st)
        B|I of all later on s (dK, dV of c)                                 workspace
    I   as B                                     as B, weight inputs of c   as B
    W   I of c on s     (inputs, output grads)   workspace                  weight inputs of c
                                                                            workspace

With vocabulary parallelism, which shards the rows of the LM head over all stages, there are also:

    H   s = 0: F of c on last (its output)       head inputs of c           workspace
        s > 0: H of c on s-1  (partial result)   workspace
    B   s = last: H of c on s (loss, gradient)
    I   as B
    G   s < last: B|I of c on s (log-sum-exp)    workspace                  head inputs of c
        s = last: H of c on s   (log-sum-exp)                               workspace

F of the last stage ends after the final norm, and its output X visits all stages. H of stage 0
passes X on with the statistics of its own rows, and so does each following stage. H of the last
stage has merged the statistics of all rows into the loss and the gradient of X. The log-sum-exp
that G needs travels back with the gradients, so G needs no message of its own. Like W, it fills
bubbles.

(1st) and (last) mean: if c holds the first or the last slice of a cut document. The K/V of a cut
document is in one buffer per layer. The forward of its first slice allocates the buffer; the
backward of its first slice, which is the document's last, frees it. The gradients of K and V exist
from the backward of the last slice on. Documents that are not cut cache nothing. An op holds what
it makes from its start, and what it frees until its stop. A document that others continue is cached
like a cut one. Its last slice is then the last of all chunks that attend to it, on each stage: the
one whose backward comes first, or in evaluation the one whose forward comes last.

A forward-only plan (evaluation) makes no activations, and the forward of a document's last slice
frees its K/V. With vocabulary parallelism it also has H, which holds nothing after it has run. Rows
that apply to some plans only are marked ``only``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cache
from typing import Literal

from megatron_epp.ir.op import BACKWARDS, OF_HEAD, Kind, Payload


class PlanTrait(Flag):
    """Traits of a plan; a row applies if the plan has all traits that the row is marked with."""

    TRAINING = auto()
    EVALUATION = auto()  # forward-only
    VOCABULARY = auto()  # with vocabulary parallelism


ANY_PLAN = PlanTrait(0)
TRAINING, EVALUATION, VOCABULARY = PlanTrait


class Relation(Enum):
    """Relation of a row's chunk to the op's own chunk."""

    SAME = 0
    EARLIER = 1  # the chunk with the preceding slice, if there is one
    LATER = 2  # the chunks with a following slice: none, one, or several branches


class SlicePosition(Enum):
    """Condition on the slices of a chunk for a row to apply."""

    ANY = 0
    FIRST = 1  # the chunk holds the first slice of a cached document
    LAST = 2  # the chunk holds the last slice that attends to a cached document


class StagePosition(Enum):
    """Stages on which a need exists."""

    ANY = 0
    FIRST = 1
    LAST = 2
    BEFORE_LAST = 3  # all but the last

    def holds(self, stage: int, stages: int) -> bool:
        """Return whether ``stage`` of ``stages`` is at this position."""
        match self:
            case StagePosition.ANY:
                return True
            case StagePosition.FIRST:
                return stage == 0
            case StagePosition.LAST:
                return stage == stages - 1
            case StagePosition.BEFORE_LAST:
                return stage < stages - 1


class Item(Enum):
    """Items that occupy memory on a stage in addition to model states.

    K/V belong to documents, all else to chunks.
    """

    ACTIVATIONS = "activations"  # saved by F for the backward; on the last stage the logits, too
    KV = "kv"
    KV_GRADIENTS = "kv_gradients"
    # Saved by I for W: inputs and output gradients of the linear layers
    WEIGHT_INPUTS = "weight_inputs"
    HEAD_INPUTS = "head_inputs"  # saved by H for G: the last stage's output
    WORKSPACE = "workspace"  # allocated while one op runs


DOCUMENT_ITEMS = (Item.KV, Item.KV_GRADIENTS)


@dataclass(frozen=True, slots=True)
class Need:
    """Requirement that one of several kinds of op has run.

    Attributes:
        kinds: kinds of which one must have run.
        stage: stage on which it must have run, relative to the op's: 0, -1 or +1; or "last".
        chunk: chunk for which it must have run.
        why: what the op gets from it, for error messages.
        at: stages whose ops have the need.
        only: traits of the plans that have the need.
    """

    kinds: tuple[Kind, ...]
    stage: int | Literal["last"]  # -
    chunk: Relation
    why: str
    at: StagePosition = StagePosition.ANY
    only: PlanTrait = ANY_PLAN

    def met_on(self, stage: int, stages: int) -> int:
        """Return the stage that meets the need of an op on ``stage``; -1: there is no such need."""
        where = stage + self.stage if isinstance(self.stage, int) else stages - 1
        return where if self.at.holds(stage, stages) and 0 <= where < stages else -1

    @property
    def payload(self) -> Payload:
        """Payload of the message if another stage meets the need."""
        if self.stage == "last" or set(self.kinds) <= set(OF_HEAD):
            return Payload.HEAD
        return Payload.ACTIVATION if self.kinds == (Kind.FORWARD,) else Payload.GRADIENT


@dataclass(frozen=True, slots=True)
class Effect:
    """Item that an op makes or frees.

    Attributes:
        item: item of the op's chunk, or of its cut document.
        slice: slices of the chunk for which the row applies.
        chunk: relation to the chunk that owns the item; the row applies only if that chunk exists.
            A relation other than SAME is for items at the boundary of two slices, such as an SSM
            state.
        only: traits of the plans that have the row.
    """

    item: Item
    slice: SlicePosition = SlicePosition.ANY
    chunk: Relation = Relation.SAME
    only: PlanTrait = ANY_PLAN


@dataclass(frozen=True, slots=True)
class Rule:
    """Rows of one kind of op; ``only`` has the traits of the plans that have the kind."""

    needs: tuple[Need, ...]
    makes: tuple[Effect, ...]
    frees: tuple[Effect, ...]
    only: PlanTrait = ANY_PLAN


Rules = Mapping[Kind, Rule]  # a rule table

_WORKSPACE = Effect(Item.WORKSPACE)
_BACKWARD_NEEDS = (
    Need((Kind.FORWARD,), 0, Relation.SAME, "what its forward saved"),
    Need(BACKWARDS, +1, Relation.SAME, "the gradient of its output"),
    Need(BACKWARDS, 0, Relation.LATER, "the gradients of its K and V from the slice after"),
    Need(
        (Kind.HEAD,),
        0,
        Relation.SAME,
        "the gradient of the model's output",
        StagePosition.LAST,
        VOCABULARY,
    ),
)
_BACKWARD_MAKES = (Effect(Item.KV_GRADIENTS, SlicePosition.LAST), _WORKSPACE)
_BACKWARD_FREES = (
    Effect(Item.ACTIVATIONS),
    Effect(Item.KV, SlicePosition.FIRST),
    Effect(Item.KV_GRADIENTS, SlicePosition.FIRST),
    _WORKSPACE,
)

RULES: Rules = {
    Kind.FORWARD: Rule(
        needs=(
            Need((Kind.FORWARD,), -1, Relation.SAME, "its input"),
            Need((Kind.FORWARD,), 0, Relation.EARLIER, "the K and V of the slice before"),
        ),
        makes=(
            Effect(Item.ACTIVATIONS, only=TRAINING),
            Effect(Item.KV, SlicePosition.FIRST),
            _WORKSPACE,
        ),
        frees=(Effect(Item.KV, SlicePosition.LAST, only=EVALUATION), _WORKSPACE),
    ),
    Kind.BACKWARD: Rule(_BACKWARD_NEEDS, _BACKWARD_MAKES, _BACKWARD_FREES, TRAINING),
    Kind.INPUT: Rule(
        _BACKWARD_NEEDS, (*_BACKWARD_MAKES, Effect(Item.WEIGHT_INPUTS)), _BACKWARD_FREES, TRAINING
    ),
    Kind.WEIGHT: Rule(
        needs=(Need((Kind.INPUT,), 0, Relation.SAME, "what its I left for it"),),
        makes=(_WORKSPACE,),
        frees=(Effect(Item.WEIGHT_INPUTS), _WORKSPACE),
        only=TRAINING,
    ),
    Kind.HEAD: Rule(
        needs=(
            Need((Kind.FORWARD,), "last", Relation.SAME, "the model's output", StagePosition.FIRST),
            Need((Kind.HEAD,), -1, Relation.SAME, "what the vocabulary's rows before made"),
        ),
        makes=(Effect(Item.HEAD_INPUTS, only=TRAINING), _WORKSPACE),
        frees=(_WORKSPACE,),
        only=VOCABULARY,
    ),
    Kind.HEAD_WEIGHT: Rule(
        needs=(
            Need(
                BACKWARDS,
                0,
                Relation.SAME,
                "the log-sum-exp that came with its gradient",
                StagePosition.BEFORE_LAST,
            ),
            Need((Kind.HEAD,), 0, Relation.SAME, "what its H left for it", StagePosition.LAST),
        ),
        makes=(_WORKSPACE,),
        frees=(Effect(Item.HEAD_INPUTS), _WORKSPACE),
        only=TRAINING | VOCABULARY,
    ),
}

# Ops that a stage runs once for every chunk: one of these sets, restricted to the plan's kinds.
CHUNK_OPS = (
    (Kind.FORWARD, Kind.HEAD, Kind.BACKWARD, Kind.HEAD_WEIGHT),
    (Kind.FORWARD, Kind.HEAD, Kind.INPUT, Kind.WEIGHT, Kind.HEAD_WEIGHT),
)


def held(table: Rules, traits: PlanTrait) -> Rules:
    """Return the rows of ``table`` that apply to plans with these ``traits``."""

    def kept[T: (Need, Effect)](rows: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(row for row in rows if row.only in traits)

    return {
        kind: Rule(kept(rule.needs), kept(rule.makes), kept(rule.frees))
        for kind, rule in table.items()
        if rule.only in traits
    }


@cache
def rules_for(vocabulary_parallel: bool, forward_only: bool = False) -> Rules:
    """Return the rule table of plans with these traits."""
    traits = EVALUATION if forward_only else TRAINING
    return held(RULES, traits | VOCABULARY if vocabulary_parallel else traits)
