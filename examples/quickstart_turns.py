#!/usr/bin/env python3
"""Training in which every batch is computed four times, by :data:`VARIANTS`.

    torchrun --nproc-per-node 2 examples/quickstart_turns.py <flags as of megatron_epp.pretrain_gpt>

In turn and in one run, so that all meet the same host: a shared one may be twice as fast a minute
later. Iteration 1 warms up; 2 to 5 are one batch, 6 to 9 the next. The batches are those of any
run. What packing to the context holds on each stage without recompute is the memory of which the
others get a share.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import in_turns  # noqa: E402

VARIANTS = tuple(
    in_turns.Variant(planner, share)
    for planner, share in (("packing", None), ("packing-best", 1.0), ("epp", 1.0), ("epp", 0.4))
)


def as_ever(_, *iteration) -> str:
    """Return the log line that any run prints."""
    from megatron_epp.control.observe import summary_line

    return summary_line(*iteration)


if __name__ == "__main__":
    in_turns.work(VARIANTS, warm_up=1, first=0, tell=as_ever)
