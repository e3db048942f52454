#!/usr/bin/env python3
"""One stage of a model on one GPU: many chunk sizes, sliced attention, errors of the cost model.

    scripts/bench/gpu_stage.py [--model llama-7b] [--layers 2] [-o RESULT.md]
    scripts/bench/gpu_stage.py --device cpu --model tiny --slices 64 --contexts 0 128 --lengths 256

The script prints three tables. *Chunks*: slices with context, through the stage's layers. It has
the seconds of F, of B, and of a B that recomputes everything; the allocator's bytes that one layer
saves from F to B, and that all layers need at the peak, both without cached K and V; and the errors
of the cost model. Training measures this cost model at its start, on other chunks. *Attention*:
attention of a document in slices, compared with the unsliced document; both compute the same
query-key pairs, so the ratio of seconds is that of the time per FLOP. *Stage*: the same comparison
for F and B of all layers, in the executor.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import shapes
from headline import heading, markdown, write

CHUNKS = (
    *("tokens", "context", "F ms", "B ms", "B full ms", "held MiB", "peak MiB"),
    *("F off", "B off", "held off", "peak off"),
)
SLICED = ("document", "slices of", "whole ms", "in slices ms", "ratio")


# ------------------------------------------------------------------ chunks


def chunk_rows(alone: Any, model: Any, arguments: argparse.Namespace) -> tuple[list, list[str]]:
    """Return the rows of table *Chunks*, and lines on the errors of the cost model."""
    from single_stage import probe_alone, profile_of

    from megatron_epp.ir import FULL, KEEP, Kind
    from megatron_epp.mcore.calibrate.probe import Shape, undisturbed

    layers = arguments.layers
    made: list[list[str]] = []
    off: dict[str, list[float]] = {"F": [], "B": [], "held": [], "peak": []}
    with undisturbed(model):
        profile = profile_of(alone, model)
        print(profile.provenance.source, flush=True)
        probe = probe_alone(alone, model)
        for tokens in arguments.slices:
            for context in arguments.contexts:
                shape = Shape(tokens, context)
                kept = [probe.layers(shape, KEEP * layers) for _ in range(arguments.repeats + 1)]
                again = [probe.layers(shape, FULL * layers) for _ in range(arguments.repeats + 1)]
                weighed = probe.layers(shape, KEEP * layers, weigh=True)
                forward = best(kept, "forward_seconds") / layers
                backward = best(kept, "backward_seconds") / layers
                full = best(again, "backward_seconds") / layers
                expected = [
                    profile.op_seconds(kind, shape.spans) for kind in (Kind.FORWARD, Kind.BACKWARD)
                ]
                # The last slice behind a context: its K and V may lie in the store.
                cached_tokens = tokens if context and profile.stores_last_slice else 0
                held = profile.saved_bytes[KEEP](tokens, cached_tokens)
                peak = weighed.held_bytes + max(weighed.forward_bytes, weighed.backward_bytes)
                errors = {
                    "F": expected[0] / forward - 1,
                    "B": expected[1] / backward - 1,
                    "held": held * layers / weighed.held_bytes - 1,
                    "peak": (held * layers + most_workspace(profile, tokens, context)) / peak - 1,
                }
                for name, error in errors.items():
                    off[name].append(abs(error))
                made.append(
                    [
                        str(tokens),
                        str(context),
                        *(f"{1e3 * s:.3f}" for s in (forward, backward, full)),
                        f"{weighed.held_bytes / layers / 2**20:.1f}",
                        f"{peak / 2**20:.1f}",
                        *(f"{error:+.1%}" for error in errors.values()),
                    ]
                )
                print("  ".join(made[-1]), flush=True)
    words = [
        f"{name}: median {statistics.median(errors):.1%}, worst {max(errors):.1%}"
        for name, errors in off.items()
    ]
    return made, words


def most_workspace(profile: Any, tokens: int, context: int) -> float:
    """Return the bytes that the cost model predicts for F or B in addition to saved bytes."""
    return max(
        figure.per_op + figure.per_token * tokens + figure.per_context_token * context
        for kind, figure in profile.workspace_bytes.items()
        if kind.value in "FB"
    )


def best(runs: Sequence[Any], name: str) -> float:
    """Return the minimum over the measured runs except the first, which includes one-time costs."""
    return min(getattr(run, name) for run in runs[1:])


# ------------------------------------------------------------------ slices against the whole


def boundaries(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def attention_seconds(alone: Any, length: int, size: int, repeats: int) -> float:
    """Return the seconds of one layer's attention: F of all slices in order, B in reverse."""
    import torch

    from megatron_epp.ir import Span
    from megatron_epp.layers.chunk_state import ChunkState, Rows
    from megatron_epp.mcore.model.shape import model_shape
    from megatron_epp.runtime.kv_store import Store

    shape = model_shape(alone.args)
    dtype = alone.args.params_dtype
    heads = shape.heads, shape.kv_heads, shape.kv_heads
    q, k, v = (
        torch.randn(length, count, shape.head_size, device=alone.device).to(dtype)
        for count in heads
    )
    parts = boundaries(length, size)
    cut = len(parts) > 1
    taken = []
    for _ in range(repeats + 1):
        store = Store({0: parts[-1][0]}, {0: length}) if cut else Store({})
        began = now(alone)
        passes = []
        for start, stop in parts:
            rows = Rows(0, stop - start, Span(0, start, stop), cut, stop == length)
            state = ChunkState(0, (rows,), stop - start, "k", store)
            inputs = [x[start:stop].clone().requires_grad_() for x in (q, k, v)]
            out, _ = alone.attention(*inputs, state, 0, False)
            passes.append((inputs, out))
        while passes:
            inputs, out = passes.pop()
            torch.autograd.grad(out, inputs, out.detach())
        taken.append(now(alone) - began)
        assert len(store) == 0
    return min(taken[1:])


def now(alone: Any) -> float:
    if alone.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def stage_seconds(
    alone: Any, model: Any, length: int, size: int, layers: int, repeats: int
) -> float:
    """Return the executor's seconds for F and B of all slices on a middle stage."""
    from single_stage import replay

    from megatron_epp.ir import Chunk, Kind, Op, Plan, Span

    parts = boundaries(length, size)
    count = range(len(parts))
    order = (
        *(Op(Kind.FORWARD, chunk) for chunk in count),
        *(Op(Kind.BACKWARD, chunk) for chunk in reversed(count)),
    )
    middle = "k" * layers
    plan = Plan(
        documents=(length,),
        layers=(1, layers, 1),
        chunks=tuple(Chunk((Span(0, start, stop),)) for start, stop in parts),
        recompute=tuple((letters,) * len(parts) for letters in ("k", middle, "k")),
        orders=(order, order, order),
    )
    records = replay(alone, model, plan, 1, repeats)
    return sum(record.seconds for record in records if isinstance(record.op, Op))


def sliced_rows(seconds_of: Any, arguments: argparse.Namespace) -> list[list[str]]:
    made = []
    for length in arguments.lengths:
        whole = seconds_of(length, length)
        for size in arguments.slices:
            if size < length:
                taken = seconds_of(length, size)
                cells = [f"{1e3 * whole:.2f}", f"{1e3 * taken:.2f}", f"{taken / whole:.3f}"]
                made.append([str(length), str(size), *cells])
                print("  ".join(made[-1]), flush=True)
    return made


# ------------------------------------------------------------------ the whole


def main() -> None:
    parser = shapes.parser(__doc__)
    parser.add_argument("--layers", type=int, default=2, help="of the stage (default: 2)")
    parser.add_argument("--slices", type=int, nargs="+", metavar="TOKENS",
                        default=[2048, 4096, 8192, 16384, 32768])  # fmt: skip
    parser.add_argument("--contexts", type=int, nargs="+", metavar="TOKENS",
                        default=[0, 8192, 32768, 65536, 131072, 196608])  # fmt: skip
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS",
                        default=[32768, 65536, 131072], help="of documents")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts (default: 3)")
    arguments, others = parser.parse_known_args()
    context = max(max(arguments.contexts) + max(arguments.slices), *arguments.lengths)
    alone = shapes.begin(arguments, arguments.layers, context, others)
    from single_stage import build_stage

    from megatron_epp.show.table import text_table

    model = build_stage(alone, arguments.layers, True, True)
    chunks, errors = chunk_rows(alone, model, arguments)
    del model
    attention = sliced_rows(
        lambda length, size: attention_seconds(alone, length, size, arguments.repeats), arguments
    )
    middle = build_stage(alone, arguments.layers, False, False)
    stage = sliced_rows(
        lambda length, size: stage_seconds(
            alone, middle, length, size, arguments.layers, arguments.repeats
        ),
        arguments,
    )
    what = f"{arguments.model}, {arguments.layers} layers, attention by {alone.attention.name}"
    tables = (
        ("Chunks, of one layer", CHUNKS, chunks),
        ("Attention", SLICED, attention),
        ("Stage", SLICED, stage),
    )
    for name, headers, rows in tables:
        print(f"\n{name}\n{text_table(headers, rows)}")
    print(f"cost model off by: {'; '.join(errors)}")
    parts = [f"### {name}\n\n{markdown(headers, rows)}\n" for name, headers, rows in tables]
    write(
        arguments.output,
        f"{heading(shapes.hardware())}{what}.\n\n{parts[0]}Cost model off by: "
        f"{'; '.join(errors)}.\n\n{parts[1]}{parts[2]}",
    )


if __name__ == "__main__":
    main()
