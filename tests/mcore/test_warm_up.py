"""Which sizes of attention are run before training, and for how long."""

import dataclasses

import pytest
import torch

from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.attention.layer_attention import Heads
from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.te_direct import alike
from megatron_epp.layers.attention.varlen import CuSeqlens, Operands, VarlenAttention
from megatron_epp.mcore.model import warm_up as module
from megatron_epp.mcore.model.warm_up import WarmUpCall, buckets, calls, recordings, warm_up
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 8, 0.5, torch.float32)


def test_buckets_are_those_of_the_kernels() -> None:
    assert buckets(700) == [700]
    assert buckets(1024) == [1024]
    assert buckets(5000) == [1024, 2048, 4096, 5000]
    assert buckets(100_000)[-4:] == [32768, 65536, 98304, 100_000]


def test_every_pair_of_buckets_once_and_whole_documents_first() -> None:
    wanted = list(calls(5000, alone=False))
    packs, many = [8192, 16384, 32768], 2 * len(buckets(32768))
    assert len(wanted) == len(set(wanted)) == 4 + 3 + 3 + 2 + 1 + many
    whole = [WarmUpCall(size, size) for size in buckets(5000)]
    whole += [WarmUpCall(size, size, documents=-(-size // 5000)) for size in packs]
    assert wanted[:7] == whole
    assert all(call.queries <= call.keys <= 5000 * call.documents for call in wanted)
    alone = [dataclasses.replace(call, alone=True) for call in whole]
    assert list(calls(5000, alone=True)) == [*whole, *alone, *wanted[7:]]


def recorded(cu_seqlens: CuSeqlens) -> tuple:
    """What calls have in common whose arguments are recorded once."""
    nothing = torch.empty(0)
    return alike(Operands(nothing, nothing, nothing, cu_seqlens), True)


def test_a_planned_batch_finds_every_graph_built_and_every_call_recorded() -> None:
    """Chunks of short documents are longer than the context, and hold more of them than 32."""
    cost, context = named_cost("llama3-8b", "h100-80g", pp=8), 4096
    batch = [*open_corpus("wikipedia", context).batch(0, 512), *[150] * 1024]
    needed: set[tuple[int, int, int]] = set()
    packs = set()
    for options in (Options(context=context), Options(context=context, effort=0)):
        plan = PLANNERS["epp"](batch, cost, options).plan
        for chunk in plan.chunks:
            whole = [s.tokens for s in chunk.spans if s.tokens == plan.documents[s.document]]
            if whole:
                needed.add(WarmUpCall(sum(whole), sum(whole), documents=len(whole)).graph)
                packs.add(recorded(CuSeqlens.of(whole, whole, CPU)))
            slices = (s for s in chunk.spans if s.tokens < plan.documents[s.document])
            needed |= {WarmUpCall(span.tokens, span.stop).graph for span in slices}
    assert max(queries for _, queries, _ in needed) > context
    assert max(documents for documents, _, _ in needed) > 32
    assert needed <= {call.graph for call in calls(context, alone=False)}
    made = list(recordings(context, alone=False))
    assert packs and packs <= {recorded(call.cu_seqlens(CPU)) for call in made}
    assert {call.graph for call in made} <= {call.graph for call in calls(context, alone=False)}


@pytest.mark.parametrize("before", [None, 63])
def test_every_length_from_17_tokens_on_is_recorded_once(before) -> None:
    """Also behind a window, which a slice sees less of; rows of a call are within its bounds."""
    made = list(recordings(1000, alone=False, before=before, packs_to=1024))
    keys = [recorded(call.cu_seqlens(CPU)) for call in made]
    assert len(set(keys)) == len(keys)
    for call in made:
        lengths = call.cu_seqlens(CPU)
        assert all(q <= lengths.most_queries and k <= lengths.most_keys for q, k in lengths.lengths)
    for count, longest in ((1, 17), (1, 1000), (2, 40), (5, 700), (31, 129), (64, 20)):
        lengths = [longest, *[1] * (count - 1)]
        assert recorded(CuSeqlens.of(lengths, lengths, CPU)) in keys
    for queries, context in ((17, 983), (100, 20), (700, 300), (500, 500)):
        seen = context if before is None else min(before, context)
        assert recorded(CuSeqlens.of([queries], [queries + seen], CPU)) in keys
    # A call is recorded of the kernel that computes it: those behind a context have another.
    contexts = [most[0] < most[1] for most in (call.most for call in made)]
    assert [call.keys > call.queries for call in made] == contexts
    many = sum(call.documents == 1 for call in recordings(1000, alone=False, before=before))
    assert many == 6 + (21 if before is None else 12)
    assert sum(call.alone for call in recordings(1000, alone=True)) == 6 * 8


class Engine(ReferenceKernel):
    """Draws with every call, as Transformer Engine does."""

    name = "te"

    def __init__(self):
        super().__init__(HEADS.scale)
        self.ran: list[tuple[int, int]] = []
        self.heads: set[int] = set()

    def forward(self, call, backward):
        self.heads.add(call.q_THD.shape[1])
        self.ran += call.cu_seqlens.lengths
        torch.rand(3)
        return super().forward(call, backward)


@pytest.fixture
def one_rank(monkeypatch):
    """With small sizes, and no packs of many documents."""
    monkeypatch.setattr(module, "FIRST", 16)
    monkeypatch.setattr(module, "DOUBLES_TO", 64)
    monkeypatch.setattr(module, "PACKS_TO", 16)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(module, "recordings", lambda *sizes: ())


def test_no_trace_but_built_kernels(one_rank, monkeypatch) -> None:
    kernel, before = Engine(), torch.get_rng_state()
    assert warm_up(VarlenAttention(kernel), HEADS, HEADS, 100, CPU) == 10
    assert kernel.ran == [(call.queries, call.keys) for call in calls(100, alone=False)]
    assert torch.equal(torch.get_rng_state(), before)


def test_documents_of_one_rank_are_run_over_all_heads(one_rank, monkeypatch) -> None:
    kernel, of_whole = Engine(), Engine()
    attention = VarlenAttention(kernel, uncut=of_whole)
    whole = dataclasses.replace(HEADS, query=8, key=4)
    assert warm_up(attention, HEADS, whole, 100, CPU) == 10 + 4
    assert of_whole.ran == [(size, size) for size in buckets(100)]
    assert of_whole.heads == {8} and kernel.heads == {4}


def test_packs_are_run_as_many_documents(one_rank, monkeypatch) -> None:
    monkeypatch.setattr(module, "PACKS_TO", 100)
    monkeypatch.setattr(module, "PACKED", (2, 4))
    kernel = Engine()
    warm_up(VarlenAttention(kernel), HEADS, HEADS, 30, CPU)
    assert kernel.ran[2:6] == [(16, 16), (16, 16), (22, 22), (21, 21)]
    assert kernel.ran[-4:] == [(25, 25)] * 4


def test_the_largest_pack_is_as_asked() -> None:
    """With emulated kernels: no pack of more tokens than a document may have."""
    asked = [max(call.keys for call in calls(64, True, packs_to=most)) for most in (64, None)]
    assert asked == [64, module.PACKS_TO]


def test_the_time_is_bounded_and_memory_may_run_out(one_rank, monkeypatch) -> None:
    monkeypatch.setattr(module, "SECONDS", -1.0)
    assert warm_up(VarlenAttention(Engine()), HEADS, HEADS, 40, CPU) == 0
    monkeypatch.setattr(module, "SECONDS", 60.0)

    class Full(Engine):
        def backward(self, grad_THD, call, kept):
            if len(self.ran) == 3:
                raise torch.OutOfMemoryError("no memory")
            return super().backward(grad_THD, call, kept)

    before = torch.get_rng_state()
    assert warm_up(VarlenAttention(Full()), HEADS, HEADS, 100, CPU) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_other_kernels_have_nothing_to_build() -> None:
    assert warm_up(PartsAttention(0.5), HEADS, HEADS, 100, CPU) == 0
    assert warm_up(VarlenAttention(ReferenceKernel(0.5)), HEADS, HEADS, 100, CPU) == 0
