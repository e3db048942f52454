"""Several plans for every batch of one training job, in turn, and a comparison of their times.

The CPU benchmarks of training share this module. It runs the job under torchrun with steps from
other planners, and compares the entries that the job printed.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from headline import ROOT

sys.path.insert(0, str(ROOT))


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """How the plans of a variant are made.

    Attributes:
        planner: name of the planner; RANDOM for random valid plans.
        share_of_peak: memory budget as a fraction of packing's peak; None for no budget.
        split: whether the planner may split backwards.
        halves: IN_PLACE for I and W instead of each B of the plan, AT_END for all W at the end.
        offload: whether the planner offloads layers, assuming that copies take no time.
        modes: recompute modes of random plans.
    """

    planner: str
    share_of_peak: float | None
    split: bool = True
    halves: str = ""
    offload: bool = False
    modes: str = ""

    @property
    def name(self) -> str:
        said = (
            "" if self.split or self.halves else "no split",
            self.halves,
            "offload" if self.offload else "",
            self.modes,
        )
        return ", ".join([self.planner, *filter(None, said)])


RANDOM, IN_PLACE, AT_END = "random", "I W", "W at the end"


VARIANTS = (
    Variant("packing", None),
    Variant("packing-best", 1.0),
    Variant("epp", 1.0),
    Variant("packing-best", 0.6),
    Variant("epp", 0.6),
)
LINE = "in_turns: "
WORK = "--work"


# ------------------------------------------------------------------ inside torchrun


def work(
    variants: Sequence[Variant], warm_up: int, first: int, tell: Callable | None = None
) -> None:
    """Train; run every batch from number ``first`` on with each variant in turn.

    The first ``warm_up`` iterations warm up. ``tell`` returns the log entry of an iteration, like
    :func:`told`, which is the default.
    """
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    from megatron_epp.mcore.trainer import entry
    from megatron_epp.mcore.trainer.hooks import TrainerHooks

    def variant_of(iteration: int) -> int:
        """Return the variant's number; the warm-up, too, starts with the first variant."""
        at = iteration - 1
        return (at if at < warm_up else at - warm_up) % len(variants)

    entry.main(
        hybrid=any(word.startswith("--hybrid-layer-pattern") for word in sys.argv),
        hooks=TrainerHooks(
            make_steps=functools.partial(VariantSteps, lambda at: variants[variant_of(at)]),
            make_batches=repeated(len(variants), warm_up, first),
            summary=functools.partial(tell or told, variant_of),
        ),
    )


def repeated(times: int, warm_up: int, first: int) -> type:
    """Return a class of global batches from ``first`` on that yields each batch ``times`` times."""
    from megatron_epp.mcore.data.global_batches import GlobalBatches

    class Repeated(GlobalBatches):
        given = 0

        def __next__(self):
            size = self.size_after(0)
            self.consumed = (first + max(0, self.given - warm_up) // times) * size
            self.given += 1
            return self.peek()

    return Repeated


class VariantSteps:
    """Step source that plans on rank 0 for the iteration's variant, within the variant's budget.

    ``whole`` are the bytes that packing holds without recompute, and ``host`` the bytes that the
    latest plan holds in host memory, predicted, by stage.
    """

    whole: tuple[float, ...] = ()
    host: tuple[int, ...] = ()

    def __init__(self, variant_at, place, models):
        from megatron_epp.mcore.calibrate.profile_file import obtain
        from megatron_epp.mcore.job.job_cost import training_cost, training_levers
        from megatron_epp.planner.options import Options

        args, config = place.args, place.config
        self.variant_at, self.groups = variant_at, place.groups
        profile = obtain(args, config, models, place.groups, place.row_shard)
        cost = training_cost(args, config, place.layers, profile)
        self.cost = cost.replace(multiple=place.row_shard.multiple)
        self.options = Options(
            context=args.seq_length,
            levers=training_levers(config.epp_levers),
            effort=config.epp_effort,
        )

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool):
        from megatron_epp.control.step_source import SourcedStep
        from megatron_epp.cost.host_memory import host_peak_bytes
        from megatron_epp.ir import Step
        from megatron_epp.runtime.consensus import broadcast_result

        def plan() -> str:
            step = self._step(iteration, lengths)
            VariantSteps.host = host_peak_bytes(self.cost, step.plans[0])
            return str(step)

        text = broadcast_result(plan, self.groups.control)
        return SourcedStep(Step.parse(text), text)

    def _step(self, iteration: int, lengths: Sequence[int]):
        from megatron_epp.ir import Step
        from megatron_epp.planner.replicas import plan_step

        variant = self.variant_at(iteration)
        if variant.planner == RANDOM:
            plan = random_plan(lengths, self.cost, iteration, variant.modes)
            return Step((tuple(range(len(lengths))),), (plan,))
        levers = self.options.levers - (set() if variant.split else {"wsplit"})
        if variant.offload:
            levers |= {"offload"}
        options = dataclasses.replace(self.options, levers=levers)
        budget: tuple[float, ...] = (1e15,) * self.cost.layout.stages
        ample = self.cost.replace(device_budget_bytes=budget)
        if variant.share_of_peak is not None:
            whole = plan_step(lengths, ample, options, "packing").planned[0].peak_bytes
            VariantSteps.whole = tuple(float(peak) for peak in whole)
            budget = tuple(variant.share_of_peak * peak for peak in whole)
        within = self.cost.replace(device_budget_bytes=budget)
        if variant.offload:
            free = dataclasses.replace(self.cost.layout.profile, host_bytes_per_second=1e15)
            within = within.replace(profile=free)
        step = plan_step(lengths, within, options, variant.planner).step
        if variant.halves:
            plans = tuple(halved(plan, self.cost, variant.halves == AT_END) for plan in step.plans)
            step = dataclasses.replace(step, plans=plans)
        return step

    def look_ahead(self, iteration: int, following: Callable) -> None:
        """Do nothing: plans are made on demand, because this script does not time planning."""


def random_plan(lengths: Sequence[int], cost: Any, seed: int, modes: str) -> Any:
    """Return a random valid plan with recompute ``modes``: "" for all that layers can execute."""
    from megatron_epp.ir.random_plan import arbitrary_plan
    from megatron_epp.layers.recompute.wrap import EXECUTABLE

    layers, random = cost.layout.layers, Random(seed)
    plan = arbitrary_plan(lengths, layers, random, modes=modes or EXECUTABLE)
    return predicted(plan, cost, RANDOM)


def halved(plan: Any, cost: Any, at_end: bool) -> Any:
    """Return ``plan`` with I and W in place of every B."""
    from megatron_epp.ir import Kind, Op

    orders = []
    for order in plan.orders:
        ops: list[Any] = []
        late: list[Any] = []
        for op in order:
            if op.kind is not Kind.BACKWARD:
                ops.append(op)
                continue
            ops.append(Op(Kind.INPUT, op.chunk))
            (late if at_end else ops).append(Op(Kind.WEIGHT, op.chunk))
        orders.append((*ops, *late))
    return predicted(dataclasses.replace(plan, orders=tuple(orders)), cost, "halved")


def predicted(plan: Any, cost: Any, planner: str) -> Any:
    """Return ``plan`` with what the simulator predicts."""
    from megatron_epp.ir import Prediction
    from megatron_epp.sim.play import play

    played = play(plan, cost.table(plan))
    peaks = tuple(peak / 2**30 for peak in played.peak_bytes)
    return dataclasses.replace(plan, predicted=Prediction(played.seconds, peaks, planner))


def told(
    variant_of: Callable, iteration: int, step, report, planning_seconds: float, *others
) -> str:
    """Return the trainer's log entry of an iteration, as JSON."""
    from megatron_epp.ir import Kind

    plan = step.plans[0]
    recomputed = sum(choice.count("f") for stage in plan.recompute for choice in stage)
    weights = sum(op.kind is Kind.WEIGHT for order in plan.orders for op in order)
    # The executor's own time, neither computing nor waiting for a message: the worst stage's.
    own = max(s.stop - s.start - s.busy - s.waiting for s in report.ranks)
    entry = {
        "iteration": iteration,
        "variant": variant_of(iteration),
        "tokens": plan.tokens,
        "seconds": report.seconds,
        "bubble": report.bubble_ratio,
        "own": own / report.seconds,
        "peaks": list(report.peak_bytes),
        "predicted_peaks": [gib * 2**30 for gib in plan.predicted.peak_gib],
        "host": list(report.host_bytes),
        "predicted_host": list(VariantSteps.host),
        "whole": VariantSteps.whole,
        "chunks": len(plan.chunks),
        "recomputed": recomputed / (len(plan.chunks) * sum(plan.layers)),
        "split": weights / (len(plan.chunks) * plan.stages),
        "predicted": plan.predicted.seconds,
        "plan_seconds": planning_seconds,
    }
    return LINE + json.dumps(entry)


# ------------------------------------------------------------------ outside


def corpus_of(arguments: argparse.Namespace, folder: Path) -> Path:
    """Return the prefix of --data-path, or of a new corpus of Python's own source in ``folder``."""
    if arguments.data_path:
        return Path(arguments.data_path)
    prefix = folder / "stdlib"
    prepare = [sys.executable, str(ROOT / "scripts" / "prepare_corpus.py")]
    prepare += ["--standard-library", "--shuffle", "1", "--append-eod", "-o", str(prefix)]
    subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    return prefix


def python_path() -> str:
    """Return a PYTHONPATH with the caller's folders, followed by the project's."""
    return os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])


def torchrun(program: list[str], words: list[str], log: Path, processes: int = 2) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), *program, *words]
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"a run failed; its log is {log}\n{tail}")
    return log.read_text(errors="replace")


def entries_told(text: str, iterations: int) -> list[dict]:
    """Return the entries that the job printed, one per iteration."""
    entries = [json.loads(found) for found in re.findall(LINE + r"(\{.*?\})", text)]
    assert len(entries) == iterations, f"{len(entries)} of {iterations} iterations were told"
    return entries


class Turns:
    """Entries of every batch by variant, and medians of ratios between variants."""

    def __init__(self, variants: Sequence[Variant], entries: Sequence[dict]):
        self.variants = variants
        self._by_batch = [
            {entry["variant"]: entry for entry in entries[start : start + len(variants)]}
            for start in range(0, len(entries), len(variants))
        ]

    def of(self, number: int) -> list[dict]:
        """Return the entries of variant ``number``, one per batch."""
        return [batch[number] for batch in self._by_batch]

    def median(self, number: int, what: str) -> float:
        return statistics.median(entry[what] for entry in self.of(number))

    def ratios(self, number: int, what: str) -> list[float]:
        """Return ``what`` of the baseline divided by that of the variant, one per batch.

        The baseline is packing-best with the same memory budget, or the first variant.
        """
        baseline = Variant("packing-best", self.variants[number].share_of_peak or 1.0)
        at = self.variants.index(baseline) if baseline in self.variants else 0
        pairs = zip(self.of(at), self.of(number), strict=True)
        return [theirs[what] / mine[what] for theirs, mine in pairs]

    def ratio(self, number: int, what: str) -> float:
        """Return the median of :meth:`ratios`."""
        return statistics.median(self.ratios(number, what))

    def peak_share(self, number: int) -> float:
        """Return the largest ratio, over batches and stages, of the peak to that of packing."""
        measured = Variant("packing", None) in self.variants
        pairs = zip(self.of(number), self.of(0), strict=True)
        return max(
            held / whole
            for mine, first in pairs
            for held, whole in zip(
                mine["peaks"], first["peaks" if measured else "whole"], strict=True
            )
        )

    def seconds_off(self, number: int) -> float:
        """Return the median of predicted / measured seconds - 1."""
        return statistics.median(m["predicted"] / m["seconds"] - 1 for m in self.of(number))
