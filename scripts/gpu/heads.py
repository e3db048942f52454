#!/usr/bin/env python3
"""Time of the LM head in blocks, and of linear layers with fused accumulation of weight gradients.

scripts/gpu/heads.py [--model llama-7b] [--tokens 8192]
"""

import copy
import dataclasses
import sys
from pathlib import Path
from statistics import median
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "bench")]

import shapes  # noqa: E402

BLOCKS = (512, 1024, 2048, 4096, 8192)
REPEATS = 5


def main() -> None:
    parser = shapes.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments, others = parser.parse_known_args()
    alone = shapes.begin(arguments, 2, 16384, others)
    from single_stage import build_stage, probe_alone

    from megatron_epp.mcore.calibrate.probe import Shape, undisturbed
    from megatron_epp.mcore.flags.config import FUSED_LINEARS
    from megatron_epp.mcore.lm_head import fused_head

    shape = Shape(arguments.tokens)

    def told(run) -> str:
        timed = [run(False) for _ in range(REPEATS + 1)][1:]
        weighed = run(True)
        forward, backward = (
            median(getattr(one, name) for one in timed) * 1e3
            for name in ("forward_seconds", "backward_seconds")
        )
        return (
            f"F {forward:.3f} ms {weighed.forward_bytes / 2**20:.1f} MiB, "
            f"B {backward:.3f} ms {weighed.backward_bytes / 2**20:.1f} MiB, "
            f"held {weighed.held_bytes / 2**20:.1f} MiB"
        )

    for fused in (False, True):
        args = copy.copy(alone.args)
        setattr(args, FUSED_LINEARS, fused)
        model = build_stage(dataclasses.replace(alone, args=args), 2, False, False)
        with undisturbed(model):
            probe = probe_alone(alone, model)
            for tokens in (arguments.tokens // 8, arguments.tokens // 4, arguments.tokens):
                row = told(lambda weigh: probe.layers(Shape(tokens), "kk", weigh))  # noqa: B023
                print(f"linears fused {fused}, 2 layers, {tokens} tokens: {row}", flush=True)
        del model, probe
    model = build_stage(alone, 1, False, True)
    with undisturbed(model):
        probe = probe_alone(alone, model)
        for block in BLOCKS:
            # The constants that this probe is there to choose: no setting of a training.
            with mock.patch.object(fused_head, "rows_at_once", return_value=block):
                row = told(lambda weigh: probe.ends(shape, weigh))
            print(f"head in blocks of {block}, {arguments.tokens} tokens: {row}", flush=True)


if __name__ == "__main__":
    main()
