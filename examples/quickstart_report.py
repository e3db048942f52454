#!/usr/bin/env python3
"""Shows the quickstart: progress while a run goes on, and at the end a table and pictures.

quickstart_report.py follow LOG PID     print the iterations that LOG names until PID ends
quickstart_report.py report FOLDER GIB  compare the runs that quickstart.sh left in FOLDER,
                                        planned within GIB per stage
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from quickstart_curve import draw_curves

from megatron_epp.ir import COMPUTE, Step, Timed, parse_records
from megatron_epp.show.png import to_png
from megatron_epp.show.svg import to_svg
from megatron_epp.show.table import text_table

ITERATION = re.compile(
    r"iteration +(\d+)/ +(\d+) .*?elapsed time per iteration \(ms\): ([0-9.]+).*?"
    r"lm loss: ([0-9.E+-]+)"
)
MIB = 2**20


# ------------------------------------------------------------------ progress


def follow(log: Path, pid: int) -> None:
    """One line per iteration as it appears; a dot now and then before the first."""
    seen, began = 0, time.monotonic()
    print("starting ", end="", flush=True)
    quiet = True
    while True:
        alive = _alive(pid)
        found = list(iterations(log.read_text(errors="replace")))
        for number, total, milliseconds, loss in found[seen:]:
            if quiet:
                print()
                quiet = False
            bar = "#" * round(30 * number / total)
            print(
                f"  {number:4d}/{total} [{bar:<30}] loss {loss:7.4f}   {milliseconds / 1e3:6.2f} s",
                flush=True,
            )
        seen = len(found)
        if not alive:
            print(f"{'' if quiet else '  '}done in {time.monotonic() - began:.0f} s", flush=True)
            return
        if quiet:
            print(".", end="", flush=True)
        time.sleep(1)


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return not Path("/proc/self/stat").exists()


def iterations(text: str) -> Iterator[tuple[int, int, float, float]]:
    """(iteration, of how many, milliseconds, loss) of every iteration in Megatron's log, which says
    of the second the mean of the first two: its timer goes on behind the first (training_log,
    is_first_iteration)."""
    first = 0.0
    for at, match in enumerate(ITERATION.finditer(text)):
        said = float(match[3])
        first = said if at == 0 else first
        yield int(match[1]), int(match[2]), 2 * said - first if at == 1 else said, float(match[4])


# ------------------------------------------------------------------ what a run was


@dataclass(frozen=True, slots=True)
class Run:
    """Per iteration. Seconds are the schedule's, from the first op of any stage to the last: no
    planning, no optimizer. The bubble is the share of stages x seconds in which none computes."""

    name: str
    context: int
    losses: list[float]
    seconds: list[float]
    tokens: list[int]
    bubbles: list[float]
    peaks: list[tuple[int, ...]]
    chunks: list[int]
    predicted: list[float]  # seconds; empty where nothing was planned
    plan: str

    def only(self, iterations: Sequence[int]) -> "Run":
        """Those iterations of it, counted from 0."""
        lists = ("losses", "seconds", "tokens", "bubbles", "peaks", "chunks", "predicted")
        kept = {x: getattr(self, x) for x in lists}
        return replace(self, **{x: [v[i] for i in iterations] for x, v in kept.items() if v})

    def warm(self) -> "Run":
        return self.only(range(1, len(self.seconds)))

    @property
    def rates(self) -> list[float]:
        """Tokens per second."""
        return [t / s for t, s in zip(self.tokens, self.seconds, strict=True)]

    @property
    def worst_peaks(self) -> list[int]:
        """Bytes by stage."""
        return [max(stage) for stage in zip(*self.peaks, strict=True)]

    def row(self, ratio: float, predicted: str) -> list[str]:
        return [
            self.name,
            f"{self.context}",
            f"{statistics.median(self.rates):.0f}",
            f"{ratio:.2f}",
            predicted,
            f"{statistics.median(self.bubbles):.1%}",
            "0.0%",
            " / ".join(f"{peak / MIB:.0f}" for peak in self.worst_peaks),
            f"{statistics.median(self.chunks):.0f}",
            self.plan,
        ]


def elastic(folder: Path, name: str, title: str, context: int, plan: str) -> Run:
    """A run with --epp --epp-record."""
    logged = list(iterations((folder / f"{name}.log").read_text(errors="replace")))
    steps, records = [], []
    for number, *_ in logged:
        stem = folder / name / f"iteration-{number:06d}"
        steps.append(Step.parse(Path(f"{stem}.step").read_text()))
        records.append(parse_records(Path(f"{stem}.replica-0.timed").read_text()))
    return Run(
        name=title,
        context=context,
        losses=[loss for *_, loss in logged],
        seconds=[span(timed) for timed in records],
        tokens=[sum(step.lengths) for step in steps],
        bubbles=[bubble(timed) for timed in records],
        peaks=[peaks(timed) for timed in records],
        chunks=[sum(len(plan.chunks) for plan in step.plans) for step in steps],
        predicted=[max(plan.predicted.seconds for plan in step.plans) for step in steps],
        plan=plan,
    )


def bubble(records: tuple[Timed, ...]) -> float:
    stages = {record.stage for record in records}
    busy = sum(r.seconds for r in records if r.op.kind in COMPUTE)
    return 1 - busy / (len(stages) * span(records))


def span(records: tuple[Timed, ...]) -> float:
    return max(r.stop for r in records) - min(r.start for r in records)


def peaks(records: tuple[Timed, ...]) -> tuple[int, ...]:
    stages = sorted({record.stage for record in records})
    return tuple(max(r.peak_bytes for r in records if r.stage == stage) for stage in stages)


def stock(folder: Path, context: int, batch: int) -> Run:
    """Megatron's own run, as scripts/bench/stock.py watched it."""
    text = (folder / "stock.log").read_text(errors="replace")
    logged = list(iterations(text))
    told: dict[int, dict[int, dict]] = {}
    for line in re.findall(r"stock (\{.*?\})", text):
        entry = json.loads(line)
        told.setdefault(entry["iteration"], {})[entry["stage"]] = entry
    seconds, bubbles, most = [], [], []
    for number, *_ in logged:
        stages = [told[number][stage] for stage in sorted(told[number])]
        seconds.append(max(stage["seconds"] for stage in stages))
        bubbles.append(1 - sum(stage["busy"] for stage in stages) / (len(stages) * seconds[-1]))
        most.append(tuple(stage["peak_bytes"] for stage in stages))
    return Run(
        name="Megatron's own schedule",
        context=context,
        losses=[loss for *_, loss in logged],
        seconds=seconds,
        tokens=[context * batch] * len(logged),
        bubbles=bubbles,
        peaks=most,
        chunks=[batch] * len(logged),
        predicted=[],
        plan="1F1B, fixed length",
    )


# ------------------------------------------------------------------ the report


def argument_of(folder: Path, name: str, argument: str) -> int:
    """A number that Megatron's log of the run gives among its arguments."""
    text = (folder / f"{name}.log").read_text()
    match = re.search(rf"^ +{argument} \.+ (\d+)$", text, re.M)
    assert match is not None, f"{name}.log does not name its {argument}"
    return int(match[1])


def host() -> str:
    """The host that this ran on."""
    try:
        models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        models = []
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def report(folder: Path, budget: str) -> None:
    main = argument_of(folder, "epp", "seq_length")
    short = argument_of(folder, "stock", "seq_length")
    batch = argument_of(folder, "stock", "global_batch_size")
    trained = elastic(folder, "epp", "elastic pipeline", main, "planner epp")
    # Iteration 1 warms up; then every batch comes four times (quickstart_turns.py).
    turns = elastic(folder, "turns", "packing to the context", main, "planner packing")
    packed, best, same, less = (turns.only(range(i, len(turns.seconds), 4)) for i in range(1, 5))
    best = replace(best, name="packing at best", plan="planner packing-best")
    same = replace(same, name="elastic, same memory", plan="planner epp")
    less = replace(less, name="elastic, less memory", plan="planner epp")
    ours_short = elastic(folder, "epp-short", "elastic pipeline", short, "planner epp").warm()
    theirs = stock(folder, short, batch).warm()
    _first_plan(folder, budget)
    print("\nlosses, elastic pipelines:")
    shown = sorted({*range(0, len(trained.losses), 3), len(trained.losses) - 1})
    print("  " + "  ".join(f"{n + 1}: {trained.losses[n]:.3f}" for n in shown))
    print(f"  fell from {trained.losses[0]:.3f} to {trained.losses[-1]:.3f}\n")
    headers = ["run", "context", "tokens/s", "ratio", "predicted", "bubble", "padding"]
    headers += ["peak MiB by stage", "chunks", "how"]
    rows = []
    for run in (same, less, best, packed):
        measured, predicted = times_faster(run, best)
        rows.append(run.row(measured, f"{predicted:.2f}"))
    beside = statistics.median(ours_short.rates) / statistics.median(theirs.rates)
    rows += [ours_short.row(beside, "-"), theirs.row(1.0, "-")]
    print(text_table(headers, rows))
    print(_DIFFERENCES)
    print(f"\nran on: {host()}; two processes of one thread, gloo, float32; no GPU was used\n")
    for run in (same, less):
        measured, predicted = times_faster(run, best)
        share = max(a / b for a, b in zip(run.worst_peaks, packed.worst_peaks, strict=True))
        print(
            f"{run.name}: {measured:.2f} times as fast as packing at best (predicted "
            f"{predicted:.2f}; {times_faster(run, packed)[0]:.2f} times as fast as packing to the "
            f"context) in {share:.0%} of the activation memory of packing to the context"
        )
    _pictures(folder, trained, budget)


def times_faster(run: Run, than: Run) -> tuple[float, float]:
    """(measured, predicted): medians over batches that both ran."""
    measured = statistics.median(b / a for a, b in zip(run.seconds, than.seconds, strict=True))
    both = zip(run.predicted, than.predicted, strict=True)
    return measured, statistics.median(b / a for a, b in both)


_DIFFERENCES = """\
tokens/s    medians over iterations after the first, schedules alone (no planning, no optimizer);
            tokens of documents, no padding counted
ratio       speed relative to packing at best (first four lines, on the same batches), or to
            Megatron's own schedule (short context, another run on the same corpus)
predicted   the ratio that the cost model predicted before the run
peak        bytes saved by autograd and K/V buffers, worst iteration; no weights, no optimizer
Differences: elastic plans and packing use the same executor, kernels and documents, and tokens
attend only to their own document. Packing fills micro-batches up to the context and recomputes
nothing. Its memory is the budget of the first line; two fifths of it are the budget of the second.
Packing at best uses the fastest length for each batch, between the longest document and the
context. Few micro-batches (chunks, above) on two stages resemble a large job on many stages; with
many micro-batches, packing idles less and elastic plans gain less. Megatron concatenates documents,
cuts at the context, and lets tokens attend to other documents of a sample, so its losses are not
comparable. All its samples have full length. On a CPU, its attention is unfused and stores a matrix
of context x context for every head; on a GPU it does not.
Two processes run on two cores; the planner process and the trainer share these cores."""


def _first_plan(folder: Path, budget: str) -> None:
    first = folder / "epp" / "iteration-000002.step"
    print("the plan of iteration 2, as predicted (time runs to the right, a row per stage):\n")
    _draw(first.resolve(), folder.resolve(), budget, [])


def _draw(step: Path, folder: Path, budget: str, extra: list[str]) -> None:
    command = [sys.executable, "-m", "megatron_epp", "draw", str(step)]
    command += ["--cost-model", str(folder / "cost-model.json")]
    command += ["--memory-budget-gib", budget, *extra]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])


def _pictures(folder: Path, trained: Run, budget: str) -> None:
    curves = draw_curves([("elastic pipeline", trained.losses)], "quickstart: training loss")
    (folder / "loss.svg").write_text(to_svg(curves))
    (folder / "loss.png").write_bytes(to_png(curves))
    step = (folder / "epp" / "iteration-000002.step").resolve()
    records = str(step).replace(".step", ".replica-0.timed")
    for kind in ("svg", "png", "html"):
        picture = (folder / f"timeline.{kind}").resolve()
        drawn = ["--records", records, "-o", str(picture)]
        _draw(step, folder.resolve(), budget, drawn)
    print(f"\npictures: {folder}/timeline.svg (.png, .html): predicted above measured;")
    print(f"          {folder}/loss.svg (.png)")


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "follow":
        follow(Path(sys.argv[2]), int(sys.argv[3]))
    elif len(sys.argv) == 4 and sys.argv[1] == "report":
        report(Path(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(f"{__doc__}")
