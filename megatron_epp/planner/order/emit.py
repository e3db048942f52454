"""Conversion of drafts (plans as arrays) to plans, for all pipeline planners."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import COMPUTE, KEEP, OFFLOAD, Op, Plan
from megatron_epp.ir.recompute import offload_among
from megatron_epp.planner.chunks.chunking import Chunking
from megatron_epp.planner.chunks.slicing import Rates
from megatron_epp.planner.chunks.tree_cutting import Tree
from megatron_epp.planner.order.compiled import NOTHING


@dataclass(frozen=True, slots=True)
class SortedBatch:
    """Documents of a batch, sorted by descending length.

    Attributes:
        lengths: lengths in tokens, in descending order.
        names: for every sorted document, its index in the caller's order.
        documents: lengths in tokens, in the caller's order.
        trees: for each replica of a lockstep group, its documents, some of which continue others;
            () if no document continues another. If there are trees, ``lengths`` are in the caller's
            order, too.
    """

    lengths: np.ndarray
    names: tuple[int, ...]
    documents: tuple[int, ...]
    trees: tuple[Tree, ...] = ()

    @classmethod
    def of_trees(cls, trees: Sequence[Tree]) -> "SortedBatch":
        """Return the batch of the documents of ``trees``, of one replica after the other."""
        documents = tuple(length for tree in trees for length in tree.lengths)
        names = tuple(range(len(documents)))
        return cls(np.array(documents, np.int64), names, documents, tuple(trees))

    @property
    def starts(self) -> np.ndarray | None:
        """Position of the first token of each document; None if all begin at 0."""
        return np.array([at for tree in self.trees for at in tree.offsets]) if self.trees else None

    def work_seconds(self, rates: Rates) -> float:
        """Return the seconds of all documents on an average stage."""
        if self.trees:
            return sum(tree.total for tree in self.trees)
        return float(rates.document_seconds(self.lengths).sum())

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "SortedBatch":
        """Sort documents by length; raise a ValueError if there are none, or if one is empty."""
        documents = tuple(int(length) for length in lengths)
        if not documents:
            raise ValueError("no document to plan for; expected at least one length")
        if min(documents) < 1:
            raise ValueError(f"a document of {min(documents)} inputs; expected at least 1")
        names = sorted(range(len(documents)), key=lambda d: -documents[d])
        return cls(np.array([documents[d] for d in names], dtype=np.int64), tuple(names), documents)

    def named(self, loads: Loads) -> Loads:
        """Return ``loads`` with the caller's document indices."""
        names = np.array(self.names)
        return dataclasses.replace(
            loads,
            document=np.where(loads.document >= 0, names[loads.document], -1),
            lengths=np.array(self.documents, dtype=np.float64),
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan as arrays.

    Attributes:
        chunking: the chunks.
        counts: number of layers [stages, chunks] by (layer kind, recompute mode). All other layers
            save their activations.
        kinds: [stages, ops] op kinds in order, as codes (ir.KIND_CODE) or NOTHING.
        chunks: [stages, ops] chunks of these ops.
        pipelines: number of pipelines that run one after another.
        note: description of how the plan was found.
        stages: [ranks, ops] stage of each op, if ranks have several stages. ``kinds`` and
            ``chunks`` are then [ranks, ops].
        packing_tokens: packing length in tokens that the planner chose; 0 if it chose none.
    """

    chunking: Chunking
    counts: Counts
    kinds: np.ndarray
    chunks: np.ndarray
    pipelines: int = 1
    note: str = ""
    stages: np.ndarray | None = None
    packing_tokens: int = 0


def plan_of(batch: SortedBatch, draft: Draft, cost: Cost) -> Plan:
    """Return the plan of a draft (plan as arrays), without predicted times."""
    place: tuple[int, ...] = ()
    turns: tuple[tuple[int, ...], ...] = ()
    if draft.stages is None:
        orders = orders_of_arrays(draft.kinds, draft.chunks)
    else:
        arrays = (draft.kinds.tolist(), draft.chunks.tolist(), draft.stages.tolist())
        ran = [
            [op for op in zip(*row, strict=True) if op[0] != NOTHING]
            for row in zip(*arrays, strict=True)
        ]
        place, (orders, turns) = cost.layout.place, orders_of_ranks(ran, cost.layout.stages)
    return Plan(
        documents=batch.documents,
        layers=cost.layout.layers,
        chunks=draft.chunking.ir_chunks(batch.names),
        recompute=_recompute(draft.counts, cost, draft.chunking.count),
        orders=orders,
        place=place,
        turns=turns,
        prefixes=tuple(prefix for tree in batch.trees for prefix in tree.prefixes),
    )


def orders_of_arrays(kinds: np.ndarray, chunks: np.ndarray) -> tuple[tuple[Op, ...], ...]:
    """Return the ops of every stage, from [stages, ops] ``kinds`` (or NOTHING) and ``chunks``."""
    ops = [[Op(kind, c) for c in range(int(chunks.max()) + 1)] for kind in COMPUTE]
    return tuple(
        tuple(ops[kind][chunk] for kind, chunk in zip(*row, strict=True) if kind != NOTHING)
        for row in zip(kinds.tolist(), chunks.tolist(), strict=True)
    )


def orders_of_ranks(
    ran: Sequence[Sequence[tuple[int, int, int]]], count: int
) -> tuple[tuple[tuple[Op, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the order of each of ``count`` stages, and the stages of every rank's ops.

    ``ran`` contains (kind code, chunk, stage) of the ops of every rank.
    """
    orders: list[list[Op]] = [[] for _ in range(count)]
    for row in ran:
        for kind, chunk, stage in row:
            orders[stage].append(Op(COMPUTE[kind], chunk))
    turns = tuple(tuple(stage for *_, stage in row) for row in ran)
    return tuple(map(tuple, orders)), turns


def _recompute(counts: Counts, cost: Cost, chunks: int) -> tuple[tuple[str, ...], ...]:
    """Return a string for every stage and chunk, with one letter (recompute mode) per layer.

    For every layer kind, layers with the modes of ``counts`` precede saved layers. Offloaded layers
    are distributed evenly among all layers of the kind.
    """
    rows = []
    for stage, word in enumerate(cost.layout.kinds.words):
        of_kinds = [
            _modes(
                {mode: grid for (of, mode), grid in counts.items() if of == kind},
                stage,
                int((word == kind).sum()),
                chunks,
            )
            for kind in range(cost.layout.kinds.number)
        ]
        if len(of_kinds) == 1:
            rows.append(of_kinds[0])
            continue
        codes = {each: _woven(word.tolist(), each) for each in set(zip(*of_kinds, strict=True))}
        rows.append(tuple(codes[each] for each in zip(*of_kinds, strict=True)))
    return tuple(rows)


def _woven(word: Sequence[int], modes: Sequence[str]) -> str:
    """Merge the modes of each layer kind into a stage's order; layer i has the kind word[i]."""
    waiting = [iter(each) for each in modes]
    return "".join(next(waiting[kind]) for kind in word)


def _modes(
    counts: Mapping[str, np.ndarray], stage: int, layers: int, chunks: int
) -> tuple[str, ...]:
    """Return, for every chunk, the recompute modes of a stage's ``layers`` layers of one kind."""
    per_mode = [
        (mode, grid[stage].tolist()) for mode, grid in counts.items() if mode not in (KEEP, OFFLOAD)
    ]
    aside = counts[OFFLOAD][stage].tolist() if OFFLOAD in counts else [0] * chunks
    row = []
    for chunk, offloaded in enumerate(map(int, aside)):
        choice = "".join(mode * int(numbers[chunk]) for mode, numbers in per_mode)
        choice += KEEP * (layers - offloaded - len(choice))
        row.append(offload_among(choice, offloaded) if offloaded else choice)
    return tuple(row)
