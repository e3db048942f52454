#!/usr/bin/env python3
"""Whole iterations from one GPU: every stage of a plan runs alone, and the simulator combines them.

    scripts/bench/gpu_replay.py [--model llama-7b] [--pp 4] [--lengths wikipedia] [-o RESULT.md]
    scripts/bench/gpu_replay.py --device cpu --model tiny --layers 4 --pp 2 --context 256 \\
        --documents 6 --budget-gib 0.002

Each planner makes a plan of the same batch, with the cost model that training would measure on this
GPU. Then the executor runs one stage after the other, with its own layers and embedding or LM head,
in the plan's order; messages from neighbour stages are random. The simulator then uses the measured
seconds of every op (the median of the runs) in place of the cost model's. *predicted* is the cost
model's prediction, *replayed* the result with measured seconds. Peaks are those of the allocator,
for chunks, on the worst stage. One GPU cannot measure links, so both use --link-gb-per-second and
--link-latency-us.
"""

import argparse
import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import shapes
from headline import heading, markdown, write

PLANNERS = ("packing", "seq1f1b", "infinipipe", "epp")
HEADERS = [
    *("planner", "chunks", "replayed s", "predicted s", "off", "against packing", "bubble"),
    *("recomputed", "peak GiB", "predicted GiB", "off by"),
]


def plans_of(alone: Any, cost: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of the batch, by planner."""
    from megatron_epp.corpus.lengths import open_corpus
    from megatron_epp.planner.options import Options, parse_levers
    from megatron_epp.planner.registry import planner_of

    corpus = open_corpus(arguments.lengths, arguments.context)
    lengths = corpus.batch(arguments.batch, arguments.documents)
    options = Options(
        context=arguments.context, levers=parse_levers(arguments.levers), effort=arguments.effort
    )
    print(f"{len(lengths)} documents of {sum(lengths)} tokens, longest {max(lengths)}", flush=True)
    return {name: planner_of(name)(lengths, cost, options) for name in arguments.planners}


def cost_of(alone: Any, arguments: argparse.Namespace, layers: tuple[int, ...]) -> Any:
    """Return the cost model of this device, measured on one layer with embedding and LM head.

    As in training, the attention's kernels are warmed up before.
    """
    from megatron.core.utils import get_model_config
    from single_stage import build_stage, profile_of

    from megatron_epp.cost.analytic import without_states
    from megatron_epp.cost.catalogue.devices import GIB
    from megatron_epp.cost.cost import Cost
    from megatron_epp.cost.layout import StageLayout
    from megatron_epp.mcore.model.warm_up import warm_up_layers

    model = build_stage(alone, 1, True, True)
    warm_up_layers(alone.attention, get_model_config(model), alone.args.seq_length, alone.device)
    profile = without_states(profile_of(alone, model))
    bytes_per_token = alone.args.hidden_size * alone.args.params_dtype.itemsize
    profile = dataclasses.replace(
        profile,
        link_seconds_per_token=bytes_per_token / (arguments.link_gb_per_second * 1e9),
        link_latency_seconds=arguments.link_latency_us * 1e-6,
    )
    return Cost(StageLayout(profile, layers), (arguments.budget_gib * GIB,) * len(layers))


def replayed(
    alone: Any, planned: dict[str, Any], layers: tuple[int, ...], repeats: int
) -> dict[str, list[Any]]:
    """Return the records of every stage, by planner; each stage's model is built only once."""
    from single_stage import build_stage, replay

    records: dict[str, list[Any]] = {name: [] for name in planned}
    for stage, count in enumerate(layers):
        model = build_stage(alone, count, stage == 0, stage == len(layers) - 1)
        for name, made in planned.items():
            records[name].append(replay(alone, model, made.plan, stage, repeats))
            print(f"stage {stage}: {name} replayed", flush=True)
        del model
        gc.collect()
        if alone.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
    return records


def rows(planned: dict[str, Any], records: dict[str, list[Any]], cost: Any) -> list[list[str]]:
    from single_stage import measured_table, peak_bytes

    from megatron_epp.cost.catalogue.devices import GIB
    from megatron_epp.sim.play import play

    played = {
        name: play(made.plan, measured_table(made.plan, cost, records[name]))
        for name, made in planned.items()
    }
    against = played.get("packing", next(iter(played.values()))).seconds
    made_rows = []
    for name, made in planned.items():
        seconds = played[name].seconds
        peaks = [peak_bytes(stage) for stage in records[name]]
        errors = [p / m - 1 for p, m in zip(made.peak_bytes, peaks, strict=True)]
        recomputed = sum(
            letter != "k" for stage in made.plan.recompute for choice in stage for letter in choice
        )
        made_rows.append(
            [
                name,
                str(made.chunks),
                f"{seconds:.4g}",
                f"{made.seconds:.4g}",
                f"{made.seconds / seconds - 1:+.1%}",
                f"{against / seconds:.2f}",
                f"{played[name].bubble_ratio:.1%}",
                f"{recomputed / (made.chunks * sum(made.plan.layers)):.1%}",
                f"{max(peaks) / GIB:.4g}",
                f"{max(made.peak_bytes) / GIB:.4g}",
                f"{max(errors, key=abs):+.1%}",
            ]
        )
    return made_rows


def keep(
    folder: str | None, planned: dict[str, Any], records: dict[str, list[Any]], cost: Any
) -> None:
    """Write the plans, the seconds of every op, and the measured profile to ``folder``."""
    if folder is None:
        return
    from megatron_epp.ir import format_records

    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "profile.json").write_text(cost.layout.profile.to_json(), encoding="utf-8")
    for name, made in planned.items():
        Path(folder, f"{name}.plan").write_text(str(made.plan), encoding="utf-8")
        everything = [record for stage in records[name] for record in stage]
        Path(folder, f"{name}.timed").write_text(format_records(everything), encoding="utf-8")
    Path(folder, "predicted.json").write_text(
        json.dumps({name: made.seconds for name, made in planned.items()}, indent=1)
    )


def main() -> None:
    parser = shapes.parser(__doc__)
    parser.add_argument("--layers", type=int, help="of all stages together (default: the model's)")
    parser.add_argument("--pp", type=int, default=4, help="stages (default: 4)")
    parser.add_argument("--lengths", default="wikipedia", help="a name, a file or a .idx")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--documents", type=int, default=128, help="of the batch (default: 128)")
    parser.add_argument("--batch", type=int, default=0, help="which batch of them (default: 0)")
    parser.add_argument("--planners", nargs="+", default=PLANNERS)
    parser.add_argument("--levers", default="default", help="of epp (default: default)")
    parser.add_argument("--effort", type=int, default=4)
    parser.add_argument("--budget-gib", type=float, default=32.0,
                        help="for chunks, of every stage (default: 32)")  # fmt: skip
    parser.add_argument("--link-gb-per-second", type=float, default=50.0)
    parser.add_argument("--link-latency-us", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", metavar="FOLDER",
                        help="plans and records of every planner, and the profile")  # fmt: skip
    arguments, others = parser.parse_known_args()
    total = arguments.layers or shapes.MODELS[arguments.model][0]
    if arguments.pp < 1 or total % arguments.pp:
        shapes.refuse(f"--pp {arguments.pp}: expected a divisor of the {total} layers")
    layers = (total // arguments.pp,) * arguments.pp
    alone = shapes.begin(arguments, total, arguments.context, others)
    cost = cost_of(alone, arguments, layers)
    planned = plans_of(alone, cost, arguments)
    records = replayed(alone, planned, layers, arguments.repeats)
    table = rows(planned, records, cost)
    keep(arguments.keep, planned, records, cost)
    from megatron_epp.show.table import text_table

    what = (
        f"{arguments.model}, {arguments.pp} stages of {layers[0]} layers, {arguments.documents} "
        f"documents of {arguments.lengths} within {arguments.context} tokens, "
        f"{arguments.budget_gib:g} GiB for chunks, attention by {alone.attention.name}"
    )
    print(f"\n{what}\n{text_table(HEADERS, table)}")
    write(
        arguments.output,
        f"{heading(shapes.hardware())}{what}.\n\n{markdown(HEADERS, table)}\n",
    )


if __name__ == "__main__":
    main()
