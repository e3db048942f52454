"""DeepSeek sparse attention (DSA) of a chunk: an indexer selects the keys that a query attends to.

For a row t of some document and every key s <= t of that document, in the chunk or the store:

    score    I[t, s] = sum over the indexer's heads j of w[t, j] relu(q[t, j] . k[s])
    top-k    the ``most`` keys with the largest scores
    output   softmax of the query's logits over the top-k keys, times their first R of D channels
    loss     KL(p || softmax of I[t]) of row t: p is attention's softmax, averaged over all heads,
             over all keys s <= t or over the top-k keys

For earlier slices, the K/V store has attention's key [D] in place of K, and the indexer's key [I]
in place of V. Attention's key, a latent and its rotated part, is shared by all heads. The gradient
of attention's key comes from the output, the gradient of the indexer's key from the loss. Both
gradients treat the selection of keys as a constant.

The loss of a row is independent of the rest of the chunk, so the losses of slices add up to the
losses of documents. With tensor parallelism, each rank has some of the heads, and p is all-reduced
over ``group``. All ranks then compute the same loss and the same gradients of the indexer. Each
rank's gradients of attention's keys include only that rank's heads.

Rows are processed in blocks, so that no tensor has the size of (rows of the chunk) x (keys).

Shape suffixes: T rows of the chunk, b rows of a block, S keys that the rows see, K keys of the
top-k; H heads, D channels of a key, R channels of a value; J heads of the indexer, I channels of an
indexer head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.layers.chunk_state import ChunkState, Rows, let_go
from megatron_epp.layers.recompute.outputs import AttentionRecompute

# Approximate number of elements of a block's widest tensor. A GPU is idle between the 30 to 40
# launches of a small block; four of its tensors may take half a gigabyte.
AT_ONCE, GPU_AT_ONCE = 2**24, 2**27
NONE = -1  # in place of a top-k key if a row has fewer
# lower bound of probabilities in logarithms and quotients, as in Megatron
LEAST_PROBABILITY = 1e-10


@dataclass(frozen=True, slots=True)
class Sparse:
    """Parameters of a DSA layer.

    Attributes:
        scale: scale of attention's logits.
        most: number of keys of the top-k.
        values: R, the channels of a value.
        relu: whether scores contain the ReLU of the formula.
        weight: weight of the rows' losses; 0 for no loss.
        among: whether the loss is over the top-k keys instead of all keys.
        group: ranks over which the heads are sharded; None if the heads are not sharded.
    """

    scale: float
    most: int
    values: int
    relu: bool = True
    weight: float | Tensor = 0.0
    among: bool = False
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """Tensors of a chunk's indexer: queries [T, J, I], weights [T, J] and keys [T, 1, I]."""

    query_TJI: Tensor
    weight_TJ: Tensor
    key_T1I: Tensor


def attend_chosen(
    q_THD: Tensor,
    key_T1D: Tensor,
    index: Index,
    state: ChunkState,
    layer: int,
    how: Sparse,
    trains_indexer: bool,
    drop: bool,
) -> tuple[Tensor, Tensor, AttentionRecompute | None]:
    """Compute sparse attention over the top-k keys of each row, and the indexer's loss.

    The returned loss is not differentiable. With ``trains_indexer``, the backward of the output
    also computes the gradients of the loss with respect to the indexer's tensors.

    Args:
        q_THD: [queries, heads, head size] queries.
        key_T1D: [rows, 1, head size] keys, shared by all heads.
        index: the indexer's tensors.
        state: state of the chunk.
        layer: number of the layer in the stage.
        how: parameters of the layer.
        trains_indexer: whether the loss is computed; otherwise it is 0.
        drop: whether the output is dropped after its use, and recomputed for the backward.

    Returns:
        The output [T, H, R], the sum of the rows' weighted losses, and, with ``drop``, the handle
        that recomputes the output, else None.
    """
    recompute = AttentionRecompute() if drop else None
    index_tensors = index.query_TJI, index.weight_TJ, index.key_T1I
    inputs = q_THD, key_T1D, *index_tensors, state, layer, how, trains_indexer, recompute
    return *_AttendChosen.apply(*inputs), recompute


class _AttendChosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        key_T1D: Tensor,
        iq_TJI: Tensor,
        weight_TJ: Tensor,
        ikey_T1I: Tensor,
        state: ChunkState,
        layer: int,
        how: Sparse,
        trains_indexer: bool,
        recompute: AttentionRecompute | None,
    ) -> tuple[Tensor, Tensor]:
        for rows in state.rows:
            if rows.cut and not rows.last:
                local, span = slice(rows.start, rows.stop), rows.span
                state.store.append(
                    layer, span.document, span.start, key_T1D[local], ikey_T1I[local]
                )
        ctx.state, ctx.layer, ctx.how, ctx.trains_indexer = state, layer, how, trains_indexer
        keys = key_T1D, ikey_T1I
        out_THR, chosen_TK, loss = _attend_rows(q_THD, iq_TJI, weight_TJ, keys, ctx, trains_indexer)
        let_go(state, layer)
        # The keys of a single slice are in the store, and are not saved again.
        ctx.kept = len(state.rows) == 1 and state.rows[0].cut and not state.rows[0].last
        ctx.recompute = recompute
        if recompute is not None:
            recompute.of(ctx, _recomputed)
        saved = q_THD, iq_TJI, weight_TJ, *(() if ctx.kept else keys)
        ctx.save_for_backward(*saved, *([chosen_TK] if recompute is None else []))
        ctx.mark_non_differentiable(loss)
        return out_THR, loss

    @staticmethod
    def inputs(ctx: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor], list[Tensor]]:
        """Return saved tensors: (q, indexer's q, its weights), (keys, indexer's keys), others."""
        saved = list(ctx.saved_tensors)
        queries, others = tuple(saved[:3]), saved[3:]
        if ctx.kept:
            span = ctx.state.rows[0].span
            keys = ctx.state.store.context(ctx.layer, span.document, span.stop, span.start)
            return queries, keys, others
        return queries, (others[0], others[1]), others[2:]

    @staticmethod
    def backward(ctx: Any, grad_THR: Tensor, _: Tensor):
        state, layer, how = ctx.state, ctx.layer, ctx.how
        (q_THD, iq_TJI, weight_TJ), keys, saved = _AttendChosen.inputs(ctx)
        chosen_TK = saved[0] if ctx.recompute is None else ctx.recompute.taken()[1]
        store = state.store
        of_queries = tuple(map(torch.zeros_like, (q_THD, iq_TJI, weight_TJ)))
        padded = q_THD.shape[0]
        of_keys = tuple(key.new_zeros(padded, *key.shape[1:]) for key in keys)
        # branches come after the rows of the chunk that they continue
        for rows in reversed(state.rows):
            local, span = slice(rows.start, rows.stop), rows.span
            seen = _seen(rows, keys, ctx)
            dtype = torch.promote_types(seen[0].dtype, torch.float32)
            to_seen = tuple(torch.zeros_like(part, dtype=dtype) for part in seen)
            for block in _blocks(rows, seen, q_THD, iq_TJI, how):
                block_gradients = _block_backward(
                    block,
                    (grad_THR, q_THD, iq_TJI, weight_TJ, chosen_TK),
                    seen,
                    to_seen,
                    how,
                    ctx.trains_indexer,
                )
                for gradient, part in zip(of_queries, block_gradients, strict=True):
                    gradient[block.rows] = part
            context = len(seen[0]) - (rows.stop - rows.start)
            for gradient, part in zip(of_keys, to_seen, strict=True):
                gradient[local, 0] = part[context:].to(gradient.dtype)
            if rows.cut and not rows.last:
                later = store.gradient(layer, span.document, span.start, span.stop)
                for gradient, part in zip(of_keys, later, strict=True):
                    gradient[local] += part
            at = 0
            for document, inputs in rows.context:
                parts = tuple(part[at : at + inputs, None] for part in to_seen)
                store.add_gradient(layer, document, *parts)
                at += inputs
            if rows.cut and span.start == 0:
                store.release(layer, span.document)
        of_index = (*of_queries[1:], of_keys[1]) if ctx.trains_indexer else (None,) * 3
        return of_queries[0], of_keys[0], *of_index, None, None, None, None, None


def _recomputed(ctx: Any) -> tuple[Tensor, Tensor]:
    """Recompute the output and the top-k of a forward that dropped them, without the loss."""
    (q_THD, iq_TJI, weight_TJ), keys, _ = _AttendChosen.inputs(ctx)
    out_THR, chosen_TK, _ = _attend_rows(q_THD, iq_TJI, weight_TJ, keys, ctx, False)
    return out_THR, chosen_TK


def _attend_rows(
    q_THD: Tensor,
    iq_TJI: Tensor,
    weight_TJ: Tensor,
    keys: tuple[Tensor, Tensor],
    ctx: Any,
    trains_indexer: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output [T, H, R], top-k [T, K], and the sum of the rows' weighted losses.

    Top-k entries are indices into the keys of the row's document, or ``NONE``.
    """
    state, how = ctx.state, ctx.how
    out_THR = q_THD.new_zeros(*q_THD.shape[:2], how.values)
    longest = max((rows.offset + rows.span.stop for rows in state.rows), default=0)
    width = min(how.most, longest)
    chosen_TK = torch.full((len(q_THD), width), NONE, dtype=torch.int32, device=q_THD.device)
    loss = q_THD.new_zeros((), dtype=_wide(q_THD))
    for rows in state.rows:
        seen = _seen(rows, keys, ctx)
        for block in _blocks(rows, seen, q_THD, iq_TJI, how):
            local, causal_bS = block.rows, block.there(q_THD.device)
            key_SD, ikey_SI = (part[: block.stop] for part in seen)
            scores_bS = _scores(_dots(iq_TJI[local], ikey_SI), weight_TJ[local], causal_bS, how)
            best_bK, top_bK = scores_bS.topk(min(how.most, block.stop), -1)
            top_bK = top_bK.masked_fill(best_bK == -torch.inf, NONE)
            chosen_TK[local, : top_bK.shape[1]] = top_bK.int()
            gathered_bKD, probabilities_bHK = _gathered(q_THD[local], key_SD, top_bK, how)
            out_THR[local] = probabilities_bHK.to(q_THD.dtype) @ gathered_bKD[..., : how.values]
            if trains_indexer:
                probabilities = (
                    probabilities_bHK
                    if how.among
                    else _probabilities(q_THD[local], key_SD, causal_bS, how)
                )
                scores = best_bK if how.among else scores_bS
                loss += how.weight * _divergence(_target(probabilities, how), scores)
    return out_THR, chosen_TK, loss


def _block_backward(
    block: "_Block",
    of_rows: tuple[Tensor, ...],
    seen: tuple[Tensor, ...],
    to_seen: tuple[Tensor, ...],
    how: Sparse,
    trains_indexer: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a block's queries, the indexer's queries and their weights.

    The gradients of ``seen``, keys [S, D] and indexer keys [S, I], are added to ``to_seen``.
    """
    grad, q_bHD, iq_bJI, weight_bJ, chosen_bK = (part[block.rows] for part in of_rows)
    key_SD, ikey_SI = (part[: block.stop] for part in seen)
    top_bK = chosen_bK[:, : block.stop].long()
    gathered_bKD, probabilities_bHK = _gathered(q_bHD, key_SD, top_bK, how)
    wide = probabilities_bHK.dtype
    dodds_bHK = _product(grad, gathered_bKD[..., : how.values].mT)
    grad_bHR, q, gathered_bKD = grad.to(wide), q_bHD.to(wide), gathered_bKD.to(wide)
    mean_bH1 = (dodds_bHK * probabilities_bHK).sum(-1, keepdim=True)
    dlogits_bHK = probabilities_bHK * (dodds_bHK - mean_bH1) * how.scale
    dpicked_bKD = dlogits_bHK.mT @ q
    dpicked_bKD[..., : how.values] += probabilities_bHK.mT @ grad_bHR
    places_bK = top_bK.clamp_min(0)  # index 0 for missing keys, whose probability is 0
    to_seen[0].index_add_(0, places_bK.flatten(), dpicked_bKD.flatten(0, 1))
    dq_bHD = dlogits_bHK @ gathered_bKD
    if not trains_indexer:
        return dq_bHD, torch.zeros_like(iq_bJI), torch.zeros_like(weight_bJ)
    if how.among:  # S stands for the top-k keys below
        causal_bS, probabilities, ikey = top_bK != NONE, probabilities_bHK, ikey_SI[places_bK]
    else:
        causal_bS, ikey = block.there(q.device), ikey_SI
        probabilities = _probabilities(q_bHD, key_SD, causal_bS, how)
    dots_bJS = _dots(iq_bJI, ikey)
    iq_bJI, weight_bJ, ikey = (part.to(wide) for part in (iq_bJI, weight_bJ, ikey))
    scores_bS = _scores(dots_bJS, weight_bJ, causal_bS, how)
    # Gradient of KL(p || softmax(scores)).
    dscores_bS = (scores_bS.softmax(-1) - _target(probabilities, how)) * how.weight
    passed_bJS = dots_bJS.relu() if how.relu else dots_bJS
    dweight_bJ = (passed_bJS * dscores_bS[:, None]).sum(-1)
    ddots_bJS = weight_bJ[..., None] * dscores_bS[:, None]
    if how.relu:
        ddots_bJS = ddots_bJS * (dots_bJS > 0)
    if how.among:
        dikey_bKI = ddots_bJS.mT @ iq_bJI
        to_seen[1].index_add_(0, places_bK.flatten(), dikey_bKI.flatten(0, 1))
        return dq_bHD, ddots_bJS @ ikey, dweight_bJ
    to_seen[1][: block.stop] += torch.einsum("bjs,bji->si", ddots_bJS, iq_bJI)
    return dq_bHD, torch.einsum("bjs,si->bji", ddots_bJS, ikey), dweight_bJ


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive ``rows`` of one document in the chunk.

    The first row is at position ``first`` of the document's keys; the last row sees ``stop`` keys.
    """

    rows: slice
    first: int

    @property
    def stop(self) -> int:
        return self.first + self.rows.stop - self.rows.start

    def there(self, device: torch.device) -> Tensor:
        """Return the causal mask [b, S], which is true where a row sees a key."""
        return torch.arange(self.stop, device=device) <= torch.arange(
            self.first, self.stop, device=device
        ).unsqueeze(1)


def _blocks(
    rows: Rows, seen: tuple[Tensor, ...], q_THD: Tensor, iq_TJI: Tensor, how: Sparse
) -> Iterator[_Block]:
    keys, heads = len(seen[0]), max(q_THD.shape[1], iq_TJI.shape[1])
    widest = max(keys * heads, min(how.most, keys) * q_THD.shape[2])
    at_once = GPU_AT_ONCE if q_THD.is_cuda else AT_ONCE
    step, context = max(1, at_once // widest), keys - (rows.stop - rows.start)
    for start in range(rows.start, rows.stop, step):
        yield _Block(slice(start, min(start + step, rows.stop)), context + start - rows.start)


def _seen(rows: Rows, keys: tuple[Tensor, Tensor], ctx: Any) -> tuple[Tensor, ...]:
    """Return the document's keys [S, D] and indexer keys [S, I] up to the span's last token."""
    local, store, span = slice(rows.start, rows.stop), ctx.state.store, rows.span
    own = tuple(key[local] for key in keys)
    parts = [store.context(ctx.layer, *context) for context in rows.context]
    if rows.cut and not rows.last and not rows.prefix:  # all of them are in one buffer
        return tuple(part[:, 0] for part in store.context(ctx.layer, span.document, span.stop))
    if not parts:
        return tuple(part[:, 0] for part in own)
    return tuple(torch.cat(part)[:, 0] for part in zip(*parts, own, strict=True))


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which softmax and scores of ``x`` are computed."""
    return torch.promote_types(x.dtype, torch.float32)


def _product(left_bMN: Tensor, right: Tensor) -> Tensor:
    """Return the product of [b, M, N] with [N, K] or [b, N, K], in at least float32.

    On a GPU, the product of 16-bit operands is accumulated and returned in float32. On other
    devices, torch has no such product; float32 copies of the operands are multiplied instead.
    """
    wide = _wide(left_bMN)
    halves = left_bMN.dtype == right.dtype and right.itemsize == 2
    if not (left_bMN.is_cuda and halves):
        return left_bMN.to(wide) @ right.to(wide)
    if right.dim() == 3:
        return torch.bmm(left_bMN, right, out_dtype=wide)
    return torch.mm(left_bMN.flatten(0, 1), right, out_dtype=wide).unflatten(0, left_bMN.shape[:2])


def _dots(iq_bJI: Tensor, ikey: Tensor) -> Tensor:
    """Return the dot products [b, J, S] of indexer queries with keys [S, I] or [b, S, I]."""
    return _product(iq_bJI, ikey.mT)


def _scores(dots_bJS: Tensor, weight_bJ: Tensor, causal_bS: Tensor, how: Sparse) -> Tensor:
    passed_bJS = dots_bJS.relu() if how.relu else dots_bJS
    scores_bS = (passed_bJS * weight_bJ.unsqueeze(-1)).sum(1)
    return scores_bS.masked_fill(~causal_bS, -torch.inf)


def _probabilities(q_bHD: Tensor, key_SD: Tensor, causal_bS: Tensor, how: Sparse) -> Tensor:
    """Return attention's softmax [b, H, S] over all keys that the causal mask allows."""
    logits_bHS = _product(q_bHD, key_SD.mT) * how.scale
    return logits_bHS.masked_fill(~causal_bS[:, None], -torch.inf).softmax(-1)


def _gathered(q_bHD: Tensor, key_SD: Tensor, top_bK: Tensor, how: Sparse) -> tuple[Tensor, Tensor]:
    """Return the top-k keys of each row [b, K, D], and the softmax over them [b, H, K]."""
    gathered_bKD = key_SD[top_bK.clamp_min(0)]
    logits_bHK = _product(q_bHD, gathered_bKD.mT) * how.scale
    logits_bHK.masked_fill_((top_bK == NONE)[:, None], -torch.inf)
    return gathered_bKD, logits_bHK.softmax(-1)


def _target(probabilities_bHS: Tensor, how: Sparse) -> Tensor:
    """Return the mean probabilities [b, S] over the heads of all ranks of the group."""
    sums_bS = probabilities_bHS.sum(1)
    if how.group is not None:
        dist.all_reduce(sums_bS, group=how.group)
    return sums_bS / sums_bS.sum(-1, keepdim=True).clamp_min(LEAST_PROBABILITY)


def _divergence(target_bS: Tensor, scores_bS: Tensor) -> Tensor:
    """Return KL(target || softmax(scores)), summed over the rows."""
    taught_bS = scores_bS.log_softmax(-1).masked_fill(scores_bS == -torch.inf, 0.0)
    return (target_bS * (target_bS.clamp_min(LEAST_PROBABILITY).log() - taught_bS)).sum()
