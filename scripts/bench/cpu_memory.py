#!/usr/bin/env python3
"""Predicted and measured memory and time on real documents, on this host's CPU.

    scripts/bench/cpu.py --case memory [--sections truth2 truth4 budgets uniform offload failure]
                                       [-o RESULT.md]

The model has 8 layers, 8 heads in 4 groups, context 16K, and by default hidden size 128. A batch
has 4 documents by default: the source text of this Python's standard library, or --data-path.
Every process has one thread (gloo). Each run first measures the cost model, as in training.

    truth2, truth4   2 and 4 stages: every iteration has another batch and another kind of plan,
                     including random plans. The tables compare predicted and measured peaks of
                     every stage and seconds, then single ops. On a small host, 4 stages share cores
    budgets          each batch is planned with 100%, 75%, 50% and 35% of the memory that a plan
                     without recompute needs on each stage, and once with far too little
    uniform          with the same budgets, recompute by epp, compared with the cheapest uniform
                     setting: the same layers on every stage and for every chunk
    offload          layers in host memory, 2 stages: plans for 80% to 40% of the memory without
                     recompute, and random plans with all recompute modes; predicted and measured
                     bytes on device and host. Plans assume that copies take no time, so that they
                     offload; only bytes are compared
    failure          a run that hits an unknown memory limit, and a run planned with that limit
"""

import argparse
import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from headline import ROOT, heading, host, write
from in_turns import corpus_of

sys.path.insert(0, str(ROOT))

SECTIONS = ("truth2", "truth4", "budgets", "uniform", "offload", "failure")
FRACTIONS = (1.0, 0.75, 0.5, 0.35)
LINE = "cpu_memory: "
MIB = 2**20
GIB = 2**30

# ------------------------------------------------------------------ inside torchrun


def work(tasks: list[dict]) -> None:
    """Run Megatron's trainer; ``tasks[i]`` has the batch and the kind of plan of iteration i."""
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.data.global_batches import GlobalBatches
    from megatron_epp.mcore.trainer import entry
    from megatron_epp.mcore.trainer.hooks import TrainerHooks

    class Batches(GlobalBatches):
        given = 0

        def __next__(self):
            self.consumed = tasks[min(self.given, len(tasks) - 1)]["batch"] * self.size_after(0)
            self.given += 1
            return self.peek()

    entry.main(
        hooks=TrainerHooks(
            make_steps=lambda place, model: Tasks(tasks, place, model),
            make_batches=Batches,
            summary=told,
        )
    )


class Tasks:
    """Step source that plans on rank 0 as the task of the iteration says."""

    host_bytes: tuple[int, ...] = ()  # that the latest plan promises, of every stage

    def __init__(self, tasks, place, model):
        from megatron_epp.mcore.calibrate.profile_file import obtain
        from megatron_epp.mcore.job.job_cost import training_cost
        from megatron_epp.planner import Options

        args, config, multiple = place.args, place.config, place.row_shard.multiple
        self.tasks, self.groups = tasks, place.groups
        profile = obtain(args, config, model, place.groups, place.row_shard)
        cost = training_cost(args, config, place.layers, profile)
        ample = (1e15,) * cost.layout.stages
        self.cost = cost.replace(device_budget_bytes=ample, multiple=multiple)
        self.options = Options(context=args.seq_length, effort=config.epp_effort)

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool):
        from megatron_epp.control.planned_steps import shared
        from megatron_epp.control.step_source import SourcedStep
        from megatron_epp.cost.host_memory import host_peak_bytes

        def planned() -> SourcedStep:
            made = plan(self.tasks[iteration - 1], lengths, self.cost, self.options)
            Tasks.host_bytes = host_peak_bytes(self.cost, made.plans[0])
            return SourcedStep(made, str(made))

        return shared(planned, self.groups.control)

    def look_ahead(self, iteration: int, following: Callable) -> None:
        """Do nothing: plans are made on demand, because this script does not time planning."""


def plan(task: dict, lengths: Sequence[int], ample, options):
    """Return the step for one batch.

    ``task["share"]`` is the budget, as a fraction of the peaks of epp's plan without recompute.
    """
    from megatron_epp.ir import Prediction, Step
    from megatron_epp.ir.random_plan import arbitrary_plan
    from megatron_epp.layers.recompute.wrap import EXECUTABLE
    from megatron_epp.planner import plan_step
    from megatron_epp.sim.play import play

    if task["planner"] == "random":
        letters = task.get("letters", EXECUTABLE)
        drawn = arbitrary_plan(
            lengths, ample.layout.layers, random.Random(task["seed"]), modes=letters
        )
        played = play(drawn, ample.table(drawn))
        prediction = Prediction(played.seconds, tuple(p / GIB for p in played.peak_bytes), "random")
        return Step(
            (tuple(range(len(lengths))),), (dataclasses.replace(drawn, predicted=prediction),)
        )
    kept = plan_step(lengths, ample, options, "epp").planned[0]
    if task["share"] == 1.0 and task["planner"] == "epp":
        return Step((tuple(range(len(lengths))),), (kept.plan,))
    budget = tuple(task["share"] * peak for peak in kept.peak_bytes)
    within = dataclasses.replace(ample, device_budget_bytes=budget)
    if task.get("offload"):
        free = dataclasses.replace(ample.layout.profile, host_bytes_per_second=1e15)
        within = dataclasses.replace(within, profile=free)
        options = dataclasses.replace(options, levers=options.levers | {"offload"})
    return plan_step(lengths, within, options, task["planner"]).step


def told(iteration: int, step, report, *others) -> str:
    """Return the trainer's log entry of an iteration, as JSON."""
    from megatron_epp.show.timeline import offloaded_ratio

    plan = step.plans[0]
    entry = {
        "iteration": iteration,
        "tokens": plan.tokens,
        "chunks": len(plan.chunks),
        "seconds": report.seconds,
        "predicted_seconds": plan.predicted.seconds,
        "peaks": list(report.peak_bytes),
        "predicted_peaks": [gib * GIB for gib in plan.predicted.peak_gib],
        "host": list(report.host_bytes),
        "predicted_host": list(Tasks.host_bytes),
        "offloaded": offloaded_ratio(plan),
    }
    return LINE + json.dumps(entry)


# ------------------------------------------------------------------ outside


@dataclasses.dataclass(frozen=True)
class Place:
    """Settings that all runs share: corpus, folder for logs, sizes."""

    corpus: Path
    folder: Path
    hidden: int
    documents: int


def flags(place: Place, stages: int, iterations: int, **changes: object) -> list[str]:
    named = {
        "num-layers": 8,
        "hidden-size": place.hidden,
        "ffn-hidden-size": place.hidden * 11 // 4,
        "num-attention-heads": 8,
        "num-query-groups": 4,
        "seq-length": 16384,
        "max-position-embeddings": 16384,
        "pipeline-model-parallel-size": stages,
        "global-batch-size": place.documents,
        "train-iters": iterations,
        "lr": 0.0,  # the weights stay, so the losses of one batch can be compared
        "eval-iters": 0,
        "split": "100,0,0",
        "log-interval": 1,
        "data-path": place.corpus,
        "tokenizer-type": "SentencePieceTokenizer",
        "tokenizer-model": f"{place.corpus}.model",
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "attention-dropout": 0,
        "hidden-dropout": 0,
        **{key.replace("_", "-"): value for key, value in changes.items()},
    }
    words = "--group-query-attention --swiglu --disable-bias-linear --epp"
    words += " --untie-embeddings-and-output-weights"
    return words.split() + [str(w) for key, value in named.items() for w in (f"--{key}", value)]


def torchrun(program: list[str], words: list[str], processes: int, log: Path) -> tuple[int, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *program, *words]
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    return done.returncode, log.read_text(errors="replace")


def run(tasks: list[dict], stages: int, place: Place, name: str) -> list[dict]:
    """Run one job with ``tasks``, and return one entry per task, with its loss."""
    folder = place.folder
    (folder / f"{name}.json").write_text(json.dumps(tasks))
    program = [str(Path(__file__).resolve()), "--work", str(folder / f"{name}.json")]
    words = flags(place, stages, len(tasks), epp_record=folder / name)
    status, text = torchrun(program, words, stages, folder / f"{name}.log")
    entries = [json.loads(found) for found in re.findall(LINE + r"(\{.*?\})", text)]
    losses = [float(x) for x in re.findall(r"lm loss: ([0-9.E+-]+)", text)]
    if status or len(entries) != len(tasks):
        tail = "\n".join(text.splitlines()[-15:])
        raise SystemExit(f"cpu_memory: a run failed; its log is {folder}/{name}.log\n{tail}")
    return [
        {**task, **entry, "loss": loss}
        for task, entry, loss in zip(tasks, entries, losses, strict=True)
    ]


def truth_tasks(iterations: int) -> list[dict]:
    sorts = [
        ("epp", 1.0), ("random", None), ("epp", 0.5), ("packing", 1.5), ("infinipipe", 0.8),
        ("random", None), ("epp", 0.35), ("seq1f1b", 1.5),
    ]  # fmt: skip
    return [
        {"batch": i, "planner": sorts[i % len(sorts)][0], "share": sorts[i % len(sorts)][1],
         "seed": i}
        for i in range(iterations)
    ]  # fmt: skip


def truth(stages: int, iterations: int, place: Place) -> str:
    name = f"truth{stages}"
    entries = run(truth_tasks(iterations), stages, place, name)
    rows = []
    for entry in entries:
        pairs = list(zip(entry["predicted_peaks"], entry["peaks"], strict=True))
        rows.append(
            [
                str(entry["iteration"]),
                entry["planner"],
                "" if entry["share"] is None else f"{entry['share']:.0%}",
                str(entry["tokens"]),
                str(entry["chunks"]),
                " ".join(f"{predicted / MIB:.1f}" for predicted, _ in pairs),
                " ".join(f"{peak / MIB:.1f}" for _, peak in pairs),
                f"{max(abs(p / m - 1) for p, m in pairs):.2%}",
                f"{entry['predicted_seconds']:.2f}",
                f"{entry['seconds']:.2f}",
                f"{entry['predicted_seconds'] / entry['seconds'] - 1:+.1%}",
            ]
        )
    headers = [
        *("iteration", "planner", "budget", "tokens", "chunks", "predicted peak MiB"),
        *("measured MiB", "worst", "predicted s", "measured s", "error"),
    ]
    worst = max(
        abs(p / m - 1)
        for entry in entries
        for p, m in zip(entry["predicted_peaks"], entry["peaks"], strict=True)
    )
    # The first iteration warms caches, buffers and links up.
    errors = [abs(e["predicted_seconds"] / e["seconds"] - 1) for e in entries[1:]]
    return "\n".join(
        [
            f"### {stages} stages\n",
            table(headers, rows),
            f"Peak: worst error of any stage and iteration {worst:.2%}. Seconds: median error "
            f"{statistics.median(errors):.1%} ({load()}).\n",
            residuals(place.folder / name),
        ]
    )


def residuals(folder: Path) -> str:
    """Return the prediction errors of single ops, as --epp-record wrote them."""
    return (folder / "errors.txt").read_text()


def budgets(batches: int, place: Place) -> str:
    tasks = [
        {"batch": batch, "planner": "epp", "share": share, "seed": 0}
        for batch in range(batches)
        for share in (FRACTIONS if batch else (1.0, *FRACTIONS))  # the first of all warms up
    ]
    entries = run(tasks, 2, place, "budgets")[1:]
    rows, spread, kept = [], 0.0, True
    for start in range(0, len(entries), len(FRACTIONS)):
        of_batch = entries[start : start + len(FRACTIONS)]
        full = of_batch[0]
        for entry in of_batch:
            room = [entry["share"] * peak for peak in full["predicted_peaks"]]
            over = max(p / r for p, r in zip(entry["peaks"], room, strict=True))
            kept = kept and over <= 1.002
            spread = max(spread, abs(entry["loss"] / full["loss"] - 1))
            rows.append(
                [
                    str(entry["batch"]), f"{entry['share']:.0%}",
                    " ".join(f"{r / MIB:.1f}" for r in room),
                    " ".join(f"{p / MIB:.1f}" for p in entry["peaks"]),
                    f"{over:.1%}", str(entry["chunks"]),
                    f"{entry['predicted_seconds'] / full['predicted_seconds']:.3f}",
                    f"{entry['seconds'] / full['seconds']:.3f}", f"{entry['loss']:.6f}",
                ]
            )  # fmt: skip
    headers = [
        *("batch", "budget", "budget MiB", "measured MiB", "of the budget", "chunks"),
        *("predicted time", "measured time", "loss"),
    ]
    words = flags(place, 2, 1, epp_memory_budget_gib=0.005)
    status, text = torchrun(
        ["-m", "megatron_epp.pretrain_gpt"], words, 2, place.folder / "none.log"
    )
    said = [line for line in text.splitlines() if line.startswith("megatron_epp: error:")]
    return "\n".join(
        [
            "### Budgets, 2 stages\n",
            table(headers, rows),
            f"Every iteration stays within its budget: {'yes' if kept else 'NO'}. Largest "
            f"relative difference of a batch's losses: {spread:.1e} ({load()}).\n",
            f"With 0.005 GiB the job ends (torchrun's status {status}) with the line:\n",
            *(f"    {line}" for line in said),
        ]
    )


def uniform(batches: int, place: Place) -> str:
    """Compare epp's recompute with uniform settings, on the cost model of the budgets' run."""
    from megatron_epp.cost.analytic import without_states
    from megatron_epp.cost.cost import Cost
    from megatron_epp.cost.layout import StageLayout
    from megatron_epp.cost.profile import Profile
    from megatron_epp.ir import Step
    from megatron_epp.planner import Options, plan_step

    folder = place.folder
    profile = without_states(Profile.load(str(folder / "budgets" / "epp-cost-model.json")))
    files = sorted((folder / "budgets").glob("*.step"))
    first = [Step.parse(file.read_text()) for file in files]
    lengths = list(dict.fromkeys(step.lengths for step in first))[:batches]
    rows = []
    for batch, of_batch in enumerate(lengths):
        ample = Cost(StageLayout(profile, first[0].plans[0].layers), (1e15, 1e15))
        options = Options(context=16384)
        kept = plan_step(of_batch, ample, options, "epp").planned[0]
        for share in FRACTIONS[1:]:
            budget = tuple(share * peak for peak in kept.peak_bytes)
            cost = ample.replace(device_budget_bytes=budget)
            ours = plan_step(of_batch, cost, options, "epp").planned[0]
            candidates = [
                (seconds, what)
                for base in (ours, kept)
                for seconds, what in uniform_settings(base.plan, cost)
            ]
            mine = recomputed_seconds(ours.plan, cost)
            least, what = min(candidates, default=(float("inf"), "none fits"))
            rows.append(
                [
                    str(batch), f"{share:.0%}", f"{mine:.3f}", f"{least:.3f}", what,
                    "" if mine == 0 or least == float("inf") else f"{least / mine:.2f}",
                    f"{ours.seconds:.3f}", "yes" if ours.fits else "NO",
                ]
            )  # fmt: skip
    headers = [
        *("batch", "budget", "epp recomputes s", "uniform s", "least uniform setting"),
        *("ratio", "epp iteration s", "fits"),
    ]
    return "\n".join(
        [
            "### What is recomputed at the same budget, predicted, summed over the stages\n",
            table(headers, rows),
            "Uniform: one letter for the first n layers of every stage and for every chunk, on "
            "the chunks and orders of epp's plan for that budget and of its plan without one.\n",
        ]
    )


def recomputed_seconds(plan, cost) -> float:
    return float(sum(map(sum, cost.table(plan).recompute_seconds)))


def uniform_settings(plan, cost):
    """Yield (seconds recomputed, text) of the cheapest uniform setting of each recompute mode.

    A setting recomputes the first n layers of every stage; n is the least that fits the budget.
    """
    from megatron_epp.ir import SELECTIVE
    from megatron_epp.sim.play import play

    for letter in ("f", *SELECTIVE):
        for count in range(max(plan.layers) + 1):
            choice = tuple(
                (letter * min(count, n) + "k" * (n - min(count, n)),) * len(plan.chunks)
                for n in plan.layers
            )
            alike = dataclasses.replace(plan, recompute=choice, predicted=None)
            peaks = play(alike, cost.table(alike)).peak_bytes
            if all(p <= b for p, b in zip(peaks, cost.device_budget_bytes, strict=True)):
                yield recomputed_seconds(alike, cost), f"{count}{letter}"
                break


def offload(iterations: int, place: Place) -> str:
    """Compare predicted and measured bytes on device and host for plans with offloaded layers."""
    sorts = (
        {"planner": "epp", "share": 0.8, "offload": True},
        {"planner": "random", "share": None},
        {"planner": "epp", "share": 0.6, "offload": True},
        {"planner": "random", "share": None, "letters": "o"},
        {"planner": "epp", "share": 0.4, "offload": True},
        {"planner": "random", "share": None, "letters": "kof"},
    )
    tasks = [{"batch": i, "seed": i, **sorts[i % len(sorts)]} for i in range(iterations)]
    rows, errors = [], ([], [])
    for entry in run(tasks, 2, place, "offload"):
        pairs = [
            list(zip(entry[f"predicted_{what}"], entry[what], strict=True))
            for what in ("peaks", "host")
        ]
        cells = []
        for found, of_kind in zip(errors, pairs, strict=True):
            found += [abs(p / m - 1) if m else float(p > 0) for p, m in of_kind]
            cells += [
                " ".join(f"{predicted / MIB:.1f}" for predicted, _ in of_kind),
                " ".join(f"{measured / MIB:.1f}" for _, measured in of_kind),
                f"{max(found[-len(of_kind) :]):.2%}",
            ]
        share = "" if entry["share"] is None else f"{entry['share']:.0%}"
        letters = entry.get("letters", "all" if entry["planner"] == "random" else "")
        rows.append(
            [str(entry["iteration"]), entry["planner"], share or letters, str(entry["chunks"]),
             f"{entry['offloaded']:.0%}", *cells]
        )  # fmt: skip
    headers = [
        *("iteration", "planner", "budget or letters", "chunks", "offloaded"),
        *("predicted peak MiB", "measured MiB", "worst"),
        *("predicted on the host MiB", "measured MiB", "worst"),
    ]
    return "\n".join(
        [
            "### Layers in the host's memory, 2 stages\n",
            table(headers, rows),
            f"Worst error of any stage and iteration: on the device {max(errors[0]):.2%}, on the "
            f"host {max(errors[1]):.2%}.\n",
        ]
    )


def failure(place: Place) -> str:
    """Compare a run that hits an unknown memory limit with a run planned for that limit."""
    small = {"seq_length": 4096, "max_position_embeddings": 4096, "lr": 1e-3}
    program = ["-m", "megatron_epp.pretrain_gpt"]
    folder = place.folder
    free = folder / "free"
    words = flags(place, 2, 6, **small, epp_record=free)
    status, text = torchrun(program, words, 2, folder / "free.log")
    told = re.findall(r"peak ([0-9. of]+) MiB", text)
    peaks = [max(map(float, re.findall(r"(?<!of )\b[0-9.]+", found))) for found in told]
    limit = 0.6 * max(peaks) / 1024
    knows = {"epp_memory_budget_gib": 0.95 * limit}
    runs = {"without a limit": (status, text)}
    for name, changes in {"hits the limit": {}, "knew of it": knows}.items():
        words = flags(place, 2, 6, **small, epp_memory_limit_gib=limit, **changes,
                      epp_cost_model=free / "epp-cost-model.json")  # fmt: skip
        runs[name] = torchrun(program, words, 2, folder / f"{name.replace(' ', '-')}.log")
    rows = []
    for name, (status, text) in runs.items():
        losses = re.findall(r"lm loss: ([0-9.E+-]+)", text)
        repeats = len(re.findall(r"repeated with less memory", text))
        rows.append([name, str(status), str(repeats), " ".join(losses)])
    found = {name: [*map(float, row[3].split())] for name, row in zip(runs, rows, strict=True)}
    pairs = zip(found["hits the limit"], found["knew of it"], strict=True)
    worst = max(abs(a / b - 1) for a, b in pairs)
    return "\n".join(
        [
            f"### A forced out-of-memory: limit {limit * 1024:.0f} MiB a rank\n",
            table(["run", "status", "budgets cut", "losses of the iterations"], rows),
            f"Largest relative difference between the two: {worst:.1e}.\n",
        ]
    )


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from megatron_epp.show.table import markdown

    return markdown(headers, rows)


def load() -> str:
    """Return the load of the host as text: on a busy host, seconds are unreliable."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--hidden", type=int, default=128, help="size of the model")
    parser.add_argument("--documents", type=int, default=4, help="of a batch")
    parser.add_argument("--iterations", type=int, default=24, help="of truth2, truth4, offload")
    parser.add_argument("--batches", type=int, default=3, help="of budgets and uniform")
    parser.add_argument("--data-path", metavar="PREFIX", help="a corpus with PREFIX.model")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the tables as markdown")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cpu_memory-"))
    if "uniform" in arguments.sections and "budgets" not in arguments.sections:
        parser.error("uniform reads what budgets measured: name both")
    place = Place(corpus_of(arguments, folder), folder, arguments.hidden, arguments.documents)
    made = []
    for section in arguments.sections:
        print(f"{section} ...", flush=True)
        if section.startswith("truth"):
            text = truth(int(section[-1]), arguments.iterations, place)
        elif section == "budgets":
            text = budgets(arguments.batches, place)
        elif section == "offload":
            text = offload(arguments.iterations, place)
        elif section == "uniform":
            text = uniform(arguments.batches, place)
        else:
            text = failure(place)
        print(text, flush=True)
        made.append(text)
    hardware = f"{host()}, fp32, processes of one thread"
    write(arguments.output, heading(hardware) + "\n".join(made))


if __name__ == "__main__":
    at = sys.argv.index("--work")
    tasks = json.loads(Path(sys.argv[at + 1]).read_text())
    del sys.argv[at : at + 2]
    work(tasks)
