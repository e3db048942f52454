"""The one rule table: what each op needs, keeps and frees.

Checker, random plans, simulator and pictures read this table, and lowering makes a message of every
need that another stage meets; the executor runs what lowering made, so no need is derived again
there. The planner's loops (planner/order/compiled) know the needs, for speed: their plans are
checked and simulated by the table before they leave, and tests hold the clocks equal
(tests/planner/test_placed_schedules.py, test_judges.py). ``c`` is the op's chunk, ``s`` its stage.
A document cut into slices ties the chunks of its slices together, and so does a document that
continues another: ``earlier`` is the chunk with the slice before, ``later`` are those with a slice
after: one, or, where documents branch, several.

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

Vocabulary parallelism cuts the output layer's rows over all stages; then these rows come besides:

    H   s = 0: F of c on last (its output)       head inputs of c           workspace
        s > 0: H of c on s-1  (what is merged)   workspace
    B   s = last: H of c on s (loss, gradient)
    I   as B
    G   s < last: B|I of c on s (log-sum-exp)    workspace                  head inputs of c
        s = last: H of c on s   (log-sum-exp)                               workspace

F of the last stage ends behind the final norm, and its output X makes a round: to stage 0, whose H
hands it on with the statistics of its own rows, and so on; H of the last stage has merged those of
all rows into the loss and the gradient of X. The log-sum-exp that G wants travels back with the
gradients, so G needs no message of its own; it fills bubbles, as W does.

(1st) and (last) stand for: where c holds the first or the last slice of a cut document. The K/V
of a cut document lies in one buffer per layer, made whole by its first slice's forward and freed
whole by its first slice's backward, the document's last; so do the gradients of its K and V,
from the last slice's backward on. Whole documents keep nothing. What an op makes it holds from
its start; what it frees it holds until its stop. A document that others continue is kept like a cut
one; its last slice then is the last of theirs: of all chunks that attend to it, on each stage, the
one whose backward comes first, and in evaluation the one whose forward comes last.

A plan of forwards only (evaluation) makes no activations, and a document's K/V is freed by its
last slice's forward. With vocabulary parallelism it has H besides, which holds nothing when it is
done. Rows that hold for some plans alone are marked ``only``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cache
from typing import Literal

from megatron_epp.ir.op import BACKWARDS, OF_HEAD, Kind, Payload


class PlanTrait(Flag):
    """Traits of a plan: a row holds where the plan has all that the row is marked with."""

    TRAINING = auto()
    EVALUATION = auto()  # forwards only
    VOCABULARY = auto()  # with vocabulary parallelism


ANY_PLAN = PlanTrait(0)
TRAINING, EVALUATION, VOCABULARY = PlanTrait


class Relation(Enum):
    """Relation of the chunk that a row speaks of to the op's own."""

    SAME = 0
    EARLIER = 1  # the chunk with the slice before, where there is one
    LATER = 2  # the chunks with a slice after: none, one, or several branches


class SlicePosition(Enum):
    """For which chunks a row holds."""

    ANY = 0
    FIRST = 1  # the chunk holds the first slice of a kept document
    LAST = 2  # the chunk holds the last slice that attends to a kept document


class StagePosition(Enum):
    """On which stages a need exists."""

    ANY = 0
    FIRST = 1
    LAST = 2
    BEFORE_LAST = 3  # all but the last

    def holds(self, stage: int, stages: int) -> bool:
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
    """Things that occupy memory on a stage besides its weights. Documents own K/V, chunks the
    rest."""

    ACTIVATIONS = "activations"  # saved by F for the backward; on the last stage with the logits
    KV = "kv"
    KV_GRADIENTS = "kv_gradients"
    WEIGHT_INPUTS = "weight_inputs"  # what W needs after I: the linears' inputs, outputs' grads
    HEAD_INPUTS = "head_inputs"  # what G needs after H: the last stage's output
    WORKSPACE = "workspace"  # while one op runs


DOCUMENT_ITEMS = (Item.KV, Item.KV_GRADIENTS)


@dataclass(frozen=True, slots=True)
class Need:
    """One of ``kinds`` must have been done for the ``chunk`` on the stage ``stage`` steps on.

    ``at`` says which stages' ops have the need.
    """

    kinds: tuple[Kind, ...]
    stage: int | Literal["last"]  # 0 here, -1 the previous stage, +1 the next; the last of all
    chunk: Relation
    why: str
    at: StagePosition = StagePosition.ANY
    only: PlanTrait = ANY_PLAN

    def met_on(self, stage: int, stages: int) -> int:
        """The stage that meets the need of an op on ``stage`` of ``stages``; -1: it has none."""
        where = stage + self.stage if isinstance(self.stage, int) else stages - 1
        return where if self.at.holds(stage, stages) and 0 <= where < stages else -1

    @property
    def payload(self) -> Payload:
        """Payload of the message where another stage meets the need."""
        if self.stage == "last" or set(self.kinds) <= set(OF_HEAD):
            return Payload.HEAD
        return Payload.ACTIVATION if self.kinds == (Kind.FORWARD,) else Payload.GRADIENT


@dataclass(frozen=True, slots=True)
class Effect:
    """``item`` of the op's chunk, or of its cut document, where ``slice`` holds.

    ``chunk``: or of the chunk that stands in that relation to it, where there is one: so rows speak
    of what lies at the border between two slices, as a state that a layer carries over it.
    """

    item: Item
    slice: SlicePosition = SlicePosition.ANY
    chunk: Relation = Relation.SAME
    only: PlanTrait = ANY_PLAN


@dataclass(frozen=True, slots=True)
class Rule:
    """The rows of one kind of op, which plans have ``only`` with these traits."""

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

# What a stage runs of every chunk, once each: one of these sets, of kinds that the plan may have.
CHUNK_OPS = (
    (Kind.FORWARD, Kind.HEAD, Kind.BACKWARD, Kind.HEAD_WEIGHT),
    (Kind.FORWARD, Kind.HEAD, Kind.INPUT, Kind.WEIGHT, Kind.HEAD_WEIGHT),
)


def held(table: Rules, traits: PlanTrait) -> Rules:
    """The rows of ``table`` that hold for plans with these ``traits``."""

    def kept[T: (Need, Effect)](rows: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(row for row in rows if row.only in traits)

    return {
        kind: Rule(kept(rule.needs), kept(rule.makes), kept(rule.frees))
        for kind, rule in table.items()
        if rule.only in traits
    }


@cache
def rules_for(vocabulary_parallel: bool, forward_only: bool = False) -> Rules:
    """The rules that govern such plans."""
    traits = EVALUATION if forward_only else TRAINING
    return held(RULES, traits | VOCABULARY if vocabulary_parallel else traits)
