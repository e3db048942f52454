"""Detection of iterations whose time differs from the prediction, and of slow ranks."""

import statistics
from collections import deque
from dataclasses import dataclass, field

from megatron_epp.control.report import IterationReport

BAND = 0.15  # relative error of predicted seconds beyond which the cost model counts as wrong
RECENT = 8  # number of iterations whose median error counts
SLOW = 1.1  # a rank's measured/predicted ratio over the other ranks' median
PATIENCE = 5  # consecutive iterations before a slow rank is reported


@dataclass
class Drift:
    """Detector of prediction errors and slow ranks; it reports each occurrence once.

    Attributes:
        may_refit: whether the job measured its cost model itself, and refits it if predictions are
            wrong.
        alarmed: whether the median relative error of the last ``RECENT`` predictions exceeds
            ``BAND`` in absolute value.
    """

    may_refit: bool = False
    alarmed: bool = False
    _errors: deque = field(default_factory=lambda: deque(maxlen=RECENT))
    _slow: dict[tuple[int, int], int] = field(default_factory=dict)

    def see(self, predicted_seconds: float, report: IterationReport) -> list[str]:
        """Record an iteration's times; return warnings about prediction errors and slow ranks."""
        return [*self._drifts(predicted_seconds, report), *self._lags(report)]

    def forget(self) -> None:
        """Discard all recorded errors and alarms, because the cost model has changed."""
        self._errors.clear()
        self.alarmed = False
        self._slow = {}

    def _drifts(self, predicted_seconds: float, report: IterationReport) -> list[str]:
        if predicted_seconds <= 0:
            return []
        self._errors.append(report.seconds / predicted_seconds - 1)
        if len(self._errors) < RECENT:
            return []
        error = statistics.median(self._errors)
        before, self.alarmed = self.alarmed, abs(error) > BAND
        if self.alarmed and not before:
            return [
                f"drift: the last {RECENT} iterations took {error:+.0%} against what was predicted "
                f"(median; the band is {BAND:.0%}): {self._cure}"
            ]
        if before and not self.alarmed:
            return [f"drift: back in the band of {BAND:.0%} ({error:+.0%})"]
        return []

    @property
    def _cure(self) -> str:
        if self.may_refit:
            return "nothing to do, the cost model is refitted if that predicts better"
        return (
            "plans are made for another speed; measure this device with `python -m megatron_epp "
            "profile`, or leave --epp-cost-model out"
        )

    def _lags(self, report: IterationReport) -> list[str]:
        """Compare each rank's measured/predicted ratio with the median of the other ranks."""
        ratios = {
            (each.replica, each.rank): each.busy / each.predicted_busy
            for each in report.ranks
            if each.predicted_busy > 0
        }
        warnings = []
        for place, ratio in ratios.items():
            others = [r for other, r in ratios.items() if other != place]
            slower = ratio / statistics.median(others) if others else 1.0
            self._slow[place] = self._slow.get(place, 0) + 1 if slower > SLOW else 0
            if self._slow[place] == PATIENCE:
                replica, rank = place
                warnings.append(
                    f"slow rank: pipeline rank {rank} of replica {replica} takes {slower:.2f} "
                    f"times what the others take for the same work, for {PATIENCE} iterations now: "
                    "look for other programs, heat or a throttled clock on its host, or start "
                    "without it"
                )
        return warnings
