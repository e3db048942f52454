"""Losses of routers in slices, packs and prefixes: those of whole samples, whatever runs when."""

import pytest
import torch
from torch import Tensor

from megatron_epp.ir import Span
from megatron_epp.layers.chunk_state import ChunkState, Rows
from megatron_epp.layers.moe.current_chunk import CurrentChunk, note_in_layer, taken_along
from megatron_epp.layers.moe.router_stats import Balancing, Pools, RouterStats
from megatron_epp.runtime.kv_store import Store

EXPERTS, TOPK, AUXILIARY, Z = 6, 2, 0.3, 0.05
DOCUMENTS = (7, 3, 4)
RULES = Balancing(EXPERTS, TOPK, (("load_balancing_loss", AUXILIARY),), Z)


def state(chunk: int, *spans: tuple[int, int, int], padding: int = 0) -> ChunkState:
    """A chunk of (document, start, stop), with rows of padding behind them."""
    rows, start = [], 0
    for document, first, last in spans:
        span = Span(document, first, last)
        cut = span.tokens < DOCUMENTS[document]
        rows.append(Rows(start, start + span.tokens, span, cut, last == DOCUMENTS[document]))
        start += span.tokens
    return ChunkState(chunk, tuple(rows), start + padding, "k", Store({}))


# A slice of document 0, then its last one with document 1 behind it, document 2 alone.
CHUNKS = (
    state(0, (0, 0, 5), padding=1),
    state(1, (0, 5, 7), (1, 0, 3)),
    state(2, (2, 0, 4), padding=4),
)


def scored(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.softmax(logits, -1)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter(1, scores.topk(TOPK, 1).indices, True), scores


def logits_of(document: int) -> Tensor:
    generator = torch.Generator().manual_seed(document)
    made = torch.randn(DOCUMENTS[document], EXPERTS, generator=generator, dtype=torch.float64)
    return (3 * made).requires_grad_()


APART = Pools.each_alone([(Span(d, 0, tokens),) for d, tokens in enumerate(DOCUMENTS)])
# Document 1 continues the first slice of 0, and 2 continues 1. A sample ends in 0, two end in 2.
ALL = (Span(0, 0, 5), Span(1, 0, 3), Span(2, 0, 4))
SHARED = Pools.each_alone([(Span(0, 0, 7),), ALL, ALL[:2], ALL])
TOGETHER = Pools(SHARED.paths, (0, 1, 0, 0), (0.3, 0.7), (0.2, 0.5))


def stats_for(pools: Pools, rules: Balancing = RULES, scale: float | Tensor = 1.0) -> RouterStats:
    spans = [rows.span for chunk in CHUNKS for rows in chunk.rows]
    return RouterStats(rules, spans, 1, pools, scale)


def sees_full_samples(pools: Pools) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of the logits, and the losses without their coefficients, written out."""
    every, auxiliary, z = [*map(logits_of, range(len(DOCUMENTS)))], torch.zeros(()), torch.zeros(())
    copies = [torch.cat([every[s.document][: s.stop] for s in path]) for path in pools.paths]
    for pool, (share, fraction) in enumerate(zip(pools.shares, pools.token_fractions, strict=True)):
        logits = torch.cat([one for of, one in zip(pools.of, copies, strict=True) if of == pool])
        chosen, scores = scored(logits)
        balance = (chosen.sum(0) * scores.sum(0)).sum() * EXPERTS / (TOPK * len(logits) ** 2)
        squares = torch.logsumexp(logits, -1).square()
        (AUXILIARY * balance * len(logits) * share + Z * fraction * squares.sum()).backward()
        auxiliary, z = auxiliary + balance.detach(), z + squares.detach().mean()
    return [logits.grad for logits in every], auxiliary, z


def rows_of(tensors: list[Tensor], chunk: ChunkState) -> Tensor:
    """A chunk's rows of documents' tensors; padding is something that would show."""
    parts = [tensors[r.span.document][r.span.start : r.span.stop] for r in chunk.rows]
    padding = chunk.tokens - sum(len(part) for part in parts)
    return torch.cat([*parts, torch.full((padding, EXPERTS), 9.0, dtype=torch.float64)])


def passed(router_stats: RouterStats, logits: Tensor, chunk: ChunkState) -> Tensor:
    first = router_stats.first_time(0, chunk.chunk)
    out = router_stats.restrained(logits, 0, chunk, first)
    return router_stats.balanced(out, scored, 0, chunk, first)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("order", "pools"),
    [((0, 1, 2), APART), ((2, 0, 1), APART), ((0, 2, 1), APART), ((0, 1, 2), SHARED),
     ((0, 1, 2), TOGETHER)],
)  # fmt: skip
def test_gradients_and_losses_are_those_of_full_samples(order, pools, recomputed) -> None:
    gradients, auxiliary, z = sees_full_samples(pools)
    router_stats = stats_for(pools)
    whole = [logits_of(document).detach() for document in range(len(DOCUMENTS))]
    inputs, outputs = {}, {}
    for chunk in order:
        inputs[chunk] = rows_of(whole, CHUNKS[chunk]).requires_grad_()
        with torch.set_grad_enabled(not recomputed):
            outputs[chunk] = passed(router_stats, inputs[chunk], CHUNKS[chunk])
    for chunk in reversed(order):  # a later slice before an earlier one
        if recomputed:
            outputs[chunk] = passed(router_stats, inputs[chunk], CHUNKS[chunk])
        outputs[chunk].backward(torch.zeros_like(outputs[chunk]))
        expected = rows_of(gradients, CHUNKS[chunk])
        used = CHUNKS[chunk].rows[-1].stop
        torch.testing.assert_close(inputs[chunk].grad[:used], expected[:used])
        assert not inputs[chunk].grad[used:].any()  # padding
    losses = router_stats.losses()
    torch.testing.assert_close(losses["load_balancing_loss"].sum(), auxiliary)
    torch.testing.assert_close(losses["z_loss"].sum(), z)


def test_a_rank_counts_the_rows_that_it_holds() -> None:
    for place, expected in ((0, [0, 0, 0]), (1, [0, 0, 4])):
        chunk = state(0, (0, 0, 5), padding=1)
        for pools, times in ((APART, 1), (SHARED, 4), (TOGETHER, 4)):
            router_stats = stats_for(pools, Balancing(EXPERTS, TOPK, place=place, places=2))
            assert router_stats.owners(chunk, torch.device("cpu")).tolist() == expected
            expected_times = [times if owner < 4 else 0 for owner in expected]
            assert router_stats.times(chunk, torch.ones(1)).tolist() == expected_times


def test_rows_of_local_documents_are_behind_the_share_of_those_spread() -> None:
    """Of two context-parallel ranks of two tensor-parallel ones each: document 0 is spread, 1 and 2
    are local to one each; a row of padding behind document 1."""
    owners = []
    for place in range(4):
        chunk = state(0, (0, 0, 5), (0, 5, 7), padding=1)
        chunk.local = state(0, (2, 0, 4)) if place // 2 else state(0, (1, 0, 3), padding=1)
        router_stats = stats_for(APART, Balancing(EXPERTS, TOPK, place=place, places=4, splits=2))
        owners.append(router_stats.owners(chunk, torch.device("cpu")).tolist())
    assert owners == [[0, 0, 0, 0], [2, 2, 2, 4], [0, 1, 1, 4], [3, 3, 3, 3]]


def test_the_optimizers_scale_reaches_both_losses() -> None:
    gradients = []
    for scale in (1.0, torch.tensor(8.0)):
        router_stats = stats_for(APART, scale=scale)
        logits = logits_of(2)
        passed(router_stats, logits, state(0, (2, 0, 4))).backward(torch.zeros(4, EXPERTS))
        gradients.append(logits.grad)
    torch.testing.assert_close(8 * gradients[0], gradients[1])


def test_without_losses_nothing_is_attached() -> None:
    router_stats = stats_for(APART, Balancing(EXPERTS, TOPK))
    logits = logits_of(0)
    assert passed(router_stats, logits, CHUNKS[0]) is logits
    assert router_stats.losses() == {}


def test_an_mlp_that_runs_again_meets_the_state_of_then() -> None:
    """Also outside of its layer, where another chunk may have passed since."""
    current_chunk, met = CurrentChunk(), []

    class Mlp(torch.nn.Module):
        def forward(self, x, padding_mask=None):
            met.append(current_chunk.state)
            return x, None

    mlp, again = Mlp(), []
    with taken_along(mlp, current_chunk):
        plain = mlp.forward

        def recompute_later(x, **others):
            again.append(lambda: plain(x, **others))
            return plain(x, **others)

        mlp.forward = recompute_later
    layer = note_in_layer(
        lambda hidden_states, **others: mlp(hidden_states, padding_mask=None),
        current_chunk,
        lambda others: others["chunk"],
    )
    for chunk in CHUNKS[:2]:
        layer(torch.zeros(1), chunk=chunk)
    assert current_chunk.state is None
    for once_more in reversed(again):
        once_more()
    assert [state.chunk for state in met] == [0, 1, 1, 0]
