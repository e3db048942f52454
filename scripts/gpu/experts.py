#!/usr/bin/env python3
"""Time of all experts of a rank: a product for each expert, and one product over a stack.

    scripts/gpu/experts.py [--hidden 2048] [--width 768] [--experts 16 32 128] [--rows 1024 16384]

*apart* are Transformer Engine's grouped linears, which add to each expert's gradient; *stacked* is
what training with --epp runs (layers/moe/weight_stack.py), where one bf16 matrix of all experts is
added to their gradients. Both have Megatron's activation and routing weights, and the same weights,
rows and counts of rows, which differ by expert; the last expert has none.

Milliseconds are medians after 0.1 s of work. *issue* ends when the host's call returns, *total*
when the GPU is idle again. *error* is the largest difference of output, gradients of rows and of
weights, relative to that of a loop over experts in float32; above 1e-2 it is WRONG, and the exit
status is 1.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import shapes

REPEATS, WORK_SECONDS, MOST_ERROR = 7, 0.1, 1e-2
FLAGS = (
    "--moe-grouped-gemm --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--expert-tensor-parallel-size 1 --transformer-impl transformer_engine"
)


class Experts:
    """Megatron's experts of one MoE layer, ``stacked`` or apart, with their rows in order."""

    def __init__(self, alone: Any, experts: int, stacked: bool):
        from megatron.core.utils import unwrap_model
        from single_stage import build_stage

        from megatron_epp.layers.moe.weight_stack import stacks_of
        from megatron_epp.mcore.kinds.moe.module import MoEModule

        args = copy.copy(alone.args)
        args.num_experts = experts
        kept = patch.object(MoEModule, "install_in_wrapped", _leave)
        with nullcontext() if stacked else kept:
            self.model = build_stage(replace(alone, args=args), 1, False, False)
        assert len(stacks_of(self.model)) == 2 * stacked, "experts did not become one product"
        self.module = unwrap_model(self.model).decoder.layers[0].mlp.experts
        self.stacked = stacked
        self.weights = [
            [getattr(linear, f"weight{index}") for index in range(experts)]
            for linear in (self.module.linear_fc1, self.module.linear_fc2)
        ]

    def in_order(self, parts: Sequence[Any]) -> list[Any]:
        """Return what belongs to experts 0, 1, ... in the order of the rows."""
        return list(reversed(parts)) if self.stacked else list(parts)

    def forward(self, rows: Any, counts: Any, probs: Any) -> Any:
        output, _ = self.module(rows, counts, probs)
        return output


def _leave(kind: Any, models: Sequence[Any], group: Any) -> None:
    """Keep Transformer Engine's linears."""


def median_milliseconds(act: Callable[[], Any], wait: Callable[[], None]) -> tuple[float, float]:
    """Return the median milliseconds until ``act`` returns, and until the device is idle."""
    issued, total = [], []
    for _ in range(REPEATS):
        wait()
        began = time.perf_counter()
        act()
        issued.append(time.perf_counter() - began)
        wait()
        total.append(time.perf_counter() - began)
    return 1e3 * median(issued), 1e3 * median(total)


def counts_of(rows: int, experts: int) -> list[int]:
    """Return uneven numbers of rows of the experts; the last expert has none."""
    shares = [1 + index % 3 for index in range(experts - 1)]
    counts = [rows * share // sum(shares) for share in shares] + [0]
    counts[0] += rows - sum(counts)
    return counts


class Case:
    """Rows of all experts, and what a loop over experts in float32 computes of them."""

    def __init__(self, experts: Experts, counts: Sequence[int], hidden: int):
        import torch

        device = experts.weights[0][0].device
        made = torch.Generator(device).manual_seed(1)
        dtype = {"device": device, "generator": made}
        self.counts = counts
        self.rows, self.answer = (
            torch.randn(sum(counts), hidden, **dtype).bfloat16() for _ in range(2)
        )
        self.probs = torch.rand(sum(counts), **dtype)

    def of(self, experts: Experts) -> tuple[Any, Any, Any, Any]:
        """Return rows, counts, routing weights and answer in the order of ``experts``."""
        import torch

        split = (each.split(list(self.counts)) for each in (self.rows, self.probs, self.answer))
        rows, probs, answer = (torch.cat(experts.in_order(parts)) for parts in split)
        counts = torch.tensor(experts.in_order(self.counts), device=rows.device)
        return rows.requires_grad_(), counts, probs, answer

    def error(self, experts: Experts) -> float:
        """Return the largest relative error of output and gradients against float32."""
        import torch

        experts.model.zero_grad_buffer()
        rows, counts, probs, answer = self.of(experts)
        output = experts.forward(rows, counts, probs)
        output.backward(answer)
        size = experts.in_order(self.counts)
        found = [experts.in_order(each.split(size)) for each in (output, rows.grad)]
        totals = [[weight.main_grad for weight in of_linear] for of_linear in experts.weights]
        off = [0.0] * 4
        norms = [0.0] * 4
        parts = (self.rows.split(list(self.counts)), self.probs.split(list(self.counts)))
        answers = self.answer.split(list(self.counts))
        for index, (x, p, dy) in enumerate(zip(*parts, answers, strict=True)):
            first, second = (of[index].detach().float().requires_grad_() for of in experts.weights)
            wide = x.float().requires_grad_()
            gate, up = (wide @ first.t()).chunk(2, dim=-1)
            y = (torch.nn.functional.silu(gate) * up * p[:, None]) @ second.t()
            y.backward(dy.float())
            expected = (y.detach(), wide.grad, first.grad, second.grad)
            mine = (found[0][index], found[1][index], totals[0][index], totals[1][index])
            for at, (one, other) in enumerate(zip(mine, expected, strict=True)):
                off[at] += float((one.float() - other).square().sum())
                norms[at] += float(other.square().sum())
        return max((wrong / norm) ** 0.5 for wrong, norm in zip(off, norms, strict=True))


def measured(experts: Experts, case: Case, wait: Callable[[], None]) -> list[float]:
    """Return milliseconds: [F issue, F total, B issue, B total]."""
    rows, counts, probs, answer = case.of(experts)

    def forward() -> Any:
        return experts.forward(rows, counts, probs)

    began = time.perf_counter()
    while time.perf_counter() - began < WORK_SECONDS:
        forward().backward(answer)
        wait()
    outputs: list[Any] = []
    of_forward = median_milliseconds(lambda: outputs.append(forward()), wait)
    of_backward = median_milliseconds(lambda: outputs.pop().backward(answer), wait)
    return [*of_forward, *of_backward]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size (default: 2048)")
    parser.add_argument("--width", type=int, default=768, help="of an expert (default: 768)")
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 32, 128], help="on a rank")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1024, 4096, 16384], help="of all experts"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    wanted = parser.parse_args()
    wanted.model = "tiny"
    flags = f"{FLAGS} --hidden-size {wanted.hidden} --moe-ffn-hidden-size {wanted.width} "
    flags += f"--num-experts {wanted.experts[0]} --bf16"
    alone = shapes.begin(wanted, 1, 4096, flags.split())
    import torch

    wait = torch.cuda.synchronize if wanted.device == "cuda" else lambda: None
    print(shapes.hardware())
    print("experts   rows  path     F issue  F total  B issue  B total    error")
    wrong = False
    for count in wanted.experts:
        for stacked in (False, True):
            experts = Experts(alone, count, stacked)
            for rows in wanted.rows:
                case = Case(experts, counts_of(rows, count), wanted.hidden)
                error = case.error(experts)
                wrong |= not error < MOST_ERROR
                times = "  ".join(f"{value:7.3f}" for value in measured(experts, case, wait))
                print(
                    f"{count:7}  {rows:5}  {'stacked' if stacked else 'apart':7}  {times}  "
                    f"{error:.1e}{'' if error < MOST_ERROR else ' WRONG'}",
                    flush=True,
                )
            del experts
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
