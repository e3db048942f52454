#!/usr/bin/env python3
"""Host time of a layer: time for issuing forward and backward, and for running them on the GPU.

    scripts/gpu/host_cost.py [--model llama3-8b] [--layers 4] [--tokens 256 512 1024 2048 4096 8192]

If issuing takes as long as running, the host is the bottleneck, and smaller chunks are not faster.
The table has milliseconds per layer, the minimum of several runs. *issue* ends when the host's call
returns, *total* when the GPU is idle again. The last line fits max(issue, tokens x time per token)
to the time of a layer, and gives the number of tokens above which the GPU is the bottleneck.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import shapes

REPEATS = 10


def milliseconds(probe: Any, shape: Any, modes: str) -> list[float]:
    """Return milliseconds per layer: [F issue, F total, B issue, B total]."""
    from megatron_epp.mcore.calibrate.clocks import IssueClock, WallClock

    best = [float("inf")] * 4
    clocks = (IssueClock(probe.now), WallClock(probe.now))
    for _ in range(REPEATS):
        for at, clock in enumerate(clocks):
            measured = probe.timed_by(clock).layers(shape, modes)
            for part, seconds in enumerate((measured.forward_seconds, measured.backward_seconds)):
                place = 2 * part + at
                best[place] = min(best[place], 1e3 * seconds / len(modes))
    return best


def main() -> None:
    parser = shapes.parser(__doc__)
    parser.set_defaults(model="llama3-8b")
    parser.add_argument("--layers", type=int, default=4, help="of a stage (default: 4)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192],
        help="of a chunk, a row of the table each",
    )  # fmt: skip
    arguments, others = parser.parse_known_args()
    alone = shapes.begin(arguments, arguments.layers, 65536, others)
    from single_stage import build_stage, probe_alone

    from megatron_epp.ir import FULL, KEEP
    from megatron_epp.mcore.calibrate.probe import Shape, undisturbed

    model = build_stage(alone, arguments.layers, False, False)
    print(shapes.hardware())
    print("recompute  tokens  F issue  F total  B issue  B total")
    with undisturbed(model):
        probe = probe_alone(alone, model)
        for mode in (KEEP, FULL):
            rows = []
            for tokens in arguments.tokens:
                row = milliseconds(probe, Shape(tokens), mode * arguments.layers)
                rows.append(row)
                cells = "  ".join(f"{value:7.3f}" for value in row)
                print(f"{'none' if mode == KEEP else 'full':9}  {tokens:6}  {cells}", flush=True)
            for name, at in (("F", 0), ("B", 2)):
                issue = min(row[at] for row in rows)
                per_token = rows[-1][at + 1] / arguments.tokens[-1]
                print(
                    f"{name}, recompute {'none' if mode == KEEP else 'full'}: host {issue:.3f} ms "
                    f"a layer, GPU {1e3 * per_token:.3f} us a token: host-bound below "
                    f"{issue / per_token:.0f} tokens",
                    flush=True,
                )


if __name__ == "__main__":
    main()
