#!/usr/bin/env python3
"""Training in which every batch is computed twice: by a plan of `epp` and by one of `packing`.

    torchrun --nproc-per-node 2 examples/quickstart_turns.py <flags as of megatron_epp.pretrain_gpt>

In turn and in one run, so that both meet the same host: a shared one may be twice as fast a minute
later. Iteration 1 warms up; 2 and 3, 4 and 5, ... are pairs. The batches are those of any run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import cpu_pipeline  # noqa: E402

PLANNERS = ("epp", "packing")


class Turns(cpu_pipeline.VariantSteps):
    def _plan(self, iteration: int, lengths: Sequence[int]):
        from megatron_epp.planner import plan_step

        return plan_step(lengths, self.cost, self.options, self.variant_at(iteration)).step


def main() -> None:
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.control.observe import summary

    cpu_pipeline.take_turns(
        PLANNERS, Turns, lambda variant_of, *rest: summary(*rest), warm_up=1, first=0
    )


if __name__ == "__main__":
    main()
