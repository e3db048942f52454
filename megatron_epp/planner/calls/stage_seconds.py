"""Seconds of a stage's ops: guessed from the model's shape, then measured as the loop runs.

    seconds of an op = token x tokens + pair x query-key pairs + op

No model is built and no time is spent to measure: the ops of the calls themselves are the
measurements, but for those of the first call, in which much is done for the first time. What is
guessed is right up to a factor that is the same for all micro-batches, and an order depends on no
such factor. What the last calls did not run (whole backwards, where all are split) takes what it
took when it was last run, as many times longer or shorter as forwards have become since.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

from megatron_epp.cost.fitting.regression import fit
from megatron_epp.ir import KIND_CODE, OF_LAYERS, Kind, Timed
from megatron_epp.planner.calls.call_cost import SPLIT_COST

COLD = 1  # first calls that do not count
CALLS = 4  # the latest, whose ops count
EAGER = 3  # as many first ones are each fitted at once, then every
SELDOM = 8
FEATURES = 3  # tokens, pairs, 1 (call_cost.features)
_F, _B, _I, _W = (KIND_CODE[kind] for kind in OF_LAYERS)


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
                fitted = fit(rows.tolist(), seconds.tolist(), self.guess[KIND_CODE[kind]].tolist())
                slow = self._slowness(of)
                known[KIND_CODE[kind]] = np.asarray(fitted.coefficients, dtype=float), slow
        if _F not in known or not (_B in known or _I in known):
            return self.rates  # of one kind alone the two could not be compared
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
        """Measured over guessed seconds of forwards."""
        rows, seconds = _measurements(calls, Kind.FORWARD)
        return float(seconds.sum() / (rows @ self.guess[_F]).sum()) if len(rows) else 1.0


def _measurements(
    calls: Iterable[tuple[np.ndarray, tuple[Timed, ...]]], kind: Kind
) -> tuple[np.ndarray, np.ndarray]:
    """Features [ops, 3] and seconds [ops] of the ops of a kind."""
    samples = [
        (chunks_3C[:, record.op.chunk], record.seconds)
        for chunks_3C, ops in calls
        for record in ops
        if record.op.kind is kind and record.seconds > 0
    ]
    rows = np.array([row for row, _ in samples]).reshape(-1, FEATURES)
    return rows, np.array([seconds for _, seconds in samples])
