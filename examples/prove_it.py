#!/usr/bin/env python3
"""Proves that cutting and packing changes nothing: a plan written by hand, run by two processes.

    python examples/prove_it.py

A small transformer in float64 is trained for one step twice. Once plainly: one process, one whole
document after the other, torch's own attention. Once by PLAN: two pipeline stages over gloo, a long
document cut in two, a short one packed beside its end, one layer recomputed, chunks out of order.
Prints the loss and every parameter's gradient of both, and fails where they differ by more than
1e-12 of the largest entry. No Megatron in here: this is the executor, the K/V store and the
attention that training uses, with a model of thirty lines.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_epp.ir import FULL, Payload, Plan, check, lower, slices_of
from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.runtime.executor import CurrentOp
from megatron_epp.runtime.link import Links
from megatron_epp.runtime.memory_meter import NoMeter
from megatron_epp.runtime.program_runner import ProgramRunner
from megatron_epp.show.table import text_table
from megatron_epp.show.text import text_gantt
from megatron_epp.show.timeline import timeline_of
from megatron_epp.sim.play import play
from megatron_epp.sim.unit_table import unit_table

PLAN = """
plan v1
documents 90 15 9                # three documents of 90, 15 and 9 tokens
layers 2 2                       # two stages with two layers each
chunk 0: 0[0:50]                 # the long document's first slice
chunk 1: 0[50:90] 1[0:15]        # its last slice, and a whole short document beside it
chunk 2: 2[0:9]
recompute 0: 1f1k 2k 2k          # stage 0 runs one layer of chunk 0 again in backward
recompute 1: 2k 2k 2k
stage 0: F0 F1 F2 B1 B0 B2       # forwards and backwards, in order
stage 1: F0 F1 B1 B0 F2 B2
"""
TOLERANCE = 1e-12  # of a gradient's largest entry
# T tokens of a chunk or document, W width, H query heads, G key heads, D head size
W, H, G, D, WORDS = 32, 4, 2, 8, 101


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(W), nn.RMSNorm(W)
        self.qkv = nn.Linear(W, (H + 2 * G) * D, bias=False)
        self.out = nn.Linear(H * D, W, bias=False)
        self.up, self.down = nn.Linear(W, 4 * W, bias=False), nn.Linear(4 * W, W, bias=False)

    def forward(self, x_TW: Tensor, attend) -> Tensor:
        qkv = self.qkv(self.norm(x_TW)).view(len(x_TW), H + 2 * G, D)
        x_TW = x_TW + self.out(attend(*qkv.split((H, G, G), dim=1)).flatten(1))
        return x_TW + self.down(F.gelu(self.up(self.mlp_norm(x_TW))))


class Model(nn.Module):
    def __init__(self, layers: int, context: int):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, W), nn.Embedding(context, W)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(W), nn.Linear(W, WORDS, bias=False)

    def loss(self, x_TW: Tensor, labels_T: Tensor) -> Tensor:
        """Summed over tokens: however they are cut and packed, the sum is the same."""
        return F.cross_entropy(self.head(self.norm(x_TW)), labels_T, reduction="sum")


def attend_plainly(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1) for t in (q_THD, k_TGD, v_TGD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def train_plainly(model: Model, documents: list[Tensor]) -> float:
    """Every document whole and by itself; leaves gradients, gives the loss per token."""
    total = 0.0
    for tokens in documents:
        x_TW = model.words(tokens[:-1]) + model.places.weight[: len(tokens) - 1]
        for layer in model.layers:
            x_TW = layer(x_TW, attend_plainly)
        loss = model.loss(x_TW, tokens[1:])
        loss.backward()
        total += loss.item()
    return total / sum(len(tokens) - 1 for tokens in documents)


class Stage:
    """The model's side of the executor: what an F and a B do on one stage."""

    def __init__(self, plan: Plan, model: Model, documents: list[Tensor], stage: int):
        self.plan, self.model, self.documents, self.stage = plan, model, documents, stage
        self.first, self.last = stage == 0, stage == plan.stages - 1
        start = sum(plan.layers[:stage])
        self.layers = model.layers[start : start + plan.layers[stage]]
        self.attention = PartsAttention(scale=D**-0.5)
        self.slices = slices_of(plan)
        self.store = store_for(plan, self.slices, self.attention.stores_last_slice)  # K/V of slices
        self.kept: dict[int, tuple[Tensor | None, Tensor]] = {}  # between F and B
        self.loss = 0.0

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        rows = chunk_rows(self.plan, self.slices, chunk)
        recompute = self.plan.recompute[self.stage][chunk]  # a letter for every layer
        tokens = self.plan.chunks[chunk].tokens
        state = ChunkState(chunk, rows, tokens, recompute, self.store)
        if received is None:
            places = torch.cat([torch.arange(r.span.start, r.span.stop) for r in rows])
            x_TW = self.model.words(self.cut(chunk, 0)) + self.model.places(places)
        else:
            x_TW = received.requires_grad_()
        for index, layer in enumerate(self.layers):

            def attend(q_THD, k_TGD, v_TGD, index=index):
                return self.attention(q_THD, k_TGD, v_TGD, state, index, False)[0]

            if recompute[index] == FULL:
                x_TW = checkpoint(layer, x_TW, attend, use_reentrant=False)
            else:
                x_TW = layer(x_TW, attend)
        if self.last:
            x_TW = self.model.loss(x_TW, self.cut(chunk, 1))
            self.loss += x_TW.item()
        self.kept[chunk] = received, x_TW
        return None if self.last else x_TW.detach()

    def cut(self, chunk: int, ahead: int) -> Tensor:
        """The chunk's tokens, or (ahead 1) those that follow them: its labels."""
        parts = [(self.documents[s.document], s) for s in self.plan.chunks[chunk].spans]
        return torch.cat([tokens[s.start + ahead : s.stop + ahead] for tokens, s in parts])

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        received, output = self.kept.pop(chunk)
        output.backward(gradient)
        return None if received is None else received.grad


def train_by_plan(plan: Plan, model: Model, documents: list[Tensor], stage: int) -> float:
    """The stage's part of one iteration; leaves gradients, gives the loss per token (0.0 where
    the stage is not the last)."""
    groups = {payload: dist.new_group() for payload in Payload}  # activations, gradients
    program = lower(plan)[stage]  # the stage's ops with their sends and receives
    compute = Stage(plan, model, documents, stage)
    shape = lambda message: (plan.chunks[message.chunk].tokens, W)  # noqa: E731
    links = Links(groups, shape, torch.float64, torch.device("cpu"))
    runner = ProgramRunner(torch.device("cpu"), CurrentOp(stage))
    runner.run(program, compute, compute.store, links, NoMeter())
    return compute.loss / plan.tokens


def work(rank: int, meeting: str) -> None:
    """One process: the plain model, its stage of the plan, and the difference of both."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    plan = Plan.parse(PLAN)
    check(plan)  # everything once, nothing deadlocks
    torch.manual_seed(0)
    documents = [torch.randint(WORDS, (length + 1,)) for length in plan.documents]
    model = Model(sum(plan.layers), max(plan.documents))
    right = train_plainly(model, documents)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    found = train_by_plan(plan, model, documents, rank)
    rows = [("loss", right, abs(found - right) / right)] if rank == plan.stages - 1 else []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:  # the other stage has the others
            most = float(expected[name].abs().max())
            error = float((parameter.grad - expected[name]).abs().max()) / most
            rows.append((name, most, error))
    by_rank: list = [None, None] if rank == 0 else None
    dist.gather_object(rows, by_rank)
    if rank == 0:
        report(plan, by_rank, len(expected) + 1)
    dist.destroy_process_group()


def report(plan: Plan, by_rank: list, expected: int) -> None:
    print(text_gantt(timeline_of(play(plan, unit_table(plan)), "the plan", unit="units"), 100))
    found = [(stage, *row) for stage, rows in enumerate(by_rank) for row in rows]
    table = [[str(s), name, f"{most:.6g}", f"{error:.1e}"] for s, name, most, error in found]
    print(
        text_table(["stage", "gradient of", "largest, plain model", "difference / largest"], table)
    )
    worst = max(error for *_, error in found)
    equal = worst <= TOLERANCE and len(found) == expected
    verdict = "equal" if equal else "NOT equal"
    print(f"\n{len(found)} of {expected} compared, worst {worst:.1e}: {verdict} (to {TOLERANCE:g})")
    if not equal:
        raise SystemExit(1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        torch.multiprocessing.spawn(work, (meeting,), nprocs=2)


if __name__ == "__main__":
    main()
