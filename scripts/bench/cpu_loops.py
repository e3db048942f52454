#!/usr/bin/env python3
"""External training loops on this host's CPU: Megatron's schedule, planned micro-batches, slices.

    scripts/bench/cpu.py --case loops [--cases sft agent 16384x8] [--pp 2 4] [--batches 3]
        [--repeats 2] [--variants whole slices] [--busy-host] [-o RESULT.md]

The loop uses megatron.core without Megatron's trainer: --pp stages (gloo), 8 layers, hidden 128, 4
heads in 2 groups. A micro-batch is one document [1, T]. One run executes the variants in rotating
order, on the same micro-batches, weights and kernels (torch's flash attention):

    stock    Megatron's forward_backward_pipelining_without_interleaving, shapes by handshake
    whole    megatron_epp.attach with slicing = False: planned order, split backward
    slices   megatron_epp.attach: documents in slices

    sft      24 documents, lengths log-normal around 300 tokens, at most 2048
    agent    8 documents around 400 tokens, and one of 3072
    16384x8  8 documents of the distribution wlb, cut at 16384 tokens; other CxN likewise

Ops are timed by the clock if every stage has its own core, otherwise in processor seconds of their
thread. *Replayed* is the time of the executed orders if every stage had its own core and messages
and planning took no time; the duration of an op is its median over the repeats of a batch.
*Measured* is the duration of the call on the slowest rank, including planning. The difference
between the replayed times of two halves of stock's repeats is the noise.

Ratios are the seconds of stock divided by those of the variant: medians over the batches (minimum
to maximum). The first calls warm up. Bubbles are the idle fraction of the stages. Peaks are the
bytes that autograd saves plus cached K and V: the maximum of all stages and calls, including the
warm-up, because a plan may use as much memory as stock used in an earlier call. Every call of the
same model must have the losses and gradients of stock. peers.py compares torch's schedules.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from headline import ROOT, heading, host, write
from pipeline_ranks import join_pipeline

sys.path.insert(0, str(ROOT))

from megatron_epp.corpus.lengths import open_corpus

STOCK, WHOLE, SLICES = "stock", "whole", "slices"
OURS = (WHOLE, SLICES)
CASES = ("sft", "agent")
WARM_UP = 3  # calls of each; ours plan from the third on, when the second has been measured
LAYERS, HIDDEN, WORDS = 8, 128, 2048
LONGEST = {"sft": 2048, "agent": 3072}
TOLERANCE = 1e-4  # of losses and gradients in float32, other kernels and orders


def lengths_of(case: str, batch: int) -> list[int]:
    """Return the lengths of the documents of a batch; each document is a micro-batch."""
    if case not in CASES:
        context, documents = map(int, case.split("x"))
        return list(open_corpus("wlb", context).batch(batch + WARM_UP, documents))
    chance = random.Random(f"{case} {batch}")
    if case == "sft":
        return [
            max(32, min(LONGEST[case], round(chance.lognormvariate(5.7, 0.8)))) for _ in range(24)
        ]
    few = [max(64, min(2048, round(chance.lognormvariate(6.0, 0.5)))) for _ in range(8)]
    few.insert(chance.randrange(9), LONGEST[case])
    return few


# ------------------------------------------------------------------ inside the processes


class Calls:
    """Calls of a loop on this rank, for one model: by Megatron and by this project.

    Args:
        rank: rank of this process, and its stage.
        stages: number of stages.
        longest: maximum number of tokens of a micro-batch.
        adapters: this project's variants, and the adapter of each; WHOLE does not slice.
        now: clock for the ops of Megatron's schedule.
    """

    def __init__(
        self,
        rank: int,
        stages: int,
        longest: int,
        adapters: Mapping[str, Any],
        now: Callable[[], float] = time.perf_counter,
    ):
        from megatron_epp.mcore.loops.attached import attach_to
        from megatron_epp.mcore.loops.install import Installation
        from megatron_epp.mcore.loops.loop_schedule import LoopSchedule
        from megatron_epp.mcore.loops.settings import Settings

        self.stages, self.adapters = stages, adapters
        self.model = build_model(stages, rank, longest)
        self.ran: list[Any] = []
        settings = Settings(observe=self.ran.append, make_meter=saved_bytes)
        self.stock = Installation(settings).schedule.stock
        # Each learns its own seconds.
        self.schedules = {variant: LoopSchedule(settings, self.stock) for variant in adapters}
        self.sliced = attach_to(self.model, adapters[SLICES], "auto", head_again=True)
        self.stock_ops = watch_stock(now)

    def run(self, variant: str, micro_batches: Sequence[dict]) -> "Run":
        """Run one call of ``variant`` on all ranks."""
        import torch.distributed as dist

        self.sliced.slicing = variant != WHOLE
        self.sliced.adapter = self.adapters.get(variant, self.sliced.adapter)
        self.model.zero_grad(set_to_none=True)
        self.stock_ops.clear()
        dist.barrier()
        began = time.perf_counter()
        losses, peak, ops, chunks, by = self._called(variant, micro_batches)
        seconds = time.perf_counter() - began
        squares = sum(float(p.grad.double().square().sum()) for p in self.model.parameters()
                      if p.grad is not None)  # fmt: skip
        loss = sum(float(item["lm loss"]) for item in losses)
        every: list[Any] = [None] * self.stages
        dist.all_gather_object(every, (seconds, peak, ops, loss, squares**0.5))
        return Run(
            seconds=max(one[0] for one in every),
            ops=[one[2] for one in every],
            chunks=chunks,
            by=by,
            peak=max(one[1] for one in every),
            outcome=[every[-1][3], *(one[4] for one in every)],
        )

    def _called(self, variant: str, micro_batches: Sequence[dict]) -> tuple:
        """Return the losses, peak bytes, ops, chunks as text, and planner of one call."""
        from megatron_epp.mcore.loops.loop_schedule import PIPELINE
        from megatron_epp.runtime.kv_store import Store

        arguments = {
            "forward_step_func": forward_step,
            "data_iterator": iter(micro_batches),
            "model": [self.model],
            "num_microbatches": len(micro_batches),
            "seq_length": 1,
            "micro_batch_size": 1,
        }
        if variant == STOCK:
            meter = saved_bytes(self.model)
            with meter.watch(Store({})):
                losses = self.stock[PIPELINE](**arguments)
            meter.op_peak()
            return losses, meter.peak_bytes, list(self.stock_ops), str(len(micro_batches)), STOCK
        losses = self.schedules[variant](PIPELINE, arguments)
        done = self.ran[-1]
        chunks = " ".join(map(str, done.plan.chunks))
        return losses, done.peak_bytes, ops_of(done), chunks, done.plan.predicted.planner


def require_outcome(found: Sequence[float], expected: Sequence[float], what: str) -> None:
    """Raise an AssertionError unless losses and gradients are equal within TOLERANCE."""
    far = max((abs(a / b - 1) for a, b in zip(found, expected, strict=True)), default=0.0)
    assert far < TOLERANCE, f"{what}: {found}; stock: {expected}"


def work(rank: int, case: str, chosen: Any, stages: int, shared: bool, folder: str) -> None:
    """Run one stage; with ``shared`` cores, time ops in processor seconds of the thread."""
    join_pipeline(rank, stages, folder)
    import torch.distributed as dist

    from megatron_epp.mcore.loops.adapters.packed import PackedDocuments
    from megatron_epp.runtime import clock

    now = time.thread_time if shared else time.perf_counter
    if shared:
        patch.object(clock, "time", SimpleNamespace(perf_counter=now)).start()
    longest = LONGEST[case] if case in CASES else int(case.split("x")[0])
    adapters = dict.fromkeys(OURS, PackedDocuments(token_loss))
    calls = Calls(rank, stages, longest, adapters, now)
    variants, results = (STOCK, *chosen.variants), []
    peaks = dict.fromkeys(variants, 0)
    for batch in range(-WARM_UP, chosen.batches):
        micro_batches = made_up(lengths_of(case, batch))
        runs: dict[str, list[Run]] = {variant: [] for variant in variants}
        for turn in range(len(variants) * (chosen.repeats if batch >= 0 else 1)):
            variant = variants[(batch + turn) % len(variants)]
            run = calls.run(variant, micro_batches)
            runs[variant].append(run)
            peaks[variant] = max(peaks[variant], run.peak)
            if rank == 0:
                said = f"batch {batch + 1} of {chosen.batches}" if batch >= 0 else "warming up"
                print(
                    f"  {case}, {stages} stages, {said}: {variant} ({run.by}) {run.seconds:.2f} s, "
                    f"{run.peak / 2**20:.0f} MiB, replayed {replay(run.ops):.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
        for variant in variants:
            found, expected = (runs[each][-1].outcome for each in (variant, STOCK))
            require_outcome(found, expected, f"{variant}, batch {batch}")
        if batch >= 0:
            results += [
                result(variant, runs[variant], stages, shared) | {"peak": peaks[variant]}
                for variant in variants
            ]
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.barrier()


@dataclass(frozen=True, slots=True)
class Run:
    """One call on all ranks.

    Attributes:
        seconds: seconds of the slowest rank.
        ops: (kind, chunk, seconds) of every op, by stage.
        chunks: the chunks as text; of schedules without slices, their number.
        by: planner, or schedule.
        peak: bytes that autograd saved on the fullest rank.
        outcome: sum of the losses, and norm of every stage's gradients.
    """

    seconds: float
    ops: list[list[tuple[str, int, float]]]
    chunks: str
    by: str
    peak: int
    outcome: list[float]

    def with_medians(self, runs: Sequence["Run"]) -> list[list[tuple[str, int, float]]]:
        """Return this call's ops with median seconds over ``runs`` that have equal chunks."""
        found: dict[tuple[int, str, int], list[float]] = {}
        for run in runs:
            if run.chunks == self.chunks:
                for stage, order in enumerate(run.ops):
                    for kind, chunk, seconds in order:
                        found.setdefault((stage, kind, chunk), []).append(seconds)
        return [
            [
                (kind, chunk, statistics.median(found.get((stage, kind, chunk), [seconds])))
                for kind, chunk, seconds in order
            ]
            for stage, order in enumerate(self.ops)
        ]


def result(variant: str, runs: Sequence[Run], stages: int, shared: bool) -> dict[str, Any]:
    """Return the results of one batch, for a row of the table."""
    settled = [run.with_medians(runs) for run in runs]
    replayed = statistics.median(map(replay, settled))
    seconds = statistics.median(run.seconds for run in runs)
    busy = sum(took for order in settled[-1] for _, _, took in order)
    halves = [replay(runs[-1].with_medians(half)) for half in (runs[::2], runs[1::2] or runs)]
    return {
        "variant": variant,
        "seconds": seconds,
        "replayed": replayed,
        "noise": halves[0] / halves[1],
        "bubble": 1 - busy / stages / (replayed if shared else seconds),
        "chunks": max(chunk + 1 for order in runs[-1].ops for _, chunk, _ in order),
    }


def replay(orders: list[list[tuple[str, int, float]]]) -> float:
    """Return the seconds of a call in which only ops take time, not messages or planning.

    Each op starts when its stage is free and the neighbour stage has computed its input.
    """
    last = len(orders) - 1
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(orders), [0] * len(orders)
    while any(at[s] < len(orders[s]) for s in range(len(orders))):
        before = list(at)
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, chunk, seconds = order[at[stage]]
                needs: float | None = 0.0
                if kind == "F" and stage > 0:
                    needs = done.get(("F", stage - 1, chunk))
                elif kind in "BI" and stage < last:
                    needs = done.get(("B", stage + 1, chunk))
                if needs is None:
                    break
                free[stage] = max(free[stage], needs) + seconds
                done["B" if kind == "I" else kind, stage, chunk] = free[stage]
                at[stage] += 1
        assert at != before, "the orders wait for each other"
    return max(free)


def build_model(
    stages: int,
    stage: int,
    context: int,
) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from torch.nn import functional

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        WORDS,
        context,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )

    def flash(*document: Any, **others: Any) -> Any:  # query, key, value [T, 1, heads, channels]
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in document[:3])
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    for layer in model.decoder.layers:  # Megatron's own for the CPU holds every score
        layer.self_attention.core_attention.forward = flash
    return model


def saved_bytes(model: Any) -> Any:
    """Return a meter of the bytes that autograd saves, except parameters."""
    from megatron_epp.runtime.memory_meter import SavedBytesMeter

    return SavedBytesMeter(model.parameters())


def ops_of(done: Any) -> list[tuple[str, int, float]]:
    """Return (kind, chunk, seconds) of the ops that computed in the call with record ``done``."""
    from megatron_epp.ir import COMPUTE

    return [
        (str(each.op.kind.value), each.op.chunk, each.seconds)
        for each in done.records
        if each.op.kind in COMPUTE
    ]


def watch_stock(now: Any) -> list[tuple[str, int, float]]:
    """Return a list that collects (kind, number, seconds) of the steps of Megatron's schedule."""
    from megatron.core.pipeline_parallel import schedules

    seen: list[tuple[str, int, float]] = []

    def timed(function: Any, kind: str) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            number, began = sum(one[0] == kind for one in seen), now()
            made = function(*args, **named)
            seen.append((kind, number, now() - began))
            return made

        return run

    for name, kind in (("forward_step", "F"), ("backward_step", "B")):
        patch.object(schedules, name, timed(getattr(schedules, name), kind)).start()
    return seen


def made_up(lengths: list[int]) -> list[dict]:
    import torch

    generator = torch.Generator().manual_seed(sum(lengths))
    made = []
    for length in lengths:
        tokens = torch.randint(WORDS, (1, length + 1), generator=generator)
        made.append(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "cu_seqlens": torch.tensor([0, length]),
            }
        )
    return made


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    output = outputs_of(model, batch, batch["labels"])
    return output, lambda losses: token_loss(batch, losses)


def outputs_of(model: Any, batch: dict, labels: Any) -> Any:
    import torch

    places = torch.arange(batch["tokens"].shape[1])[None]
    return model(batch["tokens"], places, None, labels=labels)


def token_loss(batch: dict, losses: Any, non_loss_data: bool = False) -> Any:
    import torch

    total = losses.sum()
    return total, torch.tensor(losses.numel(), dtype=torch.int), {"lm loss": total.detach()}


# ------------------------------------------------------------------ the table


def row(case: str, stages: int, shared: bool, ours: Sequence[str], results: list[dict]) -> list:
    variants = (STOCK, *ours)

    def of(variant: str, key: str) -> list[float]:
        return [r[key] for r in results if r["variant"] == variant]

    def spread(found: list[float]) -> str:
        return f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"

    def ratios(variant: str, key: str) -> str:
        if variant not in variants:
            return "-"
        return spread([a / b for a, b in zip(of(STOCK, key), of(variant, key), strict=True)])

    cells = [case, str(stages), f"{statistics.median(of(STOCK, 'replayed')):.2f}"]
    cells.append(spread(of(STOCK, "noise")))
    for key in ("replayed", "seconds"):
        for variant in OURS:
            cells.append(ratios(variant, key))
            if shared and key == "seconds" and variant in variants:
                cells[-1] += ", shared cores"
    bubbles = [100 * statistics.median(of(v, "bubble")) for v in variants]
    cells.append(" / ".join(map("{:.0f}".format, bubbles)))
    cells.append(" / ".join(f"{max(of(v, 'peak')) / 2**20:.1f}" for v in variants))
    cells.append(" / ".join(f"{statistics.median(of(v, 'chunks')):.0f}" for v in variants))
    return cells


HEAD = (
    "case",
    "stages",
    "stock s, replayed",
    "stock's halves",
    "whole, replayed",
    "slices, replayed",
    "whole, measured",
    "slices, measured",
    "bubble % (stock / whole / slices)",
    "peak MiB (stock / whole / slices)",
    "chunks",
)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE")
    parser.add_argument("--batches", type=int, default=3, help="measured, of each case")
    parser.add_argument("--repeats", type=int, default=2, help="calls of each batch, by each")
    parser.add_argument("--variants", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4], help="pipeline stages")
    parser.add_argument(
        "--busy-host", action="store_true", help="other work runs beside: as if stages shared cores"
    )
    parser.add_argument("-o", "--output", help="append the table to this file, as markdown")
    chosen = parser.parse_args()
    few = min(chosen.batches, chosen.repeats) < 1
    if few or min(chosen.pp) < 2 or any(LAYERS % stages for stages in chosen.pp):
        parser.error(
            "expected --batches and --repeats of at least 1 and --pp of 2 and more that divide "
            f"{LAYERS}"
        )
    cores = len(os.sched_getaffinity(0))
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for stages in chosen.pp:
        for case in chosen.cases:
            shared = stages > cores or chosen.busy_host
            with tempfile.TemporaryDirectory() as folder:
                arguments = (case, chosen, stages, shared, folder)
                torch.multiprocessing.spawn(work, arguments, nprocs=stages)
                results = json.loads((Path(folder) / "results.json").read_text())
            expected = chosen.batches * (1 + len(chosen.variants))
            assert len(results) == expected, f"{len(results)} of {expected} results were seen"
            cells = row(case, stages, shared, chosen.variants, results)
            lines.append("| " + " | ".join(cells) + " |")
            print("\n".join(lines[-1:] if len(lines) > 3 else lines), flush=True)
    write(chosen.output, heading(host()) + "\n".join(lines) + "\n\n")
