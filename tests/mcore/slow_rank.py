"""``double_losses`` whose reports say that devices 1 and 2 take 1.5 times as long as they should.

All others take what is predicted by the cost model that the run began with, and the cost model of
layers is never refitted: whatever this machine does meanwhile, the reports are the same.
"""

import dataclasses
import os
import runpy
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron_epp.control import cost_monitor, observe
from megatron_epp.control.report import RankReport

FACTOR = 1.5 if os.environ["LOCAL_RANK"] in "12" else 1.0


class Reported(RankReport):
    """A report of seconds that were predicted, in the place of measured ones."""

    @classmethod
    def of(cls, replica: int, rank: int, records: Any, predicted: float = 0.0, *rest: Any):
        report = RankReport.of(replica, rank, records, predicted, *rest)
        counted = SLOWNESS[0].get((replica, rank), 1.0)
        return dataclasses.replace(report, busy=predicted * FACTOR / counted)


SLOWNESS: list[dict[tuple[int, int], float]] = [{}]  # that the cost model counts with


def note(observer: Any) -> None:
    layout, groups = observer.steps.cost.layout, observer.groups
    slowness = layout.profile.replica_slowness or layout.slowness * groups.replicas
    ranks = groups.pipeline_size
    SLOWNESS[0] = {(at // ranks, at % ranks): factor for at, factor in enumerate(slowness)}


def gather(observer: Any, *args: Any) -> Any:
    note(observer)
    return original(observer, *args)


original = observe.Observer.gather

if __name__ == "__main__":
    with (
        patch.object(observe, "RankReport", Reported),
        patch.object(observe.Observer, "gather", gather),
        patch.object(cost_monitor, "LEAST", 10**9),
    ):
        runpy.run_path(str(Path(__file__).with_name("double_losses.py")), run_name="__main__")
