#!/usr/bin/env python3
"""Fraction of a job's time lost to failures and checkpoints, and the best checkpoint interval.

    scripts/lost_work.py --nodes 64 --iteration-seconds 6 --save-interval 500 --save-seconds 40
                         [--node-mtbf-hours 6000] [--restart-seconds 300]
                         [--non-persistent-save-interval 50 --non-persistent-save-seconds 3]
                         [--survive 1.0]

A failure of any node ends the job; the mean time between failures is node-mtbf-hours / nodes (6,000
h is that of Llama 3: 419 failures of 2,048 nodes in 54 days, arXiv 2407.21783, section 3.3). A
failure costs the restart and, on average, half of the training between two checkpoints. Saving
costs its seconds once per interval (with --async-save, only the seconds for which training waits).
The fractions are of first order, for rare failures: seconds of saving / interval + (restart + half
the interval) / time between failures. Their sum is least for interval = sqrt(2 x seconds of saving
x time between failures) (Young, 1974; Daly, 2006).

--survive is the fraction of failures after which the non-persistent checkpoint can be read. It is 1
for --non-persistent-ckpt-type global in a folder that all nodes share, and for local with
--replication. For local alone, it is the fraction of failures that end processes but leave disks
intact.
"""

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Saving:
    """Checkpoints of one kind: one every ``interval`` seconds, which takes ``seconds``."""

    interval: float
    seconds: float

    @property
    def share(self) -> float:
        return self.seconds / self.interval

    def best_interval(self, between_failures: float) -> float:
        return math.sqrt(2 * self.seconds * between_failures)


def lost_share(
    between_failures: float,
    restart: float,
    persistent: Saving,
    other: Saving | None = None,
    survive: float = 1.0,
) -> float:
    """Return the lost fraction of time: saving, restarts, and training that is repeated.

    All times are in seconds. ``other`` are non-persistent checkpoints.
    """
    again = persistent.interval / 2
    if other is not None:
        again = survive * min(other.interval, persistent.interval) / 2 + (1 - survive) * again
    saving = persistent.share + (0.0 if other is None else other.share)
    return saving + (restart + again) / between_failures


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


def share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a share from 0 to 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=positive, required=True)
    parser.add_argument("--iteration-seconds", type=positive, required=True)
    parser.add_argument("--save-interval", type=positive, required=True, help="iterations")
    parser.add_argument("--save-seconds", type=positive, required=True)
    parser.add_argument("--node-mtbf-hours", type=positive, default=6_000.0)
    parser.add_argument("--restart-seconds", type=positive, default=300.0)
    parser.add_argument("--non-persistent-save-interval", type=positive, help="iterations")
    parser.add_argument("--non-persistent-save-seconds", type=positive)
    parser.add_argument("--survive", type=share, default=1.0)
    args = parser.parse_args()
    short = args.non_persistent_save_interval, args.non_persistent_save_seconds
    if (short[0] is None) != (short[1] is None):
        parser.error("--non-persistent-save-interval and -seconds: expected both or none of them")
    between = args.node_mtbf_hours * 3600 / args.nodes
    step = args.iteration_seconds
    persistent = Saving(args.save_interval * step, args.save_seconds)
    ways = {"these flags": (persistent, None)}
    best = Saving(persistent.best_interval(between), args.save_seconds)
    ways[f"--save-interval {best.interval / step:.0f}"] = (best, None)
    if short[0] is not None:
        other = Saving(short[0] * step, short[1])
        ways[f"these, --non-persistent-save-interval {short[0]:g}"] = (persistent, other)
    print(f"a failure every {between / 3600:.1f} h\n")
    print("| saving | time lost | of it saving | restarts | trained again |\n|---|---|---|---|---|")
    for name, (long, quick) in ways.items():
        lost = lost_share(between, args.restart_seconds, long, quick, args.survive)
        saving = long.share + (0.0 if quick is None else quick.share)
        restarts = args.restart_seconds / between
        shares = (lost, saving, restarts, lost - saving - restarts)
        print(f"| {name} | {' | '.join(f'{each:.2%}' for each in shares)} |")


if __name__ == "__main__":
    main()
