"""What ops of a stage take: guessed from the model's shape, then measured as the loop runs.

    seconds of an op = token x tokens + pair x query-key pairs + op

No model is built and no time is spent to measure: the ops of the calls themselves are the
measurements, but for those of the first call, in which much is done for the first time. What is
guessed is right up to a factor that is the same for all micro-batches, and an order depends on no
such factor. What the last calls did not run (whole backwards, where all are split) takes what it
took when it was last run, as many times longer or shorter as forwards have become since.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron_epp.cost.regression import fit
from megatron_epp.ir import KIND_CODE, OF_LAYERS, Kind, Timed

COLD = 1  # first calls that do not count
CALLS = 4  # the latest, whose ops count
EAGER = 3  # as many first ones are each fitted at once, then every
SELDOM = 8
SPLIT_PRICE = 1.04  # I and W together over B, where they have not been measured
_FLOPS_PER_SECOND = 1e12  # of nothing in particular
_OP_TOKENS = 32  # an op costs as much as so many tokens besides, until it is measured
FEATURES = 3  # tokens, pairs, 1

F, B, I, W = (KIND_CODE[Kind(letter)] for letter in "FBIW")  # noqa: E741


def features(tokens: Sequence[float], pairs: Sequence[float]) -> np.ndarray:
    """[3, chunks]."""
    return np.stack([np.asarray(tokens, float), np.asarray(pairs, float), np.ones(len(tokens))])


def guessed_rates(config: Any, layers: int, vocabulary: int) -> np.ndarray:
    """[kinds, 3] of a stage of ``layers`` layers, with an output layer of ``vocabulary`` words
    (0: none), by the multiplications in them."""
    hidden = getattr(config, "hidden_size", 0) or 0
    heads = getattr(config, "num_attention_heads", 0) or 0
    size = getattr(config, "kv_channels", 0) or (hidden // heads if heads else 0)
    groups = getattr(config, "num_query_groups", 0) or heads
    ffn = getattr(config, "ffn_hidden_size", 0) or 4 * hidden
    matrices = 3 if getattr(config, "gated_linear_unit", False) else 2
    experts = getattr(config, "moe_router_topk", 1) if getattr(config, "num_moe_experts", 0) else 1
    attention = hidden * size * (2 * heads + 2 * groups)
    token = 2 * layers * (attention + experts * matrices * hidden * ffn) + 2 * hidden * vocabulary
    forward = np.array([token, 4 * layers * heads * size, 0.0]) / _FLOPS_PER_SECOND
    if not forward.any():
        forward = np.array([1.0, 0.0, 0.0]) / _FLOPS_PER_SECOND
    forward[2] = _OP_TOKENS * forward[0]
    rates = np.zeros((len(OF_LAYERS), FEATURES))
    rates[F], rates[B] = forward, 2 * forward
    rates[I] = rates[W] = SPLIT_PRICE / 2 * rates[B]
    return rates


class StageSeconds:
    """This rank's stage. ``rates`` [kinds, 3] are the latest, ``measured`` or guessed."""

    def __init__(self, guess: np.ndarray):
        self.guess = guess
        self.rates = guess
        self.measured = False
        self._calls = -COLD
        self._seen: deque[tuple[np.ndarray, tuple[Timed, ...]]] = deque(maxlen=CALLS)
        # By kind: its coefficients when it was last run, and how slow forwards were at that time.
        self._known: dict[int, tuple[np.ndarray, float]] = {}

    def saw(self, chunks_3C: np.ndarray, records: tuple[Timed, ...]) -> None:
        """A call of training is over; its ops' records, and the features of its chunks."""
        self._calls += 1
        if self._calls < 1:
            return
        ops = tuple(record for record in records if record.op.kind in OF_LAYERS)
        self._seen.append((chunks_3C, ops))
        if self._calls <= EAGER or self._calls % SELDOM == 0:
            self.rates = self._fitted()

    def _fitted(self) -> np.ndarray:
        known = dict(self._known)
        for kind in OF_LAYERS:
            of = [call for call in self._seen if any(r.op.kind is kind for r in call[1])]
            rows, seconds = _measurements(of, kind)
            if len(rows):
                found = fit(rows.tolist(), seconds.tolist(), self.guess[KIND_CODE[kind]].tolist())
                slow = self._slowness(of)
                known[KIND_CODE[kind]] = np.asarray(found.coefficients, dtype=float), slow
        if F not in known or not (B in known or I in known):
            return self.rates  # of one kind alone the two could not be compared
        self._known, self.measured = known, True
        rates, now = self.guess.copy(), self._slowness(self._seen)
        for code, (coefficients, then) in known.items():
            rates[code] = coefficients * now / then
        if I not in known:
            rates[I] = rates[W] = SPLIT_PRICE / 2 * rates[B]
        elif B not in known:
            rates[B] = rates[I] + rates[W]
        return rates

    def _slowness(self, calls: Iterable[tuple[np.ndarray, tuple[Timed, ...]]]) -> float:
        """Of forwards, against the guess."""
        rows, seconds = _measurements(calls, Kind.FORWARD)
        return float(seconds.sum() / (rows @ self.guess[F]).sum()) if len(rows) else 1.0


def _measurements(
    calls: Iterable[tuple[np.ndarray, tuple[Timed, ...]]], kind: Kind
) -> tuple[np.ndarray, np.ndarray]:
    """Features [ops, 3] and seconds [ops] of the ops of a kind."""
    found = [
        (chunks_3C[:, record.op.chunk], record.seconds)
        for chunks_3C, ops in calls
        for record in ops
        if record.op.kind is kind and record.seconds > 0
    ]
    rows = np.array([row for row, _ in found]).reshape(-1, FEATURES)
    return rows, np.array([seconds for _, seconds in found])
