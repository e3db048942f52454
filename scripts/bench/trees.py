"""Shared prefixes of samples, computed once: Megatron's schedule, slices, and slices of trees.

    python scripts/bench/trees.py [--model llama3-8b] [--stages 4] [--tp 8] [--groups 8]
                                  [--prefixes 1 4 16] [--answers 8 16] [--turns 12] [--tokens 32]
                                  [--seed 1] [-o RESULT.md]
    python scripts/bench/trees.py --planned 1 2 3 --groups 24 --prefixes 16 --answers 16

All numbers are simulated with the cost model of megatron_epp.cost, from the model's shape and
assumed rates of an H100; nothing ran on a GPU. The planner for external loops plans each call with
the rates of this model; the simulator includes all costs and messages.

    group        one question of ``prefixes`` K tokens and ``answers`` of 100 to 4000 tokens
    trajectory   turns of an agent: each continues the earlier conversation without its thoughts

Without trees, a micro-batch has at most ``tokens`` K tokens, or one sample. With trees, it is a
group. The bound is the time of the busiest stage if every distinct token is computed once, without
waits and without costs other than those of tokens and pairs. ``split``: two replicas each run half
of every group's answers and both compute the question. The column has the seconds of the first
replica, as a fraction of those of a replica that runs every second group completely.

``--planned``: planner epp plans one iteration of a replica for each seed, with and without shared
prefixes, as ``compare`` does, within the memory budget of the device: placement, layers and
vocabulary parallelism are chosen for each of the two. The gain is the seconds without over the
seconds with them; with the bound in place of the latter, it is what the bound allows.
``--as-trained``: with the commands' assumptions of costs, and chunks padded as in training.
"""

import argparse
import io
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from headline import ROOT, publish

sys.path.insert(0, str(ROOT))

from megatron_epp.cli.machine import AS_TRAINED
from megatron_epp.cli.outcome import outcome
from megatron_epp.corpus.shared_prefixes import PrefixForest, SharedSpan
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.cost.catalogue.models import model
from megatron_epp.cost.cost import Cost
from megatron_epp.ir import OF_HEAD, OF_LAYERS, Kind, Plan
from megatron_epp.planner.calls.call_cost import CallDocuments
from megatron_epp.planner.calls.call_options import CallOptions
from megatron_epp.planner.calls.call_plan import call_plans
from megatron_epp.planner.choose.choice import PLACEMENT_NAMES, padded_words, run_choice
from megatron_epp.planner.options import Options
from megatron_epp.planner.padding import gpu_row_multiple
from megatron_epp.sim.play import play

K = 1024
DEVICE = "h100-80g"
STOCK = CallOptions(reorder=False, split=False)
HEAD = ("calls of", "tokens", "once", "stock", "slices", "trees", "bound", "trees / bound",
        "gain of trees", "that the bound allows", "peak: stock", "slices", "trees",
        "split")  # fmt: skip

PLANNED = ("batch", "seed", "without sharing, s", "with sharing, s", "gain", "bound", "stages")


@dataclass(frozen=True)
class Group:
    """Samples with shared prefixes, as a tree of parts that are computed once.

    ``lengths`` are the tokens of the parts, ``parents`` the parts that they continue;
    ``samples[s]`` is the last part of sample s.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    samples: tuple[int, ...]

    @property
    def whole(self) -> list[int]:
        """Number of tokens of every sample."""
        ends: list[int] = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            ends.append(length + (ends[parent] if parent >= 0 else 0))
        return [ends[part] for part in self.samples]

    @property
    def forest(self) -> PrefixForest:
        """The parts as the planner takes them."""
        reader: dict[int, int] = {}  # a sample of each part
        for sample, part in enumerate(self.samples):
            while part >= 0:
                reader.setdefault(part, sample)
                part = self.parents[part]
        nodes: list[SharedSpan] = []
        for part, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            begin = nodes[parent].stop if parent >= 0 else 0
            nodes.append(SharedSpan(reader[part], begin, begin + length, parent))
        return PrefixForest(tuple(nodes), self.samples)


def answers_to(question: int, answers: int, random: Random) -> Group:
    lengths = [min(4000, max(100, round(random.lognormvariate(6.7, 0.8)))) for _ in range(answers)]
    return Group((question, *lengths), (-1, *[0] * answers), tuple(range(1, answers + 1)))


def trajectory(turns: int, random: Random) -> Group:
    lengths, parents, samples, trunk = [random.randint(2000, 4000)], [-1], [], 0
    for _ in range(turns):
        lengths.append(random.randint(200, 2000))  # thoughts, and what is said
        parents.append(trunk)
        samples.append(len(lengths) - 1)
        lengths.append(random.randint(100, 3000))  # what is said, and what came of it
        parents.append(trunk)
        trunk = len(lengths) - 1
    return Group(tuple(lengths[:-1]), tuple(parents[:-1]), tuple(samples))


def packed(groups: Sequence[Group], most: int) -> list[tuple[int, ...]]:
    """Return micro-batches of consecutive samples: at most ``most`` tokens, or one sample."""
    batches: list[list[int]] = []
    for group in groups:
        for length in group.whole:
            if not batches or sum(batches[-1]) + length > most:
                batches.append([])
            batches[-1].append(length)
    return [tuple(batch) for batch in batches]


def halves(group: Group) -> Group:
    """Return the group of a question with every second one of its answers."""
    kept = group.lengths[1::2]
    count = len(kept)
    return Group((group.lengths[0], *kept), (-1, *[0] * count), tuple(range(1, count + 1)))


def seconds_and_peak(plan: Plan, cost: Cost) -> tuple[float, float]:
    played = play(plan, cost.table(plan))
    return played.seconds, max(played.peak_bytes) / GIB


def rates_of(cost: Cost) -> np.ndarray:
    """Return the rates that a loop's stages would have measured: [stages, kinds, 3]."""
    return np.stack([cost.seconds.per(kind)[:, :3] for kind in OF_LAYERS], axis=1)


def bound_seconds(groups: Sequence[Group], cost: Cost) -> float:
    tokens = pairs = 0.0
    for group in groups:
        ends: list[int] = []
        for length, parent in zip(group.lengths, group.parents, strict=True):
            begin = ends[parent] if parent >= 0 else 0
            ends.append(begin + length)
            tokens += length
            pairs += length * (length + 1) / 2 + begin * length
    per = sum(cost.seconds.per(kind) for kind in (Kind.FORWARD, Kind.BACKWARD, *OF_HEAD))
    of_stages = per[:, :2] @ np.array([tokens, pairs])
    return max(cost.layout.placement.of_ranks(of_stages.tolist()))


def with_trees(groups: Sequence[Group], cost: Cost) -> Plan:
    layers, rates = cost.layout.layers, rates_of(cost)
    lengths = [group.lengths for group in groups]
    parents = [group.parents for group in groups]
    call = CallDocuments(lengths, parents)
    return call_plans([call], layers, rates, CallOptions(), False)[0]


def row(name: str, groups: Sequence[Group], cost: Cost, most: int, splits: bool) -> list[str]:
    layers, rates = cost.layout.layers, rates_of(cost)
    samples = packed(groups, most)
    stock, slices = (
        seconds_and_peak(
            call_plans([CallDocuments(samples)], layers, rates, options, False)[0], cost
        )
        for options in (STOCK, CallOptions())
    )
    trees = seconds_and_peak(with_trees(groups, cost), cost)
    bound = bound_seconds(groups, cost)
    split = "-"
    if splits and len(groups) > 1:
        whole, _ = seconds_and_peak(with_trees(groups[::2], cost), cost)
        half, _ = seconds_and_peak(with_trees([halves(group) for group in groups], cost), cost)
        split = f"{half / whole:.2f}"
    once = sum(sum(group.lengths) for group in groups)
    return [
        name,
        f"{sum(map(sum, samples)) / K:.0f}K",
        f"{once / K:.0f}K",
        *(f"{seconds:.2f} s" for seconds, _ in (stock, slices, trees)),
        f"{bound:.2f} s",
        f"{bound / trees[0]:.2f}",
        f"{slices[0] / trees[0]:.2f}",
        f"{slices[0] / bound:.2f}",
        *(f"{peak:.1f} GiB" for _, peak in (stock, slices, trees)),
        split,
    ]


def planned(
    name: str, by_seed: dict[int, list[Group]], cost: Cost, words: int, pads: bool
) -> list[list[str]]:
    """Return a line for each seed, and one of medians: name, seed, seconds, gains, stages."""
    rows, ways = [], []
    for seed, groups in by_seed.items():
        forest = PrefixForest.joined(group.forest for group in groups)
        options, layout = Options(context=max(forest.lengths)), cost.layout
        ranks = layout.tp * layout.cp
        if pads:
            of_rank = gpu_row_multiple([forest.lengths], layout.placement.ranks, 1, ranks)
            cost = cost.replace(multiple=of_rank * ranks)
        how = {"placements": PLACEMENT_NAMES, "vocabularies": [False, True], "words": words}
        apart, shared = (
            run_choice(cost, [documents], options, "epp", **how)
            for documents in (forest.lengths, forest)
        )
        alone = outcome(0, forest.lengths, apart.cost, options, "epp", 1)
        once = outcome(0, forest, shared.cost, options, "epp", 1)
        assert alone.fits and once.fits, "both plans fit the memory budget"
        bound = bound_seconds(groups, shared.cost)
        gains = [alone.seconds / each for each in (once.seconds, bound)]
        rows.append([seed, alone.seconds, once.seconds, *gains])
        ways.append(f"{apart.way} / {shared.way}")
    medians = ["median", *map(statistics.median, list(zip(*rows, strict=True))[1:])]
    return [[name, str(first), *(f"{each:.2f}" for each in rest), way]
            for (first, *rest), way in zip([*rows, medians], [*ways, ""], strict=True)]  # fmt: skip


def kinds_of(args: argparse.Namespace, seed: int) -> list[tuple[str, list[Group], bool]]:
    """Return the name of each kind of groups, the groups, and whether to try them split."""
    random = Random(seed)
    kinds = [
        (f"{question}K and {answers} answers",
         [answers_to(question * K, answers, random) for _ in range(args.groups)], True)
        for question in args.prefixes
        for answers in args.answers
    ]  # fmt: skip
    turns = [trajectory(args.turns, random) for _ in range(args.groups)]
    return [*kinds, (f"trajectories of {args.turns} turns", turns, False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--ep", type=int)
    parser.add_argument("--groups", type=int, default=8, help="of a replica's call")
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1, 4, 16], metavar="K")
    parser.add_argument("--answers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32, metavar="K", help="of a micro-batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--planned", type=int, nargs="+", metavar="SEED", help="see above")
    parser.add_argument("--as-trained", action="store_true", help="see above")
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    args = parser.parse_args()
    sizes = {"tp": args.tp, "cp": args.cp, "ep": args.ep}
    assumed = AS_TRAINED if args.as_trained else {}
    cost = named_cost(args.model, DEVICE, pp=args.stages, **sizes, **assumed)
    layout = " ".join(f"{name} {size}" for name, size in sizes.items() if (size or 1) > 1)
    head = PLANNED if args.planned else HEAD
    text = io.StringIO()
    costs = ", costs as trained" * args.as_trained
    print(f"### {args.model}, pp {args.stages} {layout}, {args.groups} groups a call and "
          f"replica, {DEVICE}{costs}; all simulated\n", file=text)  # fmt: skip
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", file=text)
    if args.planned:
        words = padded_words(model(args.model).vocabulary, args.tp)
        for of_seeds in zip(*(kinds_of(args, seed) for seed in args.planned), strict=True):
            by_seed = {seed: each[1] for seed, each in zip(args.planned, of_seeds, strict=True)}
            for line in planned(of_seeds[0][0], by_seed, cost, words, args.as_trained):
                print(f"| {' | '.join(line)} |", file=text)
        publish(f"{text.getvalue()}\n", args.output)
        return
    cost = cost.replace(device_budget_bytes=(float("inf"),) * args.stages)
    kinds = kinds_of(args, args.seed)
    for name, groups, splits in kinds:
        print(name, file=sys.stderr, flush=True)
        line = row(name, groups, cost, args.tokens * K, splits)
        print(f"| {' | '.join(line)} |", file=text)
    print(file=text)
    publish(text.getvalue(), args.output)


if __name__ == "__main__":
    main()
