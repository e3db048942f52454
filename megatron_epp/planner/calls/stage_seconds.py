"""Seconds of a stage's ops: estimated from the model's shape, then measured as the loop runs.

    seconds of an op = token x tokens + pair x query-key pairs + op

This module fits the coefficients ``token``, ``pair`` and ``op`` to the times of training calls, so
measurements take no extra time. The first call is ignored, because it includes one-time work. The
choice of an order is right even if all estimates are wrong by the same factor. If recent calls did
not run an op kind (such as B, if all backwards are split), its last measured coefficients are used.
They are scaled by the slowdown of the forwards since that measurement.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_epp.cost.fitting.regression import fit
from megatron_epp.ir import KIND_CODE, OF_LAYERS, Kind, Timed
from megatron_epp.planner.calls.call_cost import SPLIT_COST

COLD = 1  # number of first calls that are ignored
CALLS = 4  # number of latest calls whose ops count
EAGER = 3  # Each of the first calls is followed by a fit; later, every SELDOM-th call.
SELDOM = 8
# A call whose ops took this fraction more or less than predicted is followed by a fit, too: its
# micro-batches differ from the earlier ones, whose tokens and pairs may not tell the costs apart.
OFF = 0.04
FEATURES = 3  # tokens, pairs, 1 (call_cost.features)
_F, _B, _I, _W = (KIND_CODE[kind] for kind in OF_LAYERS)


class StageSeconds:
    """Seconds per token, query-key pair and op ("rates") of this rank's stage.

    Attributes:
        guess: [op kinds, 3] estimated rates.
        rates: [op kinds, 3] latest rates.
        measured: whether ``rates`` are measured.
    """

    def __init__(self, guess: np.ndarray):
        self.guess = guess
        self.rates = guess
        self.measured = False
        self._calls = -COLD
        self._seen: deque[tuple[np.ndarray, tuple[Timed, ...]]] = deque(maxlen=CALLS)
        # By kind: the last fitted coefficients, and the slowness of forwards at that time.
        self._known: dict[int, tuple[np.ndarray, float]] = {}

    def saw(self, chunks_3C: np.ndarray, records: tuple[Timed, ...]) -> None:
        """Add the records of a training call.

        The rates are fitted again after each of the first calls, and after every SELDOM-th call.
        They are also fitted again after a call whose time differs from its prediction by more than
        the fraction OFF.

        Args:
            chunks_3C: [3, chunks] tokens, query-key pairs and 1.
            records: measured times of the call's ops.
        """
        self._calls += 1
        if self._calls < 1:
            return
        ops = tuple(record for record in records if record.op.kind in OF_LAYERS)
        self._seen.append((chunks_3C, ops))
        if self._calls <= EAGER or self._calls % SELDOM == 0 or self._is_off(chunks_3C, ops):
            self.rates = self._fitted()

    def _is_off(self, chunks_3C: np.ndarray, ops: Sequence[Timed]) -> bool:
        predicted = sum(self.rates[KIND_CODE[r.op.kind]] @ chunks_3C[:, r.op.chunk] for r in ops)
        return abs(sum(record.seconds for record in ops) - predicted) > OFF * predicted

    def _fitted(self) -> np.ndarray:
        known = dict(self._known)
        for kind in OF_LAYERS:
            of = [call for call in self._seen if any(r.op.kind is kind for r in call[1])]
            rows, seconds = _measurements(of, kind)
            if len(rows):
                fitted = fit(rows.tolist(), seconds.tolist(), self.guess[KIND_CODE[kind]].tolist())
                slow = self._slowness(of)
                known[KIND_CODE[kind]] = np.asarray(fitted.coefficients, dtype=float), slow
        if _F not in known or not (_B in known or _I in known):
            return self.rates  # comparing F with B or I requires both
        self._known, self.measured = known, True
        rates, now = self.guess.copy(), self._slowness(self._seen)
        for code, (coefficients, then) in known.items():
            rates[code] = coefficients * now / then
        if _I not in known:
            rates[_I] = rates[_W] = SPLIT_COST / 2 * rates[_B]
        elif _B not in known:
            rates[_B] = rates[_I] + rates[_W]
        return rates

    def _slowness(self, calls: Iterable[tuple[np.ndarray, tuple[Timed, ...]]]) -> float:
        """Return the ratio of measured to estimated seconds of the forwards."""
        rows, seconds = _measurements(calls, Kind.FORWARD)
        return float(seconds.sum() / (rows @ self.guess[_F]).sum()) if len(rows) else 1.0


def _measurements(
    calls: Iterable[tuple[np.ndarray, tuple[Timed, ...]]], kind: Kind
) -> tuple[np.ndarray, np.ndarray]:
    """Return features [ops, 3] and seconds [ops] of the ops of a kind."""
    samples = [
        (chunks_3C[:, record.op.chunk], record.seconds)
        for chunks_3C, ops in calls
        for record in ops
        if record.op.kind is kind and record.seconds > 0
    ]
    rows = np.array([row for row, _ in samples]).reshape(-1, FEATURES)
    return rows, np.array([seconds for _, seconds in samples])
