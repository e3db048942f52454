"""The share of time that failures and saving take, against a simulated job."""

import random

import pytest

from tests.programs import ROOT, loaded

lost_work = loaded(ROOT / "scripts" / "lost_work.py")
Saving, lost_share = lost_work.Saving, lost_work.lost_share

HOUR = 3600.0


def simulated_share(between: float, restart: float, saving, useful: float) -> float:
    """Of a job that fails at random, and goes on behind its last checkpoint, until it has trained
    for ``useful`` seconds."""
    draw = random.Random(1)
    clock = trained = 0.0
    fails = draw.expovariate(1 / between)
    while trained < useful:
        end = clock + saving.interval + saving.seconds
        if end <= fails:
            clock, trained = end, trained + saving.interval
            continue
        clock = fails + restart
        fails = clock + draw.expovariate(1 / between)
    return 1 - trained / clock


@pytest.mark.parametrize("interval", [900.0, 3600.0])
def test_a_simulated_job_loses_as_much(interval: float) -> None:
    saving, between, restart = Saving(interval, 30.0), 100 * HOUR, 300.0
    told = lost_share(between, restart, saving)
    assert simulated_share(between, restart, saving, 2e4 * HOUR) == pytest.approx(told, rel=0.1)


def test_what_survives_is_trained_again_from_the_nearer_checkpoint() -> None:
    long, short = Saving(3000.0, 40.0), Saving(300.0, 3.0)
    alone = lost_share(HOUR, 0.0, long)
    lost = [lost_share(HOUR, 0.0, long, short, survive) for survive in (0.0, 0.5, 1.0)]
    assert lost[0] == pytest.approx(alone + 0.01)
    assert lost[0] - lost[2] == pytest.approx((1500 - 150) / HOUR)
    assert lost[1] == pytest.approx((lost[0] + lost[2]) / 2)
