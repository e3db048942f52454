"""Which layers of which chunk each stage recomputes, so that an order fits into a budget of bytes.

Where an order does not fit, as many layers of every chunk are recomputed as it takes, alike on all
stages; then each stage gives back, chunk by chunk, what it has room for: those first whose forward
takes longest.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.ir import FULL, KEEP, Kind, Op
from megatron_epp.planner.calls import ordering
from megatron_epp.planner.calls.memory import Memory

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a stage's layers that are recomputed to begin with


@dataclass(frozen=True, slots=True)
class Held:
    """What the chunks of a call hold.

    tokens, cut, loss   [chunks] of each; whether it is a slice; whether a loss follows its forward
    layers              [stages]
    """

    memory: Memory
    tokens: np.ndarray
    cut: np.ndarray
    loss: np.ndarray
    layers: np.ndarray

    def bytes(self, again: np.ndarray) -> np.ndarray:
        """[stages, chunks] where ``again`` [stages, chunks] layers are recomputed."""
        one = self.memory
        kept = np.where(self.cut, one.kept_of_cut, one.kept)
        recomputed = np.where(self.cut, one.recomputed_of_cut, one.recomputed)
        held = (self.layers[:, None] - again) * kept + again * recomputed
        held[-1] += np.where(self.loss, one.logits, 0.0)
        return held * self.tokens

    def layer_bytes(self, recomputing: bool) -> float:
        """Of the layer of the largest chunk that lives again while its backward runs."""
        return float(self.memory.kept * self.tokens.max()) if recomputing else 0.0


def fitted(
    work: ordering.Work, held: Held, split: bool, reorder: bool, ops: int
) -> ordering.Ordered | None:
    """The fastest order found within the budget, with what it recomputes; None where none fits."""
    best: ordering.Ordered | None = None
    for share in SHARES:
        layers = np.ceil(share * held.layers).astype(int)
        again = np.tile(layers[:, None], (1, len(held.tokens)))
        room = np.full(work.stages, held.memory.budget_bytes - held.layer_bytes(share > 0))
        tried = ordering.best_order(
            _with(work, held, again), room, split and not share, reorder, ops // len(SHARES)
        )
        if tried is None:
            continue
        if again.any():
            tried = _given_back(work, held, tried, again, room)
        if best is None or tried.seconds < best.seconds:
            best = tried
    return best


def _with(work: ordering.Work, held: Held, again: np.ndarray) -> ordering.Work:
    """``work`` whose backwards begin with ``again`` layers' forwards."""
    seconds = work.seconds.copy()
    more = seconds[ordering.F] * again / np.maximum(held.layers, 1)[:, None]
    seconds[ordering.B] += more
    seconds[ordering.I] += more
    return replace(work, seconds=seconds, rows=held.bytes(again))


def _given_back(
    work: ordering.Work, held: Held, found: ordering.Ordered, again: np.ndarray, room: np.ndarray
) -> ordering.Ordered:
    """The same order, with layers kept where there is room."""
    again = again.copy()
    per_layer = held.bytes(np.zeros_like(again)) - held.bytes(np.ones_like(again))
    for stage, order in enumerate(found.orders):
        bytes_C = held.bytes(again)[stage]
        at = {op: number for number, op in enumerate(order)}
        alive = {
            op.chunk: slice(at[Op(Kind.FORWARD, op.chunk)], number + 1)
            for op, number in at.items()
            if op.kind is Kind.BACKWARD
        }
        now = np.zeros(len(order))
        for chunk, while_held in alive.items():
            now[while_held] += bytes_C[chunk]
        for chunk in np.argsort(-work.seconds[ordering.F, stage], kind="stable").tolist():
            left = room[stage] - now[alive[chunk]].max()
            kept = int(min(again[stage, chunk], left // per_layer[stage, chunk]))
            again[stage, chunk] -= kept
            now[alive[chunk]] += kept * per_layer[stage, chunk]
    letters = tuple(
        tuple(FULL * int(n) + KEEP * int(layers - n) for n in row)
        for layers, row in zip(held.layers, again, strict=True)
    )
    return replace(ordering.retimed(_with(work, held, again), found), recompute=letters)
