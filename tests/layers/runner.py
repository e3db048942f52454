"""Runs plans through the attentions, and whole documents through a naive one, to be compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_epp.ir import Chunk, Kind, Op, Plan, slices_of
from megatron_epp.layers.attention.cpu import ChunkAttention
from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.varlen import VarlenAttention
from megatron_epp.layers.chunk_state import ChunkState, chunk_rows, store_for
from megatron_epp.runtime.kv_store import Store

LAYER = 3  # any: the store's key
HEAD_SIZE = 8
SCALE = 0.3
NAMES = ("out", "dq", "dk", "dv")

# q, k, v, or what an attention has in their place, and the gradient of the output: each document's.
Documents = list[tuple[Tensor, ...]]


def drawn(
    lengths: tuple[int, ...],
    shapes: Sequence[tuple[int, ...]],
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Documents:
    """Tensors of documents; ``shapes`` of a row."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return [tuple(draw(length, *shape) for shape in shapes) for length in lengths]


def documents(
    lengths: tuple[int, ...], heads: int, groups: int, dtype: torch.dtype, seed: int = 0
) -> Documents:
    shapes = [(count, HEAD_SIZE) for count in (heads, groups, groups, heads)]
    return drawn(lengths, shapes, seed, dtype)


def naive(
    given: Documents, before: int | None = None, sinks_H: Tensor | None = None
) -> list[tuple[Tensor, ...]]:
    """(out, dq, dk, dv) of each document in float64, with sinks their gradient: scores, mask,
    softmax, autograd. ``before``: of the window, the inputs before each that it sees."""
    results = []
    for q, k, v, grad in given:
        inputs = [tensor.double().requires_grad_() for tensor in (q, k, v)]
        keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in inputs[1:])
        scores_HTS = torch.einsum("thd,shd->hts", inputs[0], keys) * SCALE
        seen = torch.ones(len(q), len(q)).tril().bool()
        if before is not None:
            seen = seen.triu(-before)
        scores_HTS = scores_HTS.masked_fill(~seen, -torch.inf)
        if sinks_H is not None:
            inputs.append(sinks_H.detach().clone().requires_grad_())
            column = inputs[-1][:, None, None].expand(-1, len(q), 1)
            scores_HTS = torch.cat((scores_HTS, column), -1)
        weights_HTS = scores_HTS.softmax(-1)[..., : len(q)]
        out = torch.einsum("hts,shd->thd", weights_HTS, values)
        results.append((out, *torch.autograd.grad(out, inputs, grad.double())))
    return results


@dataclass
class Pass:
    """A chunk's forward on its way to its backward."""

    state: ChunkState
    inputs: tuple[Tensor, ...]  # q, k, v of all rows
    out: Tensor


class Runner:
    """Runs a plan's single stage of one layer by the attention of CPUs, in parts.

    multiple: rows are padded up to it; weights: tensors; ``learnt``: their gradients by chunk
    """

    weights: tuple[Tensor, ...] = ()

    def __init__(self, plan: Plan, given: Documents, multiple: int = 1):
        self.plan, self.given, self.multiple = plan, given, multiple
        self.learnt: list[tuple[Tensor, ...]] = []
        self.slices = slices_of(plan)
        self.store = Store({d: ends[-1] for d, ends in self.slices.boundaries.items()})
        self.results = [
            tuple(torch.full_like(t, torch.nan) for t in (grad, *inputs)) for *inputs, grad in given
        ]
        self.passes: dict[int, Pass] = {}

    def run(self) -> list[tuple[Tensor, ...]]:
        for op in self.plan.orders[0]:
            if op.kind is Kind.FORWARD:
                self.passes[op.chunk] = self.forward(op.chunk)
            else:
                self.backward(self.passes.pop(op.chunk))
        assert len(self.store) == 0 and self.store.bytes == 0
        return self.results

    def forward(self, chunk: int) -> Pass:
        rows = chunk_rows(self.plan, self.slices, chunk)
        total = -(-rows[-1].stop // self.multiple) * self.multiple
        training = not self.plan.forward_only
        state = ChunkState(chunk, rows, total, "k", self.store, training)
        inputs = tuple(
            self.gathered(rows, total, kind).requires_grad_(training)
            for kind in range(len(self.given[0]) - 1)
        )
        out = self.attention(state, inputs)
        if self.plan.recompute[0][chunk] == "f":
            # As a checkpoint does it: the first graph is dropped, the second goes backward.
            self.scatter(rows, 0, out)
            inputs = tuple(t.detach().requires_grad_(training) for t in inputs)
            return Pass(state, inputs, out.detach())
        self.scatter(rows, 0, out)
        return Pass(state, inputs, out)

    @staticmethod
    def attention(state: ChunkState, inputs: tuple[Tensor, ...]) -> Tensor:
        return ChunkAttention.apply(*inputs, state, LAYER, SCALE)

    def backward(self, made: Pass) -> None:
        out = made.out if made.out.requires_grad else self.attention(made.state, made.inputs)
        rows = made.state.rows
        grad = self.gathered(rows, made.state.tokens, -1)
        gradients = torch.autograd.grad(out, (*made.inputs, *self.weights), grad)
        self.learnt.append(gradients[len(made.inputs) :])
        for kind, gradient in enumerate(gradients[: len(made.inputs)], 1):
            assert not gradient[rows[-1].stop :].any(), "padding has no gradient"
            self.scatter(rows, kind, gradient)
        assert not out[rows[-1].stop :].any(), "padding's output is zero"

    def gathered(self, rows, total: int, kind: int) -> Tensor:
        """The rows' tensor; what stands in the padding is far from zero."""
        parts = [self.given[r.span.document][kind][r.span.start : r.span.stop] for r in rows]
        padding = torch.full((total - rows[-1].stop, *parts[0].shape[1:]), 1e3).to(parts[0].dtype)
        return torch.cat([*parts, padding])

    def scatter(self, rows, kind: int, tensor: Tensor) -> None:
        for r in rows:
            span = r.span
            self.results[span.document][kind][span.start : span.stop] = tensor[r.start : r.stop]


class Varlen(Runner):
    """The same by a kernel of GPUs. ``drop``: outputs are dropped, and made again for backward."""

    kernel = ReferenceKernel(SCALE)
    drop = False

    def __init__(self, plan, given, multiple: int = 1):
        super().__init__(plan, given, multiple)
        self.store = store_for(plan, self.slices, VarlenAttention.stores_last_slice)

    def attention(self, state, inputs) -> Tensor:
        attend = VarlenAttention(self.kernel)
        out, again = attend(*inputs, state, LAYER, self.drop)
        if self.drop and not self.plan.forward_only:
            assert torch.equal(again.value(), out)  # as the layer behind would ask for it
            assert again.value() is again.value()
        return out


class Dropping(Varlen):
    drop = True


def plan_of(lengths: tuple[int, ...], chunks: list[str], order: str, recompute: str = "") -> Plan:
    return Plan(
        documents=lengths,
        layers=(1,),
        chunks=tuple(Chunk.parse(chunk.split()) for chunk in chunks),
        recompute=(tuple(recompute or "k" * len(chunks)),),
        orders=(tuple(map(Op.parse, order.split())),),
    )


def sliced_plan(length: int, slices: int) -> Plan:
    """One document in slices of about the same size."""
    boundaries = [length * i // slices for i in range(slices + 1)]
    order = [f"F{i}" for i in range(slices)] + [f"B{i}" for i in reversed(range(slices))]
    chunks = [f"0[{start}:{stop}]" for start, stop in pairwise(boundaries)]
    return plan_of((length,), chunks, " ".join(order))


ROWS = {
    "whole": plan_of((7,), ["0[0:7]"], "F0 B0"),
    "one input": plan_of((1,), ["0[0:1]"], "F0 B0"),
    "pack": plan_of((5, 1, 9), ["0[0:5] 1[0:1] 2[0:9]"], "F0 B0"),
    "slices": plan_of((23,), ["0[0:8]", "0[8:9]", "0[9:23]"], "F0 F1 F2 B2 B1 B0"),
    "slices of one input": plan_of((3,), ["0[0:1]", "0[1:2]", "0[2:3]"], "F0 F1 F2 B2 B1 B0"),
    "hybrid, the tail first": plan_of((11, 4), ["0[0:6]", "0[6:11] 1[0:4]"], "F0 F1 B1 B0"),
    "hybrid, the tail last": plan_of((11, 4), ["0[0:6]", "1[0:4] 0[6:11]"], "F0 F1 B1 B0"),
    "a first slice beside others": plan_of(
        (11, 4, 3), ["1[0:4] 0[0:6] 2[0:3]", "0[6:11]"], "F0 F1 B1 B0"
    ),
    "a middle slice beside others": plan_of(
        (12, 4), ["0[0:3]", "1[0:4] 0[3:8]", "0[8:12]"], "F0 F1 F2 B2 B1 B0"
    ),
    "two cut documents at once": plan_of(
        (9, 10), ["0[0:5]", "1[0:3]", "0[5:9]", "1[3:10]"], "F1 F0 F3 F2 B3 B2 B0 B1"
    ),
}


def errors(results, expected) -> dict[str, float]:
    """max |difference| over all documents, for out, dq, dk, dv; what is compared is of unit size
    (or 0: a lone input's weights have no gradient).
    """
    return {
        name: max(
            float((mine[kind].detach() - theirs[kind].detach()).abs().max())
            for mine, theirs in zip(results, expected, strict=True)
        )
        for kind, name in enumerate(NAMES)
    }


def distances(results, expected) -> dict[str, float]:
    """Root-mean-square error over all documents together."""
    return {
        name: float(
            sum(
                ((mine[kind].detach().double() - theirs[kind].detach()) ** 2).sum()
                for mine, theirs in zip(results, expected, strict=True)
            )
            ** 0.5
        )
        for kind, name in enumerate(NAMES)
    }


def require_close(results, expected, name: str = "") -> None:
    """Of all documents, in float64."""
    for mine, theirs in zip(results, expected, strict=True):
        for part, wanted in zip(mine, theirs, strict=True):
            close = (part.detach() - wanted.detach()).abs().max() <= 1e-12
            assert close, name


def require_exact(runner: type[Runner], plan: Plan, given: Documents, multiple: int = 1) -> None:
    found = errors(runner(plan, given, multiple).run(), naive(given))
    assert max(found.values()) < 1e-13, (found, str(plan))
