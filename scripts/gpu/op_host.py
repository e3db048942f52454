#!/usr/bin/env python3
"""Host time of ops: constants of an op, of a layer, and of each piece of attention in a layer.

    scripts/gpu/op_host.py [--model llama3-8b] [--layers 1 2 4 8] [--rows 256] [--repeats 10]

A middle stage runs chunks of one, two and three pieces through the executor, with full and with
split backwards. The host's clock times F, B, I and W; few rows keep the device idle, so that it
blocks no host. For each kind of op, the table has the least-squares fit of

    milliseconds = op + layer x layers + piece x (pieces - 1) x layers

to the medians and to the minima of the repeats, and the largest error of the fit. Below it are the
functions in which the host spends most of its time.
"""

import cProfile
import gc
import pstats
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import shapes

STAGE, FUNCTIONS = 1, 15


def plan_of(rows: int, layers: int, split: bool) -> Any:
    """Return a plan of three stages with chunks of one, two and three pieces of attention."""
    from megatron_epp.ir import Chunk, Kind, Op, Plan, Span, check

    half, part = rows // 2, rows // 4
    chunks = (
        Chunk((Span(0, 0, rows),)),
        Chunk((Span(0, rows, rows + half), Span(1, 0, half))),
        Chunk((Span(2, 0, part), Span(0, rows + half, 2 * rows), Span(3, 0, part))),
    )
    count = range(len(chunks))
    kinds = (Kind.INPUT, Kind.WEIGHT) if split else (Kind.BACKWARD,)
    order = tuple(Op(Kind.FORWARD, chunk) for chunk in count)
    order += tuple(Op(kind, chunk) for chunk in reversed(count) for kind in kinds)
    of_stages = (1, layers, 1)
    plan = Plan(
        documents=(2 * rows, half, part, part),
        layers=of_stages,
        chunks=chunks,
        recompute=tuple(("k" * stage,) * len(chunks) for stage in of_stages),
        orders=(order,) * len(of_stages),
    )
    check(plan)
    return plan


def issue(alone: Any, layers: int, rows: int, repeats: int) -> dict[tuple[str, int], list[float]]:
    """Return the host's milliseconds of every op of a stage, by (kind, pieces); all repeats."""
    from single_stage import build_stage, run_stage

    from megatron_epp.ir import Op
    from megatron_epp.runtime.clock import HostClock

    model = build_stage(alone, layers, False, False)
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for split in (False, True):
        plan = plan_of(rows, layers, split)
        for repeat in range(repeats + 2):  # the first two record calls and allocate
            records = run_stage(alone, model, plan, STAGE, HostClock()).records
            for record in records if repeat > 1 else ():
                if isinstance(record.op, Op):
                    kind = record.op.kind.value
                    found[kind, record.op.chunk + 1].append(1e3 * record.seconds)
    return found


def fit(points: dict[tuple[int, int], float]) -> tuple[list[float], float]:
    """Return [op, layer, piece] of times by (layers, pieces), and the largest relative error."""
    import numpy

    rows = numpy.array([[1, layers, (pieces - 1) * layers] for layers, pieces in points])
    times = numpy.array(list(points.values()))
    weights = 1 / times  # relative errors count
    found, *_ = numpy.linalg.lstsq(rows * weights[:, None], times * weights, rcond=None)
    return found.tolist(), float(abs(rows @ found / times - 1).max())


def show_functions(alone: Any, layers: int, rows: int) -> None:
    """Print the functions in which a stage's host spends most of its time."""
    from single_stage import build_stage, run_stage

    model, plan = build_stage(alone, layers, False, False), plan_of(rows, layers, True)
    for _ in range(2):
        run_stage(alone, model, plan, STAGE)
    profiler = cProfile.Profile()
    profiler.runcall(run_stage, alone, model, plan, STAGE)
    stats: Any = pstats.Stats(profiler)
    rows_of = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:FUNCTIONS]
    print(f"\n{stats.total_calls} calls; most of the time is in\nms      calls   function")
    for (file, line, name), (_, calls, seconds, *_) in rows_of:
        print(f"{1e3 * seconds:7.2f} {calls:6}   {name} ({Path(file).name}:{line})")


def main() -> None:
    parser = shapes.parser(__doc__)
    parser.set_defaults(model="llama3-8b")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4, 8], help="of stages")
    parser.add_argument("--rows", type=int, default=256, help="of a chunk (default: 256)")
    parser.add_argument("--repeats", type=int, default=10)
    arguments, others = parser.parse_known_args()
    alone = shapes.begin(arguments, max(arguments.layers), 65536, others)
    print(shapes.hardware())
    found: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(dict)
    for layers in arguments.layers:
        for (kind, pieces), times in issue(
            alone, layers, arguments.rows, arguments.repeats
        ).items():
            found[kind][layers, pieces] = times
            shown = f"median {median(times):.3f}, least {min(times):.3f} ms"
            print(f"{layers} layers, {pieces} pieces: {kind} {shown}", flush=True)
        gc.collect()
    print("\nop  of          op ms   layer ms   piece ms   error")
    for kind, points in found.items():
        for name, chosen in (("medians", median), ("minima", min)):
            of_op, error = fit({where: chosen(times) for where, times in points.items()})
            cells = "  ".join(f"{value:9.3f}" for value in of_op)
            print(f"{kind:2}  {name:7}  {cells}  {error:6.1%}", flush=True)
    show_functions(alone, min(4, max(arguments.layers)), arguments.rows)


if __name__ == "__main__":
    main()
