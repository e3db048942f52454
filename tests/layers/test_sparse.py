"""Sparse attention of slices, and what its indexer learns, are those of whole documents."""

from collections import Counter
from multiprocessing.queues import SimpleQueue
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_epp.cost.kinds.dsa import CHOICE_BLOCK
from megatron_epp.ir import Plan, Span
from megatron_epp.layers import dsa
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.dsa import Index, Sparse, attend_chosen
from tests.forks import with_torch
from tests.layers.runner import (
    LAYER,
    ROWS,
    SCALE,
    Documents,
    Runner,
    drawn,
    require_close,
)

HEADS, SIZE, VALUE, INDEX_HEADS, INDEX_SIZE, MOST = 3, 6, 4, 5, 4, 4
WAYS = {
    "taught on all": Sparse(SCALE, MOST, VALUE, weight=0.7),
    "taught on the chosen": Sparse(SCALE, MOST, VALUE, weight=0.7, among=True),
    "without relu": Sparse(SCALE, MOST, VALUE, relu=False, weight=0.7),
    "not taught": Sparse(SCALE, MOST, VALUE),
}


def documents(lengths: tuple[int, ...]) -> Documents:
    """q, key, the indexer's q, weights and key, and the gradient of the output."""
    shapes = (HEADS, SIZE), (1, SIZE), (INDEX_HEADS, INDEX_SIZE), (INDEX_HEADS,), (1, INDEX_SIZE)
    return drawn(lengths, (*shapes, (HEADS, VALUE)), seed=5)


def naive(given: Documents, how: Sparse) -> tuple[list[tuple[Tensor, ...]], float]:
    """(out, gradients of all that is given) of each document, and all rows' losses: masks, softmax,
    autograd."""
    results, total = [], 0.0
    for *inputs, grad in given:
        q, key, iq, weight, ikey = inputs = [each.clone().requires_grad_() for each in inputs]
        dots_JTS = torch.einsum("tji,si->jts", iq, ikey[:, 0])
        dots_JTS = dots_JTS.relu() if how.relu else dots_JTS
        scores_TS = torch.einsum("jts,tj->ts", dots_JTS, weight)
        there = torch.ones(len(q), len(q)).tril().bool()
        scores_TS = scores_TS.masked_fill(~there, -torch.inf)
        best = scores_TS.topk(min(MOST, len(q)), -1).indices
        chosen = torch.zeros_like(there).scatter(1, best, True) & there
        logits_HTS = torch.einsum("thd,sd->hts", q, key[:, 0]) * SCALE
        odds_HTS = logits_HTS.masked_fill(~chosen, -torch.inf).softmax(-1)
        out = torch.einsum("hts,sv->thv", odds_HTS, key[:, 0, :VALUE])
        seen = chosen if how.among else there
        target = logits_HTS.masked_fill(~seen, -torch.inf).softmax(-1).mean(0).detach()
        taught = scores_TS.masked_fill(~seen, -torch.inf).log_softmax(-1)
        terms = (target * (target.clamp_min(1e-10).log() - taught)).masked_fill(~seen, 0.0)
        loss = how.weight * terms.sum()
        gradients = torch.autograd.grad((out * grad).sum() + loss, inputs)
        results.append((out.detach(), *gradients))
        total += float(loss.detach())
    return results, total


class SparseRunner(Runner):
    drop = False

    def __init__(self, plan: Plan, given: Documents, how: Sparse):
        super().__init__(plan, given, multiple=4)
        self.how, self.losses = how, 0.0

    def attention(self, state: ChunkState, inputs: tuple[Tensor, ...]) -> Tensor:  # type: ignore[override]
        q, key, *indexed = inputs
        trains_indexer = bool(self.how.weight) and state.training
        if not trains_indexer:
            indexed = [each.detach() for each in indexed]
        inside = state, LAYER, self.how, trains_indexer, self.drop
        out, loss, again = attend_chosen(q, key, Index(*indexed), *inside)
        assert again is None or torch.equal(again.value(), out)
        self.losses += float(loss)
        return out if trains_indexer else out + 0.0 * sum(each.sum() for each in inputs[2:])


class Dropping(SparseRunner):
    drop = True


@pytest.mark.parametrize("runner", [SparseRunner, Dropping])
@pytest.mark.parametrize("block", [1, 300, dsa.AT_ONCE])
@pytest.mark.parametrize("way", WAYS)
def test_slices_compute_what_whole_documents_compute(way, block, runner) -> None:
    for name, plan in ROWS.items():
        given, how = documents(plan.documents), WAYS[way]
        with patch.object(dsa, "AT_ONCE", block):
            run = runner(plan, given, how)
            results = run.run()
        expected, loss = naive(given, how)
        require_close(results, expected, name)
        assert run.losses == pytest.approx(loss, rel=1e-12), name


class Products(TorchDispatchMode):
    """Counts products by the format of their operands and of their result."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[tuple[torch.dtype, torch.dtype]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.seen[args[0].dtype, made.dtype] += 1
        return made


@pytest.mark.parametrize("among", [False, True])
def test_a_gpu_multiplies_halves_and_adds_up_in_float32(among) -> None:
    """Index scores, logits and what a gradient meets.

    In a process of its own: in one that has become a CPU host, "cuda" means the CPU.
    """
    with with_torch() as context:
        said = context.SimpleQueue()
        process = context.Process(target=multiply_on_a_gpu, args=(among, said))
        process.start()
    process.join()
    assert process.exitcode == 0
    index, products = said.get()
    half, float32 = torch.bfloat16, torch.float32
    assert index == {(half, float32): 1}
    assert products[half, float32] == (4 if among else 5) and (half, half) not in products


def multiply_on_a_gpu(among: bool, said: SimpleQueue) -> None:
    """Put products by data types of operands and result: of the index, and of all.

    On tensors that claim to be a GPU's.
    """
    how, block = Sparse(SCALE, MOST, VALUE, weight=0.7, among=among), dsa._Block(slice(0, 6), 3)
    with FakeTensorMode(), Products() as products:
        here = {"device": "cuda", "dtype": torch.bfloat16}
        q, iq = torch.empty(6, HEADS, SIZE, **here), torch.empty(6, INDEX_HEADS, INDEX_SIZE, **here)
        seen = torch.empty(9, SIZE, **here), torch.empty(9, INDEX_SIZE, **here)
        chosen = torch.zeros(6, MOST, dtype=torch.int32, device="cuda")
        weight, grad = torch.empty(6, INDEX_HEADS, **here), torch.empty(6, HEADS, VALUE, **here)
        assert dsa._dots(iq, seen[1]).shape == (6, INDEX_HEADS, 9)
        index = dict(products.seen)
        of_rows, to_seen = (grad, q, iq, weight, chosen), tuple(map(torch.Tensor.float, seen))
        made = dsa._block_backward(block, of_rows, seen, to_seen, how, True)
        assert [one.shape for one in made] == [q.shape, iq.shape, weight.shape]
    said.put((index, dict(products.seen)))


def test_planners_know_the_block() -> None:
    assert CHOICE_BLOCK == dsa.AT_ONCE


@pytest.mark.parametrize(("on_gpu", "most"), [(False, 1024), (True, 128)])
def test_a_gpu_takes_eight_times_as_many_rows_at_once(on_gpu, most) -> None:
    """Of a chunk of 8K tokens behind 24K, 64 heads: each block is 30 to 40 launches."""
    rows = Rows(0, 8192, Span(0, 24_576, 32_768), True, True)
    q = SimpleNamespace(shape=(8192, 64, 576), is_cuda=on_gpu)
    indexer = SimpleNamespace(shape=(8192, 64, 128))
    how = Sparse(scale=1.0, most=2048, values=512)
    blocks = list(dsa._blocks(rows, (range(32_768),), q, indexer, how))
    assert len(blocks) == most
    assert blocks[0].rows.start == 0 and blocks[-1].rows.stop == 8192
    assert blocks[0].first == 24_576
