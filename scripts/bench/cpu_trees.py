#!/usr/bin/env python3
"""Shared prefixes of samples on this host's CPU: Megatron's schedule, slices, and slices of trees.

    scripts/bench/cpu.py --case trees [--pp 2] [--groups 3] [--question 1024] [--answers 8]
        [--turns 8] [--scale 4] [--repeats 2] [-o RESULT.md]

The loop and the model are those of cpu_loops.py, the samples those of trees.py. Answers and turns
are ``scale`` times shorter, but the question of a group is not. One run executes three variants in
turn, on the same samples and weights:

    stock    Megatron's 1F1B; a micro-batch is one sample
    slices   megatron_epp.attach; a micro-batch is a group of concatenated samples
    trees    the same with share_from=64: shared prefixes are computed once

The bound is the time of the busiest stage if every distinct token is computed once, without waits
and other costs. It uses the seconds per token and per query-key pair of stock's forwards and
backwards. Predicted are the seconds of trees' plan, from the rates that earlier calls measured; the
next columns are medians of measured / predicted, call by call, of trees and of slices: what both
share is the host's. Seconds are those of whole calls on the slowest rank, including planning: the
median of the repeats. Peaks are the bytes that autograd saves plus cached K and V, the maximum over
stages. Every call must have stock's loss and gradients.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import cpu_loops
import numpy as np
from headline import heading, host, write
from pipeline_ranks import join_pipeline
from trees import Group, answers_to, trajectory

VARIANTS = ("stock", "slices", "trees")
SHARE_FROM = 64
WARM_UP = 3  # calls of one group: the first is not measured, by the second the third is planned
HEAD = ("calls of", "tokens", "once", "stock", "slices", "trees", "predicted",
        "trees / predicted", "slices / theirs", "bound", "bound / trees",
        "gain of trees", "that the bound allows", "peak MiB: stock", "slices", "trees")  # fmt: skip


def shrunk(group: Group, scale: int, first: int | None = None) -> Group:
    """Return ``group`` with parts ``scale`` times shorter, and a first part of ``first`` tokens."""
    lengths = [max(1, length // scale) for length in group.lengths]
    return Group((first or lengths[0], *lengths[1:]), group.parents, group.samples)


def samples_of(group: Group, random: Random) -> list[list[int]]:
    """Return random tokens of every sample, followed by one token that is only a label."""
    parts = [[random.randrange(cpu_loops.WORDS) for _ in range(n)] for n in group.lengths]
    made = []
    for part in group.samples:
        words: list[int] = []
        while part >= 0:
            words = parts[part] + words
            part = group.parents[part]
        made.append([*words, 0])
    return made


def in_a_row(samples: Sequence[Sequence[int]]) -> dict:
    """Return a micro-batch of concatenated documents and their boundaries."""
    import torch

    boundaries = np.cumsum([0, *(len(sample) - 1 for sample in samples)])
    return {
        "tokens": torch.tensor([[word for sample in samples for word in sample[:-1]]]),
        "labels": torch.tensor([[word for sample in samples for word in sample[1:]]]),
        "cu_seqlens": torch.from_numpy(boundaries),
    }


def tokens_and_pairs(group: Group) -> np.ndarray:
    """Return the tokens and query-key pairs of ``group``, with every part counted once: [2]."""
    ends, found = [], np.zeros(2)
    for length, parent in zip(group.lengths, group.parents, strict=True):
        begin = ends[parent] if parent >= 0 else 0
        ends.append(begin + length)
        found += length, length * (length + 1) / 2 + begin * length
    return found


def bound_seconds(
    ops: Sequence[tuple[str, int, float]], lengths: Sequence[int], once: np.ndarray
) -> float:
    """Return the seconds that one stage needs for ``once`` = [tokens, pairs].

    The seconds per token and pair are fitted to the stage's ``ops`` on micro-batches of ``lengths``
    tokens.
    """
    sizes = np.array([(n, n * (n + 1) / 2) for n in lengths])
    total = 0.0
    for kind in "FB":
        taken = np.array([(number, seconds) for which, number, seconds in ops if which == kind])
        at = sizes[taken[:, 0].astype(int)]
        scale = at.max(0)
        columns = np.column_stack((at / scale, np.ones(len(at))))
        fit, _, rank, _ = np.linalg.lstsq(columns, taken[:, 1], rcond=None)
        per = fit[:2] / scale
        if rank < 3 or per.min() < 0:  # samples of one length do not tell the two apart
            per = np.array([taken[:, 1].sum() / at[:, 0].sum(), 0.0])
        total += float(per @ once)
    return total


# ------------------------------------------------------------------ inside the processes


def work(rank: int, cases: list, chosen: Any, folder: str) -> None:
    """Run one stage of all cases and variants."""
    join_pipeline(rank, chosen.pp, folder)
    import torch.distributed as dist

    from megatron_epp.mcore.loops.adapters.packed import PackedDocuments

    longest = max(max(group.whole) for _, groups in cases for group in groups)
    adapters = dict.fromkeys(("slices", "trees"), PackedDocuments(cpu_loops.token_loss))
    calls = cpu_loops.Calls(rank, chosen.pp, longest, adapters)
    calls.model.config.calculate_per_token_loss = True  # whatever a micro-batch is
    results = []
    for number, (name, groups) in enumerate(cases):
        drawn = [samples_of(group, Random(f"{number} {n}")) for n, group in enumerate(groups)]
        for turn in range(chosen.repeats + WARM_UP):
            warms, expected = turn < WARM_UP, None
            given = drawn[:1] if warms else drawn
            for variant in VARIANTS:
                apart = [in_a_row([sample]) for group in given for sample in group]
                batches = apart if variant == "stock" else [in_a_row(group) for group in given]
                calls.sliced.share_from = SHARE_FROM * (variant == "trees")
                run = calls.run(variant, batches)
                expected = expected or run.outcome
                cpu_loops.require_outcome(run.outcome, expected, f"{name}, {variant}")
                if not warms:
                    plan = calls.ran[-1].plan if calls.ran else None
                    told = {"seconds": run.seconds, "peak": run.peak, "ops": run.ops,
                            "predicted": plan.predicted.seconds if plan else None}  # fmt: skip
                    results.append({"case": name, "variant": variant, **told})
                if rank == 0:
                    said = "warming up" if warms else f"turn {turn - WARM_UP + 1}"
                    print(f"  {name}, {said}: {variant} {run.seconds:.2f} s",
                          file=sys.stderr, flush=True)  # fmt: skip
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.barrier()


# ------------------------------------------------------------------ the table


def row(name: str, groups: Sequence[Group], results: Sequence[dict]) -> list[str]:
    of = {v: [r for r in results if r["variant"] == v] for v in VARIANTS}
    seconds = {v: statistics.median(r["seconds"] for r in of[v]) for v in VARIANTS}
    lengths = [length for group in groups for length in group.whole]
    once = sum(map(tokens_and_pairs, groups))
    stages = range(len(of["stock"][0]["ops"]))
    ops = [[op for r in of["stock"] for op in r["ops"][stage]] for stage in stages]
    bound = max(bound_seconds(each, lengths, once) for each in ops)
    return [
        name,
        str(sum(lengths)),
        f"{once[0]:.0f}",
        *(f"{seconds[v]:.2f} s" for v in VARIANTS),
        f"{statistics.median(r['predicted'] for r in of['trees']):.2f} s",
        *(
            f"{statistics.median(r['seconds'] / r['predicted'] for r in of[v]):.2f}"
            for v in ("trees", "slices")
        ),
        f"{bound:.2f} s",
        f"{bound / seconds['trees']:.2f}",
        f"{seconds['slices'] / seconds['trees']:.2f}",
        f"{seconds['slices'] / bound:.2f}",
        *(f"{max(r['peak'] for r in of[v]) / 2**20:.0f}" for v in VARIANTS),
    ]


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default, what in (
        ("pp", 2, "pipeline stages"),
        ("groups", 3, "of a call"),
        ("question", 1024, "tokens that a group's samples share"),
        ("answers", 8, "of a group"),
        ("turns", 8, "of a trajectory"),
        ("scale", 4, "answers and turns are so many times shorter"),
        ("repeats", 2, "measured calls of each"),
        ("seed", 1, "of lengths"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("-o", "--output", metavar="FILE", help="append the table as markdown")
    chosen = parser.parse_args()
    sizes = chosen.groups, chosen.question, chosen.answers, chosen.turns, chosen.scale
    if min(*sizes, chosen.repeats) < 1 or chosen.pp < 2 or cpu_loops.LAYERS % chosen.pp:
        parser.error(f"expected sizes of at least 1, and --pp of 2 or more that divides "
                     f"{cpu_loops.LAYERS}")  # fmt: skip
    random = Random(chosen.seed)
    cases = [
        (f"{chosen.question} tokens and {chosen.answers} answers",
         [shrunk(answers_to(1, chosen.answers, random), chosen.scale, chosen.question)
          for _ in range(chosen.groups)]),
        (f"trajectories of {chosen.turns} turns",
         [shrunk(trajectory(chosen.turns, random), chosen.scale) for _ in range(chosen.groups)]),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (cases, chosen, folder), nprocs=chosen.pp)
        results = json.loads((Path(folder) / "results.json").read_text())
    expected = len(cases) * len(VARIANTS) * chosen.repeats
    assert len(results) == expected, f"{len(results)} of {expected} results were seen"
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    for name, groups in cases:
        cells = row(name, groups, [result for result in results if result["case"] == name])
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n\n"
    print(text)
    write(chosen.output, heading(host()) + text)
