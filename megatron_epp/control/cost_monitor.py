"""Comparison of predicted with measured seconds, and refits of the cost model on drift.

A refit takes effect in the next iteration. It is saved next to the checkpoint, in a file named
after that iteration. A resumed run applies the refits of the earlier run at the same iterations,
and makes new refits after the last of them.
"""

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_epp.control.drift import Drift
from megatron_epp.control.files import BestEffort, write_atomically
from megatron_epp.control.report import IterationReport
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.refit import LEAST, refit
from megatron_epp.cost.fitting.residuals import Residual, residuals
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import KEEP, OF_LAYERS, OFFLOAD, Kind, Plan, Timed
from megatron_epp.runtime.consensus import broadcast_result, broadcast_text, gathered
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)

REMEMBERED = 2000  # number of this rank's latest ops that a refit uses
PAUSE = 20  # iterations between two attempts to refit
# An op's duration is informative about the device only if it exceeds the host's launch time by this
# factor. With recompute the host's launch time grows by a factor of up to 2.2.
_OF_HOST = 2.5
_FEW = "few"  # broadcast instead of a cost model: there are too few ops
_FILE = "epp-cost-model.from-{:06d}.json"
_NAMED = re.compile(r"epp-cost-model\.from-([0-9]{6,})\.json")


class CostMonitor:
    """Monitor that compares predictions with measurements and refits the cost model.

    Args:
        groups: process groups of the job.
        folders: folders in which refits are saved.
        may_refit: whether this job measured the cost model itself, and may therefore replace it.
        on_these_ranks: function that takes a cost model of the resumed run. It returns this model
            without the factors of slow ranks if this job has another number of pipeline ranks.
    """

    def __init__(
        self,
        groups: Groups,
        folders: Sequence[str],
        may_refit: bool,
        on_these_ranks: Callable[[Profile], Profile] = lambda profile: profile,
    ):
        self.groups, self.folders, self.may_refit = groups, folders, may_refit
        self.on_these_ranks = on_these_ranks
        self.drift = Drift(may_refit)
        self._try = BestEffort()
        self._samples: deque[tuple[Kind, Sample]] = deque(maxlen=REMEMBERED)
        # Refits of the resumed run that are still to come, by iteration
        self._recorded: dict[int, Profile] = {}
        self._tried = -PAUSE

    def busy(
        self, cost: Cost, plan: Plan, records: Sequence[Timed], block: Sequence[Plan] = ()
    ) -> float:
        """Return the predicted seconds of this rank's ops, and save samples for a refit.

        Samples are ops of layers that take much longer than their launch by the host.

        Args:
            cost: cost model that predicts the ops.
            plan: plan of this rank's replica.
            records: measured ops of this rank.
            block: plans of the lockstep group; () for ``plan`` alone. In lockstep, an op takes as
                long as the slowest replica's op, so the prediction and the sample are those of the
                slowest replica.
        """
        each = [
            [(one, other) for one in residuals(other, cost.table(other), records)]
            for other in (block or (plan,))
        ]
        worst = [max(same, key=lambda pair: pair[0].predicted) for same in zip(*each, strict=True)]
        # A refit has no coefficients for H and G, which are fractions of the LM head's. A chunk on
        # single ranks omits part of a layer's work, such as communication.
        self._samples.extend(
            (one.kind, self._sample(cost, other, one))
            for one, other in worst
            if one.kind in OF_LAYERS
            and not other.chunks[one.chunk].has_local
            and one.predicted >= _OF_HOST * cost.seconds.host[one.kind][one.stage]
        )
        return sum(one.predicted for one, _ in worst)

    def _sample(self, cost: Cost, plan: Plan, one: Residual) -> Sample:
        """Return op ``one`` as a sample for a refit, with its time over the rank's slowness."""
        # An offloaded layer computes as a saved one does; its copies run concurrently.
        choice = plan.recompute[one.stage][one.chunk].replace(OFFLOAD, KEEP)
        has_head = one.stage == plan.stages - 1 and not plan.vocabulary_parallel
        ends = (one.stage == 0, has_head * cost.layout.predictions)
        spans, first = plan.chunks[one.chunk].spans, sum(plan.layers[: one.stage])
        return Sample(
            choice,
            *ends,
            max(1, one.tokens),  # an empty chunk consists of one padding row
            plan.pairs(one.chunk),
            0,
            one.measured / float(cost.layout.slowness[one.stage]),
            kinds=cost.layout.layer_kinds[first : first + len(choice)],
            columns=tuple((column, column.of(spans)) for column in cost.layout.columns.extra),
        )

    def check_drift(self, predicted_seconds: float, report: IterationReport) -> list[str]:
        """Record the prediction error; return warnings, which are equal on all ranks."""
        return self.drift.see(predicted_seconds, report)

    def refit(self, iteration: int, cost: Cost) -> Profile | None:
        """Refit the cost model if predictions are wrong; return the new model, or None.

        All ranks of the job must call this method. The new cost model applies from the next
        iteration on. Rank 0 logs it and saves it in ``folders``. In a resumed run, this method
        first returns the earlier run's refits, after the same iterations as in that run.
        """
        recorded = self._recorded.pop(iteration + 1, None)
        if recorded is not None:
            if self.groups.control.rank() == 0:
                logger.warning(
                    "from iteration %d on: the refit of before the resume", iteration + 1
                )
            self.drift.forget()
            self._samples.clear()
            return recorded
        due = self.drift.alarmed and iteration - self._tried >= PAUSE
        if not (self.may_refit and due) or self._recorded:
            return None
        group = self.groups.control
        samples = list(self._samples) if self.groups.leads else []
        every = gathered(samples, group)
        text = ""
        if every is not None:
            text = self._better(iteration, cost, [row for rows in every for row in rows])
        text = broadcast_text(text, None, group)
        if text == _FEW:
            return None
        self._tried = iteration
        if not text:
            return None
        self.drift.forget()
        self._samples.clear()
        return Profile.from_json(text)

    def _keep(self, iteration: int, text: str) -> None:
        for folder in self.folders:
            path = Path(folder) / _FILE.format(iteration + 1)
            self._try(f"a refit of the cost model, {path},", partial(write_atomically, path, text))

    def _better(self, iteration: int, cost: Cost, rows: list[tuple[Kind, Sample]]) -> str:
        """Return a better cost model as JSON, "" if there is none, or ``_FEW`` for few rows."""
        if len(rows) < LEAST:
            return _FEW
        samples: dict[Kind, list[Sample]] = {}
        for kind, sample in rows:
            samples.setdefault(kind, []).append(sample)
        better = refit(cost.layout.profile, samples)
        if better is None:
            logger.info("a refit of the cost model to %d ops is no better: it stays", len(rows))
            return ""
        logger.warning(
            "from iteration %d on: the cost model refitted to %d ops; median error on held-out "
            "ops %.1f%% instead of %.1f%%; the planner process is started anew with it",
            iteration + 1, len(rows), 100 * better.after, 100 * better.before,
        )  # fmt: skip
        text = better.profile.to_json()
        self._keep(iteration, text)
        return text

    def resume(self, folder: str | None, iteration: int) -> Profile | None:
        """Load the refits of the run in ``folder``; return the one that applies at ``iteration``.

        All ranks of the job must call this method. The result is None if ``folder`` is None, no
        refit applies, or this job may not refit. :meth:`refit` returns the refits of later
        iterations when they are due. All refits are copied to this run's folders.

        Raises:
            PlanError: a refit cannot be read or parsed.
        """
        if not (folder and self.may_refit):
            return None
        text = broadcast_result(lambda: json.dumps(self._kept(folder)), self.groups.control)
        kept = json.loads(text)
        profiles = {
            int(first): self.on_these_ranks(Profile.from_json(each)) for first, each in kept.items()
        }
        self._recorded = {first: each for first, each in profiles.items() if first > iteration}
        before = [first for first in profiles if first <= iteration]
        return profiles[max(before)] if before else None

    def _kept(self, folder: str) -> dict[int, str]:
        """Copy the refits in ``folder`` to this run's folders; return them by first iteration."""
        kept = {first: _refit_text(path) for first, path in _refits(folder).items()}
        for place in self.folders:
            for first, text in kept.items():
                if not (path := Path(place) / _FILE.format(first)).exists():
                    self._try(f"an earlier refit, {path},", partial(write_atomically, path, text))
        return kept


def last_refit(folder: str) -> Path | None:
    """Return the file of the last refitted cost model in ``folder``; None without a refit."""
    refits = _refits(folder)
    return refits[max(refits)] if refits else None


def _refits(folder: str) -> dict[int, Path]:
    """Return the files of all refits in ``folder``, by the first iteration that each applies to."""
    paths = Path(folder).glob("epp-cost-model.from-*.json")
    return {int(named[1]): path for path in paths if (named := _NAMED.fullmatch(path.name))}


def _refit_text(path: Path) -> str:
    try:
        return Profile.load(str(path)).to_json()
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{error}; delete {path}: the run then goes on with the cost model of before that refit"
        ) from error
