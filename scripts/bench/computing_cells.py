"""Cells of ``peers.py`` whose ops compute: a small GPT model, trained in turn by every schedule.

The model, Megatron's loop and torch's schedules are those of ``cpu_loops.py``. A micro-batch is a
document, or a packed sequence of documents. The packing length of ``packed`` is the one whose step
was fastest, of all lengths that the planner ``packing-best`` tries; each is measured once, before
the first round.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_loops
from cpu_loops import Size
from pipeline_ranks import join_pipeline

from megatron_epp.planner.published.schedules import packing_lengths

SIZE = Size(hidden=64, layers=4, heads=2)
# Calls of this project's schedules before the first round: plans are made from the third call on.
# The others have one.
WARM_UP = 3
DOCUMENTS, TO_THE_CONTEXT, PACKED = "docs", "context", "packed"
MEGATRON, EXECUTOR, TORCH = "megatron", "executor", "torch"
MicroBatches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """Schedule of a cell.

    Attributes:
        by: MEGATRON, EXECUTOR or TORCH.
        micro_batches: DOCUMENTS, TO_THE_CONTEXT or PACKED.
        planned: Whether the order of ops is planned.
        sliced: Whether documents are sliced.
        schedule: torch's schedule.
    """

    by: str
    micro_batches: str
    planned: bool = False
    sliced: bool = False
    schedule: str = ""


VARIANTS = {
    "packing": Variant(EXECUTOR, TO_THE_CONTEXT),
    "packing-best": Variant(EXECUTOR, PACKED),
    "epp": Variant(EXECUTOR, DOCUMENTS, planned=True, sliced=True),
    "epp packed": Variant(EXECUTOR, PACKED, planned=True, sliced=True),
    "megatron 1f1b docs": Variant(MEGATRON, DOCUMENTS),
    "megatron 1f1b packed": Variant(MEGATRON, PACKED),
    "torch 1f1b docs": Variant(TORCH, DOCUMENTS, schedule="1f1b"),
    "torch 1f1b packed": Variant(TORCH, PACKED, schedule="1f1b"),
    "torch interleaved docs": Variant(TORCH, DOCUMENTS, schedule="interleaved"),
    "torch interleaved packed": Variant(TORCH, PACKED, schedule="interleaved"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Batch of a cell, and the rounds to run.

    Attributes:
        context: Maximum tokens of a document and of a packed sequence.
        lengths: Tokens of every document.
        rounds: Numbers of the rounds.
        packings: Packed sequences for each packing length, without repetitions; the last packs to
            the context.
    """

    context: int
    lengths: tuple[int, ...]
    rounds: tuple[int, ...]
    packings: tuple[MicroBatches, ...]


def packings_of(
    lengths: Sequence[int], context: int, packed_to: Callable[[int], MicroBatches]
) -> tuple[MicroBatches, ...]:
    """Return the packed sequences for all packing lengths, without repetitions."""
    found = [packed_to(tokens) for tokens in packing_lengths(max(lengths), context)]
    return tuple(each for n, each in enumerate(found) if each not in found[n + 1 :])


# ------------------------------------------------------------------ inside the processes


def process(rank: int, ranks: int, folder: str, cell: Cell, takes: Callable[..., bool]) -> None:
    """Run one rank; rank 0 writes a line of JSON for every call."""
    join_pipeline(rank, ranks, folder)
    import torch.distributed as dist

    calls = Calls(rank, ranks, cell)
    calls.choose_packing()
    names = [name for name in VARIANTS if calls.runs(name, takes)]
    for number in [*range(-WARM_UP, 0), *cell.rounds]:
        outcomes: dict[str, dict[str, list[float]]] = {}
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            if number < -1 and VARIANTS[name].by != EXECUTOR:
                continue
            call = calls.run(name)
            if call.outcome:
                outcomes.setdefault(VARIANTS[name].micro_batches, {})[name] = call.outcome
            if rank == 0:
                found = {"round": number, "variant": name, **call.told}
                print(
                    f"  round {number}: {name} {call.told['seconds']:.2f} s", file=sys.stderr,
                    flush=True,
                )  # fmt: skip
                if number >= 0:
                    with (Path(folder) / "results").open("a") as file:
                        file.write(json.dumps(found) + "\n")
        for of_variants in outcomes.values():
            compare(of_variants)
    dist.barrier()


def compare(outcomes: dict[str, list[float]]) -> None:
    """Raise an AssertionError unless losses and gradients are those of the first variant."""
    (first, expected), *others = outcomes.items()
    for name, found in others:
        # The last stage alone has losses, and slices have one loss a micro-batch, too.
        far = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
        assert far < cpu_loops.TOLERANCE, f"{name}: {found}; {first}: {expected}"


@dataclass(frozen=True, slots=True)
class Call:
    """Result of one call: what rank 0 writes, and the losses and gradients of this rank."""

    told: dict[str, float]
    outcome: list[float]


class Calls:
    """All variants on this rank: one model, one schedule for each variant."""

    def __init__(self, rank: int, ranks: int, cell: Cell):
        from megatron_epp.mcore.loops.adapters.packed import PackedDocuments
        from megatron_epp.mcore.loops.attached import attach_to
        from megatron_epp.mcore.loops.install import Installation
        from megatron_epp.mcore.loops.settings import Settings

        self.rank, self.ranks, self.cell = rank, ranks, cell
        self.model = cpu_loops.build_model(ranks, rank, cell.context, SIZE)
        self.stock = Installation(Settings()).schedule.stock
        self.sliced = attach_to(
            self.model, PackedDocuments(cpu_loops.token_loss), "auto", head_again=True
        )
        self.stock_ops = cpu_loops.watch_stock(time.perf_counter)
        self.documents = cpu_loops.made_up(list(cell.lengths))
        self.micro_batches: dict[str, list[dict]] = {
            DOCUMENTS: self.documents,
            TO_THE_CONTEXT: self._packed(cell.packings[-1]),
        }
        self.ran: list[Any] = []
        self.schedules: dict[str, Any] = {}

    def _packed(self, micro_batches: MicroBatches) -> list[dict]:
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        packed = []
        for held in micro_batches:
            parts = [self.documents[document] for document in held]
            one = {name: torch.cat([p[name] for p in parts], 1) for name in ("tokens", "labels")}
            lengths = [part["tokens"].shape[1] for part in parts]
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            one["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=max(lengths),
                max_seqlen_kv=max(lengths),
            )
            packed.append(one)
        return packed

    def choose_packing(self) -> None:
        """Choose the packing whose step by Megatron's schedule takes least time."""
        found = [self._packed(packing) for packing in self.cell.packings]
        seconds = []
        for micro_batches in [found[0], *found]:  # the first call warms up
            self.micro_batches[PACKED] = micro_batches
            seconds.append(self.run("megatron 1f1b packed").told["seconds"])
        self.micro_batches[PACKED] = found[seconds[1:].index(min(seconds[1:]))]

    def runs(self, name: str, takes: Callable[..., bool]) -> bool:
        variant = VARIANTS[name]
        count = len(self.micro_batches[variant.micro_batches])
        return variant.by != TORCH or takes(variant.schedule, count, self.ranks)

    def run(self, name: str) -> Call:
        """Run one call of the variant on all ranks.

        ``simulated`` are the seconds of the call's ops if messages took no time, and ``bound``
        those of an even distribution over the ranks without waits; NaN for torch's schedules.
        """
        import torch.distributed as dist

        variant = VARIANTS[name]
        micro_batches = self.micro_batches[variant.micro_batches]
        run = {
            TORCH: self._by_torch,
            MEGATRON: self._by_megatron,
            EXECUTOR: self._by_executor,
        }[variant.by]
        self.sliced.slicing = variant.sliced
        self.model.zero_grad(set_to_none=True)
        dist.barrier()
        began = time.perf_counter()
        losses, peak, ops = run(name, micro_batches)
        seconds = time.perf_counter() - began
        every: list[Any] = [None] * self.ranks
        dist.all_gather_object(every, (seconds, peak, ops))
        orders = [each[2] for each in every]
        timed = all(orders)
        busy = sum(took for order in orders for _, _, took in order) / self.ranks
        told = {
            "seconds": max(each[0] for each in every),
            "peak": max(each[1] for each in every),
            "simulated": cpu_loops.replay(orders) if timed else math.nan,
            "bound": busy if timed else math.nan,
        }
        halves = variant.schedule == "interleaved"  # models of its own
        return Call(told, [] if halves else cpu_loops.outcome(self.model, losses))

    def _by_torch(self, name: str, micro_batches: list[dict]) -> tuple[list[dict], int, list]:
        if name not in self.schedules:
            longest = max(batch["tokens"].shape[1] for batch in micro_batches)
            self.schedules[name] = cpu_loops.TorchSchedule(
                f"torch-{VARIANTS[name].schedule}",
                *(self.rank, self.ranks, self.model, longest, SIZE),
            )
        return *self.schedules[name].step(micro_batches), []

    def _by_megatron(self, name: str, micro_batches: list[dict]) -> tuple[list[dict], int, list]:
        arguments = cpu_loops.call_arguments(self.model, micro_batches)
        self.stock_ops.clear()
        return *cpu_loops.stock_call(self.stock, self.model, arguments), list(self.stock_ops)

    def _by_executor(self, name: str, micro_batches: list[dict]) -> tuple[list[dict], int, list]:
        from megatron_epp.mcore.loops.loop_schedule import PIPELINE

        if name not in self.schedules:
            self.schedules[name] = self._planner(VARIANTS[name])
        arguments = cpu_loops.call_arguments(self.model, micro_batches)
        losses = self.schedules[name](PIPELINE, arguments)
        done = self.ran.pop()
        return losses, done.peak_bytes, cpu_loops.ops_of(done)

    def _planner(self, variant: Variant) -> Any:
        """Return the schedule of this project for ``variant``.

        It may hold as many tokens as Megatron's schedule holds of packed sequences.
        """
        from megatron_epp.mcore.loops.loop_schedule import LoopSchedule
        from megatron_epp.mcore.loops.settings import Settings
        from megatron_epp.planner.calls.call_options import CallOptions

        own, packed = (
            self._tokens_held(self.micro_batches[kind]) for kind in (variant.micro_batches, PACKED)
        )
        options = CallOptions(
            reorder=variant.planned, split=variant.planned, had_bytes=max(packed, own)
        )
        settings = Settings(
            options=options, observe=self.ran.append, make_meter=cpu_loops.saved_bytes
        )
        return LoopSchedule(settings, self.stock)

    def _tokens_held(self, micro_batches: list[dict]) -> float:
        from megatron_epp.planner.calls.call_options import bytes_of_1f1b

        tokens = [batch["tokens"].shape[1] for batch in micro_batches]
        return float(bytes_of_1f1b(tokens, self.ranks).max())
