"""Predict all published measurements in the catalogue, and write the errors of the predictions.

    python scripts/bench/public.py            prints the table
    python scripts/bench/public.py --write    writes both files, results/public-measurements.md,
                                              and the table of docs/results/accuracy.md

The measurements are in `public_measurements.json`, the predictions in `public_scores.json`; what
`plan`, `compare` and `tune` print is in `megatron_epp/cost/catalogue/accuracy.json`. Steps are
predicted for Megatron's own schedule: equal sequences, 1F1B or interleaved, logits saved from
forward to backward, and the recompute of the row. Their memory is the peak that PyTorch's allocator
reports as allocated. Steps of Seq1F1B have slices and the peak of every stage. Their kernels are
old, so ratios between schedules are compared, not seconds.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import public_rows as public
from headline import ROOT
from public_rows import PublicRow, Scores

from megatron_epp.cost.analytic import ELEMENT_BYTES, WEIGHT_READ
from megatron_epp.cost.build import even_layers, named_cost
from megatron_epp.cost.catalogue.accuracy import ACCURACY, Errors
from megatron_epp.cost.catalogue.devices import DEVICES, GIB, Device
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.kinds.moe import NARROW_EXPERT
from megatron_epp.cost.layer_kinds import Counts
from megatron_epp.cost.network.topology import TOPOLOGIES, Network
from megatron_epp.ir import FULL, KEEP, SELECTIVE, Chunk, Kind, Span
from megatron_epp.planner.chunks.chunking import assemble
from megatron_epp.planner.chunks.slicing import cut_at
from megatron_epp.planner.order.list_scheduler import Policy, list_schedule
from megatron_epp.planner.order.policies import warm_up_policy
from megatron_epp.planner.order.problem import ChunkProblems, loads_of, rates_of
from megatron_epp.planner.order.warmup import constant, interleaved_warm_up
from megatron_epp.planner.published.schedules import packed_chunks
from megatron_epp.sim.exchange import alone_seconds

PAGE = ROOT / "scripts" / "bench" / "results" / "public-measurements.md"
SUMMARY = ROOT / "docs" / "results" / "accuracy.md"  # its table of errors by kind is written, too
# Of a parameter on the device that has its states: gradient, two moments, master weight and weight,
# the states written, too; of every parameter its gradient set to 0.
OPTIMIZER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 30, 4, 8
ROOM_GIB = 1e5  # budget of every prediction: what ran fitted
# Micro-batches that are played; what further ones take is the difference between two plays.
MOST_PLAYED = 4


def device_of(row: PublicRow) -> Device:
    """Return the device of a row, or the row's stand-in if the catalogue lacks the device."""
    return DEVICES[row.facts.get("stand_in", row.facts["device"])]


def predicted(row: PublicRow) -> dict[str, float]:
    """Return the predictions for the measured numbers of a row."""
    return _PREDICTORS[row.what](row)


# --- steps ---------------------------------------------------------------------------------------


def recompute_mode(text: str) -> str:
    """Return the recompute mode that best matches Megatron's names of recomputed modules."""
    if text in ("", "full"):
        return FULL if text else KEEP
    modules = {"mlp" if name == "moe" else name for name in text.split(", ")}
    known = {mode: set(each) & modules for mode, each in SELECTIVE.items()}
    fitting = [mode for mode, each in SELECTIVE.items() if set(each) <= modules]
    weights = {"mlp": 3, "moe_act": 2}
    return max(fitting, key=lambda mode: sum(weights.get(name, 1) for name in known[mode]))


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of every stage: equal, if possible.

    Otherwise embedding and loss count as one layer each.
    """
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    return even_layers(layers, stages)


def cost_of(row: PublicRow, model: Model) -> Cost:
    """Return the cost model of a row's job."""
    facts = row.facts
    ranks, stages = facts.get("pp", 1), facts.get("pp", 1) * facts.get("vp", 1)
    layers = stage_layers(model.layers - model.mtp_layers_count, stages)
    return named_cost(
        model,
        device_of(row).name,
        pp=stages,
        layers=(*layers[:-1], layers[-1] + model.mtp_layers_count),
        place=tuple(range(ranks)) * facts.get("vp", 1) if stages > ranks else (),
        tp=facts["tp"],
        cp=facts.get("cp", 1),
        dp=facts.get("dp", 1),
        ep=facts.get("ep") if model.most_experts else None,
        zero=1,
        memory_budget_gib=ROOM_GIB,
        topology="nodes",
        kv_read=True,
        logits_held=True,
        moe_token_dispatcher_type=facts.get("dispatcher", "alltoall"),
    )


def _all_layers(cost: Cost, mode: str, chunks: int) -> Counts:
    if mode == KEEP:
        return {}
    layers = np.tile(np.array(cost.layout.layers)[:, None], (1, chunks))
    return cost.layout.kinds.first(mode, layers)


def _policies(cost: Cost, sizes: np.ndarray) -> list[Policy]:
    """Return the scheduling policies to simulate: one for 1F1B, two for an interleaved pipeline.

    Both of the two have Megatron's number of forwards in flight, which determines memory. The
    second one also runs a forward when nothing else can run: it stalls as little as Megatron's
    order, which goes through groups of micro-batches.
    """
    stages, ranks = cost.layout.stages, cost.layout.placement.ranks
    if not cost.layout.place:
        least = constant(sizes, stages)
        return [Policy(least, least, least)]
    warm = interleaved_warm_up(ranks, stages) + 1
    return [
        warm_up_policy(cost.layout.place, len(sizes), warm, split=False, deep=True, strict=strict)
        for strict in (True, False)
    ]


def _played(row: PublicRow, cost: Cost, count: int) -> tuple[float, np.ndarray]:
    """Return seconds and peak bytes [ranks] of a step of ``count`` micro-batches."""
    facts = row.facts
    lengths = np.full(count * facts["micro"], facts["seq"])
    if "slices" in facts:
        cuts = cut_at(lengths, np.cumsum([0, *facts["slices"]]))
        chunking = assemble(cuts, np.arange(count), count, rates_of(cost))
    else:
        chunking = packed_chunks(lengths, facts["seq"] * facts["micro"], rates_of(cost))
    loads = loads_of(chunking, lengths)
    counts = _all_layers(cost, recompute_mode(facts.get("recompute", "")), chunking.count)
    work = ChunkProblems(cost, chunking, loads).of(counts)
    played = [list_schedule(work, policy) for policy in _policies(cost, chunking.sizes)]
    resident = np.array(cost.layout.placement.of_ranks(cost.memory.states_bytes))
    if facts.get("moments") == "none":
        resident -= MOMENT_BYTES * cost.memory.parameters[0] / cost.layout.dp
    return min(each.seconds for each in played), played[0].peak_bytes + resident


def step(row: PublicRow) -> dict[str, float]:
    """Return the predicted seconds or rate of a step, and the peaks in GiB that were measured."""
    facts, model = row.facts, row.model
    assert model is not None
    cost = cost_of(row, model)
    count = facts["sequences"] // (facts["micro"] * facts.get("dp", 1))
    few = MOST_PLAYED * facts.get("pp", 1)
    if count <= 2 * few:
        seconds, peak = _played(row, cost, count)
    else:
        (first, peak), (second, _) = (_played(row, cost, each) for each in (few, 2 * few))
        seconds = second + (count - 2 * few) * (second - first) / few
    if facts.get("replicas") == "exposed":
        seconds += float(np.max(np.add(*alone_seconds(cost))))
    seconds += optimizer_seconds(cost, device_of(row))
    found = {"seconds": seconds}
    devices = cost.layout.devices * cost.layout.dp
    tokens = facts["seq"] * facts["sequences"]
    if "tflops" in facts:
        found = {"tflops": model_flops(model, facts["seq"]) * tokens / seconds / devices / 1e12}
    if "tokens_per_second" in facts:
        found = {"tokens_per_second": tokens / seconds / devices}
    if public.BYTES in row.measured and not facts.get("zero"):
        found[public.BYTES] = float(peak.max()) / GIB
    if "stage_gib" in facts:
        found |= {f"{public.BYTES} {stage}": each / GIB for stage, each in enumerate(peak)}
    return found


def optimizer_seconds(cost: Cost, device: Device) -> float:
    """Return seconds in which the optimizer reads and writes states, gradients and weights."""
    layout = cost.layout
    copies = np.array([layout.cp * layout.dp, layout.tp * layout.cp * layout.dp / layout.ep])
    held = np.array(cost.memory.parameters)
    moved = (held / copies[:, None] * OPTIMIZER_BYTES + held * GRADIENT_BYTES).sum(axis=0)
    rate = (device.memory_efficiency or 1.0) * device.memory_bytes_per_second
    return float(np.max(layout.placement.of_ranks(moved))) / rate


def model_flops(model: Model, seq: int) -> float:
    """Return forward and backward FLOPs per token, counted as Megatron does, with causal pairs."""
    word = model.layer_kinds or (next(iter(model.shapes)),) * model.layers
    layers = (model.shapes[kind] for kind in word)
    forward = sum(each.flops_per_token + each.flops_per_pair * seq / 2 for each in layers)
    return 3 * (forward + 2.0 * model.vocabulary_parameters)


# --- parts ---------------------------------------------------------------------------------------


def layer(row: PublicRow) -> dict[str, float]:
    """Return the predicted seconds of an op of one layer, on each rank's own tokens."""
    facts = row.facts
    one = row.model
    assert one is not None
    if one.layers > 1:
        one = type(one)(**{name: getattr(one, name) for name in one.__slots__} | {"layers": 1})
    cost = named_cost(
        one,
        device_of(row).name,
        pp=1,
        tp=facts["tp"],
        dp=facts.get("dp", 1),
        ep=facts.get("ep"),
        zero=1,
        memory_budget_gib=ROOM_GIB,
        topology="nodes",
        kv_read=True,
        head_seconds=False,
        moe_token_dispatcher_type=facts.get("dispatcher", "alltoall"),
    )
    loads = cost.loads([Chunk((Span(0, 0, facts["tokens"]),))], [facts["tokens"]])
    mode = recompute_mode(facts.get("recompute", ""))
    table = cost.table_of(loads, {(0, mode): np.ones((1, 1))})
    op = Kind(facts["op"])
    seconds = float(table.seconds[op][0, 0])
    if op is Kind.BACKWARD:
        seconds += float(table.recompute_seconds[0, 0])
    return {"seconds": seconds}


def gather(row: PublicRow) -> dict[str, float]:
    """Return the predicted bus bandwidth of an all-gather or reduce-scatter."""
    network = Network.of(TOPOLOGIES["nodes"], device_of(row))
    ranks, size = row.facts["ranks"], row.facts["mib"] * 2**20
    moved = size * (ranks - 1) / ranks
    seconds = moved / network.ring(ranks) + network.gather_latency(ranks)
    return {"bus_gb_per_second": moved / seconds / 1e9}


def product(row: PublicRow) -> dict[str, float]:
    """Return the predicted TFLOP/s of one matrix product."""
    facts = row.facts
    weights = facts["n"] * facts["k"]
    flops = 2.0 * facts["rows"] * weights
    return {"tflops": flops / _product_seconds(device_of(row), flops, weights) / 1e12}


def _product_seconds(device: Device, flops: float, weights: float) -> float:
    read = WEIGHT_READ * ELEMENT_BYTES * weights / device.memory_bytes_per_second
    return flops / device.linear_flops + read


def experts(row: PublicRow) -> dict[str, float]:
    """Return the predicted seconds of all experts' matrix products on one device."""
    facts = row.facts
    rows = facts["tokens"] * facts["active"]
    one = 3 * facts["hidden_size"] * facts["expert_hidden"]
    flops = 2.0 * rows * one * (1 + (NARROW_EXPERT / facts["expert_hidden"]) ** 2)
    return {"seconds": _product_seconds(device_of(row), flops, facts["experts"] * one)}


def attention(row: PublicRow) -> dict[str, float]:
    """Return the predicted seconds of attention's forward on one document."""
    facts, device = row.facts, device_of(row)
    pairs = facts["tokens"] * (facts["tokens"] + 1) / 2
    return {"seconds": 4.0 * facts["heads"] * facts["head_size"] * pairs / device.attention_flops}


_PREDICTORS: Mapping[str, Callable[[PublicRow], dict[str, float]]] = {
    "step": step,
    "slices": step,
    "layer": layer,
    "gather": gather,
    "product": product,
    "experts": experts,
    "attention": attention,
}

# --- the page ------------------------------------------------------------------------------------

# Bounds of comparable rows: seconds at worst by kind, and bytes.
WORST: Mapping[str, float] = {"dense": 0.2, "MoE": 0.3, "memory": 0.12}
_ALONE = (
    "one layer alone: its time leaves 850 TFLOP/s for products of experts, more than any whole "
    "step of the tables shows"
)
_SIZES = (
    "15 ms a layer, host-bound: the sizes of every exchange are read back before experts are issued"
)
# Why a comparable row is off by more, by its key.
REASONS: Mapping[str, str] = {
    **{f"megatron-moe-layer {row}": _ALONE for row in (4, 6)},
    "modelzoo-qwen3 4": _SIZES,
    "modelzoo-qwen3 6": "its source calls it not tuned",
    "bridge-qwen3-30b 6": "the exchange alone takes more at the links' full rate: a part of it "
    "must be hidden",
    "megatron-golden 1": "deterministic attention, and gradients added by a kernel of their own",
    "megatron-golden 2": "deterministic attention, gradients added by a kernel of their own, and "
    "no sequence parallelism, which planned jobs have",
}

_KINDS = {"gather": "gathers", "product": "GEMMs", "experts": "GEMMs of experts"}
_NAMES = {
    "seconds": "s",
    "tflops": "TFLOP/s",
    "tokens_per_second": "tokens/s",
    "bus_gb_per_second": "GB/s",
    "gib": "GiB",
    **{f"gib {stage}": f"GiB of stage {stage}" for stage in range(4)},
}
_HEAD = """\
# Public measurements, predicted

<!-- written by scripts/bench/public.py --write; do not edit -->

The analytic [cost model](../../../docs/how/cost_model.md) predicts measurements that others have
published, with their configurations: `scripts/bench/public_measurements.json`.

- *Comparable* (c) is a row in bf16, on a device of the catalogue, with kernels of 2024 or later,
  and with no exchange inside a layer (tensor, context, expert parallel) hidden behind computation.
- *Held out* (h) is of every table each third row, from the second on.

Both were fixed before the first constant of the model was fitted, and no constant is fitted to rows
that are held out. Errors are of time, or bytes: +10% is predicted too slow, or too large. A step is
the schedule's seconds, the exchange among replicas that nothing hid, and the optimizer's.

"""


def _configuration(row: PublicRow) -> str:
    facts = row.facts
    known = (
        "model",
        "backend",
        "dispatcher",
        "op",
        "tp",
        "cp",
        "pp",
        "vp",
        "dp",
        "ep",
        "seq",
        "sequences",
        "micro",
    )
    known += (
        "recompute",
        "hidden",
        "permute",
        "compiled",
        "tokens",
        "rows",
        "n",
        "k",
        "mib",
        "collective",
        "ranks",
    )
    left_out = {("hidden", "no"), ("tp", 1), ("micro", 1), ("pp", 1), ("dp", 1)}
    if "slices" in facts:
        facts, known = {**facts, "slices": len(facts["slices"])}, (*known, "slices")
    words = [f"{n} {facts[n]}" for n in known if n in facts and (n, facts[n]) not in left_out]
    return " ".join(words).replace("model ", "").replace("op ", "")


def slice_ratios(scores: Scores) -> list[tuple[PublicRow, float, float]]:
    """Return the rows with slices of sequences that were also measured whole.

    Each comes with the measured and the predicted seconds of whole sequences over its own.
    """
    rows = [row for row in public.measurements() if row.what == "slices"]
    ratios = []
    for whole in (row for row in rows if len(row.facts["slices"]) == 1):
        job = whole.facts["model"], whole.facts["seq"]
        for row in rows:
            if row is not whole and (row.facts["model"], row.facts["seq"]) == job:
                predicted = scores[whole.key]["seconds"] / scores[row.key]["seconds"]
                measured = whole.facts["seconds"] / row.facts["seconds"]
                ratios.append((row, measured, predicted))
    return ratios


def _ratio_lines(scores: Scores) -> list[str]:
    lines = ["## Slices", "", "Seconds of whole sequences over seconds of slices.", ""]
    lines += ["| configuration | measured | predicted | error |", "|---|---|---|---|"]
    for row, measured, predicted in slice_ratios(scores):
        error = predicted / measured - 1
        figures = f"{measured:.3f} | {predicted:.3f} | {error:+.1%}"
        lines.append(f"| {row.key} {_configuration(row)} | {figures} |")
    return [*lines, ""]


def summary(scores: Scores) -> list[str]:
    """Return the lines of the table of errors by kind."""
    rows = public.measurements()
    lines = [
        "| kind | comparable rows | median | worst | held out | median | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    parts = [(kind, kind, False) for kind in dict.fromkeys(row.kind for row in rows)]
    for name, kind, memory in (*parts, ("memory", None, True)):
        known = [row for row in rows if row.comparable and kind in (None, row.kind)]
        if not known:
            continue
        cells = []
        for chosen in (known, [row for row in known if row.held_out]):
            if found := public.errors_of(chosen, scores, memory=memory):
                median, worst = public.median_and_worst(found)
                cells += [str(len(found)), f"{median:.1%}", f"{worst:.1%}"]
            else:
                cells += ["0", "", ""]
        lines.append(f"| {_KINDS.get(name, name)} | {' | '.join(cells)} |")
    return lines


def missed(scores: Scores) -> list[tuple[PublicRow, str, float]]:
    """Return the comparable rows whose errors exceed the bounds: (row, quantity, error)."""
    rows = []
    for row in public.measurements():
        for what, measured in row.measured.items():
            if row.comparable and what in scores[row.key]:
                off = public.error(what, measured, scores[row.key][what])
                bound = WORST.get("memory" if what.startswith(public.BYTES) else row.kind)
                if bound is not None and abs(off) > bound:
                    rows.append((row, what, off))
    return rows


def _missed_lines(scores: Scores) -> list[str]:
    bounds = ", ".join(f"{kind} {bound:.0%}" for kind, bound in WORST.items())
    lines = ["## Missed", "", f"Comparable rows that are off by more ({bounds}), and why.", ""]
    lines += ["| row | | configuration | error | why |", "|---|---|---|---|---|"]
    for row, what, off in missed(scores):
        side = "h" * row.held_out
        words = f"{row.key} | {side} | {_configuration(row)} | {_NAMES[what]} {off:+.0%}"
        lines.append(f"| {words} | {REASONS.get(row.key, '')} |")
    return [*lines, ""]


def page(scores: Scores) -> str:
    """Return the page with measured and predicted numbers and errors, by row."""
    lines = [*summary(scores), "", *_missed_lines(scores), *_ratio_lines(scores)]
    tables: dict[str, list[PublicRow]] = {}
    for row in public.measurements():
        tables.setdefault(row.table, []).append(row)
    for name, rows in tables.items():
        devices = ", ".join(dict.fromkeys(row.facts["device"] for row in rows))
        lines += [f"## {name}", "", f"{devices}. Source: {rows[0].source}.", ""]
        lines += [
            "| | configuration | | measured | predicted | error |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            side = "c" * row.comparable + "h" * row.held_out
            for what, measured in row.measured.items():
                if what not in scores[row.key]:
                    continue
                found = scores[row.key][what]
                lines.append(
                    f"| {side} | {_configuration(row)} | {_NAMES[what]} | {measured:.4g} | "
                    f"{found:.4g} | {public.error(what, measured, found):+.1%} |"
                )
        lines.append("")
    return _HEAD + "\n".join(lines).rstrip() + "\n"


def with_summary(text: str, scores: Scores) -> str:
    """Return the page of accuracies with the table of errors by kind as it is today."""
    begin, end = summary(scores)[0], "\n\n"
    before, table, after = text.partition(begin)
    if not table:
        raise ValueError(f"{SUMMARY}: lacks the table that begins with {begin!r}")
    return before + "\n".join(summary(scores)) + end + after.partition(end)[2]


def all_scores() -> Scores:
    """Return the rounded predictions of all rows."""
    return {
        row.key: {name: float(f"{each:.6g}") for name, each in predicted(row).items()}
        for row in public.measurements()
    }


def accuracy(scores: Scores) -> dict[str, Errors]:
    """Return the errors of comparable steps and layers that others measured, by device."""
    known = [row for row in public.measurements() if row.comparable and row.model and not row.own]
    found: dict[str, Errors] = {}
    for device in DEVICES:
        rows = [row for row in known if row.facts["device"] == device]
        errors = {
            kind: public.errors_of([row for row in rows if row.kind == kind], scores)
            for kind in ("dense", "MoE")
        }
        errors["memory"] = public.errors_of(rows, scores, memory=True)
        of_device: Errors = {}
        for kind, values in errors.items():
            if values:
                median, worst = public.median_and_worst(values)
                of_device[kind] = (round(median, 4), round(worst, 4), len(values))
        if of_device:
            found[device] = of_device
    return found


def _lines(values: Mapping[str, Any]) -> str:
    """Return JSON with a line a key."""
    lines = (f" {json.dumps(key)}: {json.dumps(each)}" for key, each in values.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Print the table, or write the scores and the page; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the scores and the page")
    arguments = parser.parse_args()
    found = all_scores()
    if arguments.write:
        public.SCORES.write_text(_lines(found), encoding="utf-8")
        ACCURACY.write_text(_lines(accuracy(found)), encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")
        text = SUMMARY.read_text(encoding="utf-8")
        SUMMARY.write_text(with_summary(text, found), encoding="utf-8")
    else:
        print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
