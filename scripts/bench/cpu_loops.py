#!/usr/bin/env python3
"""Training loops of others on this host's CPU: Megatron's schedule, whole micro-batches, slices.

    scripts/bench/cpu_loops.py [--cases sft agent] [--batches N] [--pp 2] [-o RESULT.md]

A loop of its own on megatron.core (no trainer): --pp stages (gloo, one core each), 8 layers, hidden
512, 8 heads in 4 groups; a micro-batch is [1, T] tokens of one document, or of several packed ones
in the agent case. In one run, in turn and in changing order, on the same micro-batches, weights and
kernels (torch's flash attention for all):

    stock    Megatron's forward_backward_pipelining_without_interleaving, shapes by handshake
    level0   megatron_epp.install_schedule: planned order, split backward, planned shapes
    level1   megatron_epp.attach: documents in slices

    sft      32 documents, lengths log-normal around 600 tokens, at most 4096
    agent    8 documents around 900 tokens, and one of 12288

Seconds are of the whole call, planning included, the slowest rank's; the first batches warm up.
Ratios are stock's seconds over the others', medians over the batches. Bubbles: stages' idle share
of the call. Peaks: bytes that autograd saved and kept K and V, the largest of all stages. With more
stages than cores, processes share them: orders and peaks are as they would be, seconds are not.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headline import ROOT, heading, host, write

sys.path.insert(0, str(ROOT))

VARIANTS = ("stock", "level0", "level1")
CASES = ("sft", "agent")
WARM_UP = 2
HIDDEN, LAYERS, HEADS, GROUPS, WORDS = 512, 8, 8, 4, 8192
SIZES = {"sft": 4096, "agent": 12288}


def lengths_of(case: str, batch: int) -> list[int]:
    """Of the documents of a batch, each a micro-batch."""
    chance = random.Random(f"{case} {batch}")
    if case == "sft":
        return [
            max(32, min(SIZES[case], round(chance.lognormvariate(6.4, 0.8)))) for _ in range(32)
        ]
    few = [max(64, min(4096, round(chance.lognormvariate(6.8, 0.5)))) for _ in range(8)]
    few.insert(chance.randrange(9), SIZES[case])
    return few


# ------------------------------------------------------------------ inside the processes


def work(rank: int, case: str, batches: int, stages: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatron_epp.mcore.patching import cpu_host

    cpu_host.install_cpu_host()
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_epp.mcore.loops.adapters.packed import Packed
    from megatron_epp.mcore.loops.attached import attach_to
    from megatron_epp.mcore.loops.install import Installed
    from megatron_epp.mcore.loops.loop_schedule import Settings
    from megatron_epp.runtime.kv_store import Store
    from megatron_epp.runtime.memory_meter import SavedBytesMeter

    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=stages)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
    model_parallel_cuda_manual_seed(1)
    model = build_model(stages, rank, SIZES[case])
    ran: list[Any] = []
    settings = Settings(
        observe=ran.append, make_meter=lambda model: SavedBytesMeter(model.parameters())
    )
    installed = Installed(settings)
    sliced = attach_to(model, Packed(token_loss), "auto", head_again=True)
    busy = watch_stock()
    results = []
    for batch in range(-WARM_UP, batches):
        micro_batches = made_up(lengths_of(case, batch % max(batches, 1)))
        turn = VARIANTS if batch % 2 else tuple(reversed(VARIANTS))
        for variant in turn:
            sliced.slicing = variant == "level1"
            keywords = {
                "forward_step_func": forward_step,
                "data_iterator": iter(micro_batches),
                "model": [model],
                "num_microbatches": len(micro_batches),
                "seq_length": 1,
                "micro_batch_size": 1,
            }
            model.zero_grad(set_to_none=True)
            busy.clear()
            dist.barrier()
            began = time.perf_counter()
            if variant == "stock":
                meter = SavedBytesMeter(model.parameters())
                with meter.watch(Store({})):
                    installed.schedule.stock[True](**keywords)
                meter.op_peak()
                peak, spent, chunks = meter.peak_bytes, sum(busy), len(micro_batches)
            else:
                installed.schedule(True, keywords)
                done = ran[-1]
                peak, chunks = done.peak_bytes, len(done.plan.chunks)
                spent = sum(r.seconds for r in done.records if r.op in compute_ops(done))
            seconds = time.perf_counter() - began
            every: list[Any] = [None] * stages
            dist.all_gather_object(every, (seconds, spent, peak))
            if batch >= 0 and rank == 0:
                longest = max(one[0] for one in every)
                results.append(
                    {
                        "batch": batch,
                        "variant": variant,
                        "seconds": longest,
                        "bubble": 1 - sum(one[1] for one in every) / stages / longest,
                        "peak": max(one[2] for one in every),
                        "chunks": chunks,
                    }
                )
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.barrier()


def compute_ops(done: Any) -> set:
    return {op for order in done.plan.orders for op in order}


def build_model(stages: int, stage: int, context: int) -> Any:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from torch.nn import functional

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
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

    def flash(query: Any, key: Any, value: Any, *masks: Any, **others: Any) -> Any:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    for layer in model.decoder.layers:  # Megatron's own for the CPU holds every score
        layer.self_attention.core_attention.forward = flash
    return model


def watch_stock() -> list[float]:
    """Seconds that Megatron's schedules spend in forward and backward steps."""
    from unittest.mock import patch

    from megatron.core.pipeline_parallel import schedules

    spent: list[float] = []

    def timed(function: Any) -> Any:
        def run(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                spent.append(time.perf_counter() - began)

        return run

    for name in ("forward_step", "backward_step"):
        patch.object(schedules, name, timed(getattr(schedules, name))).start()
    return spent


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
    import torch

    batch = next(data_iterator)
    places = torch.arange(batch["tokens"].shape[1])[None]
    output = model(batch["tokens"], places, None, labels=batch["labels"])
    return output, lambda losses: token_loss(batch, losses)


def token_loss(batch: dict, losses: Any, non_loss_data: bool = False) -> Any:
    import torch

    total = losses.sum()
    return total, torch.tensor(losses.numel(), dtype=torch.int), {"lm loss": total.detach()}


# ------------------------------------------------------------------ the table


def row(case: str, stages: int, results: list[dict]) -> list[str]:
    def of(variant: str, key: str) -> list[float]:
        return [r[key] for r in results if r["variant"] == variant]

    cells = [case, str(stages), f"{statistics.median(of('stock', 'seconds')):.2f}"]
    for variant in VARIANTS[1:]:
        ratios = [
            a / b for a, b in zip(of("stock", "seconds"), of(variant, "seconds"), strict=True)
        ]
        cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    for key, scale, form in (("bubble", 100, "{:.0f}"), ("peak", 2**-20, "{:.0f}")):
        medians = [statistics.median(of(v, key)) * scale for v in VARIANTS]
        cells.append(" / ".join(map(form.format, medians)))
    cells.append(" / ".join(f"{statistics.median(of(v, 'chunks')):.0f}" for v in VARIANTS))
    return cells


HEAD = (
    "case",
    "stages",
    "stock s",
    "level 0, times stock",
    "level 1, times stock",
    "bubble % (stock / 0 / 1)",
    "peak MiB (stock / 0 / 1)",
    "chunks",
)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--batches", type=int, default=6, help="measured, of each case")
    parser.add_argument("--pp", type=int, nargs="+", default=[2], help="pipeline stages")
    parser.add_argument("-o", "--output", help="append the table to this file, as markdown")
    chosen = parser.parse_args()
    lines = ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
    for stages in chosen.pp:
        for case in chosen.cases:
            with tempfile.TemporaryDirectory() as folder:
                arguments = (case, chosen.batches, stages, folder)
                torch.multiprocessing.spawn(work, arguments, nprocs=stages)
                results = json.loads((Path(folder) / "results.json").read_text())
            expected = chosen.batches * len(VARIANTS)
            assert len(results) == expected, f"{len(results)} of {expected} calls were seen"
            lines.append("| " + " | ".join(row(case, stages, results)) + " |")
            print("\n".join(lines[-1:] if len(lines) > 3 else lines), flush=True)
    write(chosen.output, heading(host()) + "\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
