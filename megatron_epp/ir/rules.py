"""Rule table: what each op needs, makes and frees.

The checker, the random plans, the simulator and the pictures read this table. Lowering turns every
need that another stage meets into a message, and the executor runs the lowered programs. For speed,
the planner's compiled loops (planner/order/compiled) contain a copy of the needs. The plans from
these loops are checked and simulated with the table. Tests require that the loops and the simulator
compute the same times (tests/planner/test_placed_schedules.py).

``c`` is the chunk of the op and ``s`` the stage of the op. ``earlier`` is the chunk with the
preceding slice of the same document, or with the end of the prefix that the document continues.
``later`` stands for all chunks with a following slice; there are several if several documents
continue c.

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

With vocabulary parallelism, the rows of the LM head are sharded over all stages. The table then
also contains:

    H   s = 0: F of c on last (its output)       head inputs of c           workspace
        s > 0: H of c on s-1  (partial result)   workspace
    B   s = last: H of c on s (loss, gradient)
    I   as B
    G   s < last: B|I of c on s (log-sum-exp)    workspace                  head inputs of c
        s = last: H of c on s   (log-sum-exp)                               workspace

F of the last stage ends after the final norm; its output X is sent to stage 0. H of each stage adds
the softmax statistics of its own vocabulary rows and sends X and the statistics to the next stage.
H of the last stage computes the loss and the gradient of X from the statistics of all rows. The
log-sum-exp that G needs is sent with the gradients, so G needs no message of its own. No other op
needs G, so it can fill bubbles, like W.

(1st) and (last) restrict a row to chunks with the first or the last slice of a cut document. Each
layer has one buffer for the K/V of a cut document. The forward of the first slice allocates the
buffer; the backward of the first slice, which runs last, frees it. The gradients of K and V exist
from the backward of the last slice on. The bytes of an item count from the start of the op that
makes it to the end of the op that frees it.

A document that other documents continue is cached like a cut document. Documents that are neither
cut nor continued cache nothing. If several chunks attend to a document, (last) means the chunk of
these whose backward runs first on the stage, or in evaluation the chunk whose forward runs last.

In a forward-only plan (evaluation), F saves no activations, and F of a document's last slice frees
the document's K/V. With vocabulary parallelism the plan also has H, which saves nothing. The field
``only`` marks rows that apply to some plans only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, Flag, auto
from functools import cache
from typing import Literal

from megatron_epp.ir.op import BACKWARDS, OF_HEAD, Kind, Payload


class PlanTrait(Flag):
    """Traits of a plan; a rule-table row applies to plans that have all traits in ``row.only``."""

    TRAINING = auto()
    EVALUATION = auto()  # forward-only
    VOCABULARY = auto()  # with vocabulary parallelism


ANY_PLAN = PlanTrait(0)
TRAINING, EVALUATION, VOCABULARY = PlanTrait


class Relation(Enum):
    """Chunk that a row of the rule table refers to, relative to the chunk of the op."""

    SAME = 0
    EARLIER = 1  # the chunk with the preceding slice, if there is one
    LATER = 2  # the chunks with a following slice: none, one, or several branches


class SlicePosition(Enum):
    """Slice that a chunk must hold for a row of the rule table to apply."""

    ANY = 0
    FIRST = 1  # the chunk holds the first slice of a cached document
    LAST = 2  # the chunk holds the last slice that attends to a cached document


class StagePosition(Enum):
    """Stages whose ops have a need of the rule table."""

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

    K/V and their gradients belong to documents, all other items to chunks.
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
    """Requirement that another op, the provider, has run before an op.

    Attributes:
        kinds: kinds of op that the provider may be; one op is enough.
        stage: stage of the provider: "last", or 0, -1 or +1 relative to the op's stage.
        chunk: chunk of the provider, relative to the op's chunk.
        why: what the op receives from the provider, for error messages.
        at: stages whose ops have the need.
        only: traits that a plan must have for the need to apply.
    """

    kinds: tuple[Kind, ...]
    stage: int | Literal["last"]  # -
    chunk: Relation
    why: str
    at: StagePosition = StagePosition.ANY
    only: PlanTrait = ANY_PLAN

    def met_on(self, stage: int, stages: int) -> int:
        """Return the provider's stage for an op on ``stage``; -1 if such an op has no such need."""
        where = stage + self.stage if isinstance(self.stage, int) else stages - 1
        return where if self.at.holds(stage, stages) and 0 <= where < stages else -1

    @property
    def payload(self) -> Payload:
        """Payload of the message that is sent if another stage meets the need."""
        if self.stage == "last" or set(self.kinds) <= set(OF_HEAD):
            return Payload.HEAD
        return Payload.ACTIVATION if self.kinds == (Kind.FORWARD,) else Payload.GRADIENT


@dataclass(frozen=True, slots=True)
class Effect:
    """Item that an op makes or frees.

    Attributes:
        item: item of a chunk, or of the chunk's cut document.
        slice: slice that the op's chunk must hold for the effect to exist.
        chunk: chunk of the item, relative to the op's chunk; the effect exists only if that chunk
            does. Relations other than SAME are for items at the boundary of two slices, such as an
            SSM state.
        only: traits that a plan must have for the effect to exist.
    """

    item: Item
    slice: SlicePosition = SlicePosition.ANY
    chunk: Relation = Relation.SAME
    only: PlanTrait = ANY_PLAN


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule-table rows of one kind of op; only plans with all traits in ``only`` have such ops."""

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
    """Return the rule table of plans with or without vocabulary parallelism and backwards."""
    traits = EVALUATION if forward_only else TRAINING
    return held(RULES, traits | VOCABULARY if vocabulary_parallel else traits)
