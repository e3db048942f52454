"""Attention over packed documents or padded rows, forward and backward, like cuDNN's kernels.

Shapes: T query rows of a document, S key rows, H query heads, G key heads, D channels of queries
and keys, V channels of values. As in kernels, probabilities are rounded to the operands' dtype
before the second product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.engine.enums import NVTE_Bias_Type as Bias
from tests.engine.enums import NVTE_Fused_Attn_Backend as Backend
from tests.engine.enums import NVTE_Mask_Type as Mask
from tests.engine.enums import NVTE_QKV_Format as Format
from tests.engine.enums import NVTE_QKV_Layout as Layout
from tests.engine.enums import NVTE_Softmax_Type as Softmax
from tests.engine.operands import HALVES, expect, no_quantizer, torch_dtype, wide

_CAUSAL = (
    Mask.NVTE_CAUSAL_MASK,
    Mask.NVTE_PADDING_CAUSAL_MASK,
    Mask.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
    Mask.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
)
_PADDED = (
    Mask.NVTE_PADDING_MASK,
    Mask.NVTE_PADDING_CAUSAL_MASK,
    Mask.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
)
_SEPARATE = {
    Layout.NVTE_THD_THD_THD: Format.NVTE_THD,
    Layout.NVTE_BSHD_BSHD_BSHD: Format.NVTE_BSHD,
    Layout.NVTE_SBHD_SBHD_SBHD: Format.NVTE_SBHD,
}
_MOST_CHANNELS = 256
_LATENT = (192, 128)  # the only supported pair of different sizes


def get_fused_attn_backend(wanted: Any) -> tuple[Backend, str]:
    """Return (back end, "") for calls with parameters ``wanted``, or (no back end, reason).

    A call has a back end if cuDNN 9.19 supports it on an H100 or B200 and this module implements
    it.
    """
    reason = "; ".join(_reasons(wanted))
    return (Backend.NVTE_No_Backend if reason else Backend.NVTE_F16_arbitrary_seqlen), reason


def _reasons(wanted: Any) -> Iterator[str]:
    dtype = torch_dtype(wanted.qkv_dtype)
    if dtype not in (*HALVES, torch.float64):
        yield f"operands of {dtype}"
    if wanted.qkv_layout not in _SEPARATE:
        yield f"layout {Layout(wanted.qkv_layout).name}"
    sizes = wanted.head_dim_qk, wanted.head_dim_v
    if any(size % 8 or size > _MOST_CHANNELS for size in sizes):
        yield f"heads of {sizes}: expected multiples of 8 up to {_MOST_CHANNELS}"
    if sizes[0] > 128 and sizes[0] != sizes[1] and sizes != _LATENT:
        yield f"heads of {sizes}"
    if wanted.num_attn_heads % wanted.num_gqa_groups:
        yield f"{wanted.num_attn_heads} heads in {wanted.num_gqa_groups} groups"
    if wanted.dropout:
        yield "dropout, which is not written"
    if wanted.bias_type != Bias.NVTE_NO_BIAS:
        yield "a bias, which is not written"
    thd = wanted.qkv_layout == Layout.NVTE_THD_THD_THD
    if thd and wanted.attn_mask_type not in _PADDED:
        yield f"packed documents under {Mask(wanted.attn_mask_type).name}"
    left, right = wanted.window_size_left, wanted.window_size_right
    if left >= 0 and not (wanted.attn_mask_type in _CAUSAL and right == 0):
        yield f"a window of ({left}, {right}) without a causal mask"


@dataclass(frozen=True, slots=True)
class _Call:
    """Parameters of one call, and the rows of its documents."""

    kernel: str
    form: Format
    causal: bool
    bottom_right: bool
    window: int | None  # number of keys before each query that it sees; None for all
    scale: float
    queries: Sequence[tuple[int, int]]  # (first row, number of rows) of every document
    keys: Sequence[tuple[int, int]]

    def rows(self, tensor: Tensor, document: int, of_keys: bool) -> Tensor:
        """Return a view [T, H, D] of a document's query rows, or of its key rows if ``of_keys``."""
        first, count = (self.keys if of_keys else self.queries)[document]
        if self.form == Format.NVTE_THD:
            return tensor[first : first + count]
        if self.form == Format.NVTE_BSHD:
            return tensor[document, :count]
        return tensor[:count, document]

    def hidden(self, queries: int, keys: int) -> Tensor | None:
        """Return the mask [T, S], True for keys hidden from a query; None if no key is hidden."""
        if not self.causal:
            return None
        shift = keys - queries if self.bottom_right else 0
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(shift)
        if self.window is not None:
            seen = seen.triu(shift - self.window)
        return ~seen


def _call(
    kernel: str, layout: Layout, mask: Mask, bias: Bias, softmax: Softmax, window: Sequence[int],
    bottom_right: bool, scale: float, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor,
    padded_q: Tensor | None, padded_k: Tensor | None, most_q: int, most_k: int,
) -> _Call:  # fmt: skip
    expect(layout in _SEPARATE, kernel, f"layout {Layout(layout).name} is not written")
    expect(bias == Bias.NVTE_NO_BIAS, kernel, "a bias is not written")
    form = _SEPARATE[layout]
    for name, x in (("q", q), ("k", k), ("v", v)):
        is_tensor = type(x) in (Tensor, torch.nn.Parameter)
        expect(is_tensor, kernel, f"{name} is a {type(x).__name__}")
        expect(x.is_contiguous(), kernel, f"{name} {tuple(x.shape)} has strides {x.stride()}")
        good = x.dtype in (*HALVES, torch.float64) and x.dtype == q.dtype
        expect(good, kernel, f"{name} is of {x.dtype}")
    expect(k.shape[:-1] == v.shape[:-1], kernel, f"keys {k.shape}, values {v.shape}")
    expect(k.shape[-1] == q.shape[-1], kernel, f"queries {q.shape}, keys {k.shape}")
    expect(not q.shape[-2] % k.shape[-2], kernel, f"{q.shape[-2]} heads in {k.shape[-2]} groups")
    expect(softmax in tuple(Softmax), kernel, f"softmax {softmax}")
    thd = form == Format.NVTE_THD
    lengths_q = _lengths(kernel, cu_q, padded_q, most_q, q.shape[0] if thd else None)
    lengths_k = _lengths(kernel, cu_k, padded_k, most_k, k.shape[0] if thd else None)
    expect(len(lengths_q) == len(lengths_k), kernel, "as many documents of queries as of keys")
    left, right = window
    causal = mask in _CAUSAL
    expect(left < 0 or (causal and right == 0), kernel, f"window {tuple(window)}")
    return _Call(
        kernel, form, causal, bottom_right, None if left < 0 else left, scale, lengths_q, lengths_k
    )


def _lengths(
    kernel: str, boundaries: Tensor, places: Tensor | None, most: int, total: int | None
) -> list[tuple[int, int]]:
    expect(boundaries.dtype == torch.int32, kernel, f"lengths of {boundaries.dtype}")
    expect(boundaries.is_contiguous() and boundaries.dim() == 1, kernel, "lengths in one piece")
    counts = boundaries.diff().tolist()
    expect(all(count >= 0 for count in counts), kernel, f"lengths {boundaries.tolist()}")
    longest = max(counts, default=0)
    expect(longest <= most, kernel, f"{longest} rows, and {most} are said to be the most")
    where = boundaries if places is None else places
    expect(where.dtype == torch.int32 and len(where) == len(boundaries), kernel, "places")
    firsts = where[:-1].tolist()
    spans = list(zip(firsts, counts, strict=True))
    for place, (first, count) in enumerate(spans):
        stop = total if place + 1 == len(spans) else firsts[place + 1]
        expect(
            total is None or first + count <= stop, kernel, f"document {place} ends behind {stop}"
        )
    return spans


def fused_attn_fwd(
    max_seqlen_q: int, max_seqlen_kv: int, is_training: bool, attn_scale: float, p_dropout: float,
    set_zero: bool, qkv_layout: Layout, o_format: Format, qkv_scale_inv_format: Format,
    bias_type: Bias, attn_mask_type: Mask, softmax_type: Softmax, window_size: Sequence[int],
    bottom_right_diagonal: bool, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, Q: Tensor, K: Tensor,
    V: Tensor, fake_dtype: torch.dtype, cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None, page_table_k: Any, page_table_v: Any, s_quantizer: Any,
    o_quantizer: Any, bias: Any, softmax_offset: Tensor | None, rng_gen: Any,
    rng_elts_per_thread: int, return_max_logit: bool, cuda_graph: bool,
) -> list[Tensor]:  # fmt: skip
    """Return [output, log-sum-exp, random state], and the sinks if there are any."""
    kernel = "fused_attn_fwd"
    no_quantizer(kernel, s_quantizer)
    no_quantizer(kernel, o_quantizer)
    unwritten = p_dropout or page_table_k is not None or return_max_logit
    expect(not unwritten, kernel, "dropout, pages and the largest logit are not written")
    call = _call(
        kernel, qkv_layout, attn_mask_type, bias_type, softmax_type, window_size,
        bottom_right_diagonal, attn_scale, Q, K, V, cu_seqlens_q, cu_seqlens_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
    )  # fmt: skip
    expect(o_format == call.form, kernel, f"output {Format(o_format).name}")
    sinks = _sinks(kernel, softmax_type, softmax_offset, Q.shape[-2])
    out = Q.new_zeros(*Q.shape[:-1], V.shape[-1])
    stats = _no_stats(call, Q, max_seqlen_q)
    with torch.no_grad():
        for document in range(len(call.queries)):
            q, k, v = _of(call, document, Q, K, V)
            output, sums = _attend(call, q, k, v, sinks)
            call.rows(out, document, False).copy_(output)
            _put(call, stats, document, sums)
    aux = [out, stats, torch.zeros(2, dtype=torch.int64)]
    return aux if softmax_offset is None or sinks is None else [*aux, softmax_offset]


def _of(
    call: _Call, document: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        call.rows(q, document, False), call.rows(k, document, True), call.rows(v, document, True)
    )  # fmt: skip


def _sinks(kernel: str, softmax: Softmax, offset: Tensor | None, heads: int) -> Tensor | None:
    if softmax == Softmax.NVTE_VANILLA_SOFTMAX:
        return None
    if softmax == Softmax.NVTE_OFF_BY_ONE_SOFTMAX:
        return torch.zeros(heads)
    expect(offset is not None, kernel, "sinks are asked for and not given")
    assert offset is not None
    expect(
        offset.numel() == heads and offset.dtype in (torch.float32, torch.float64),
        kernel,
        f"sinks of {tuple(offset.shape)}, {offset.dtype}",
    )
    return offset.detach().reshape(heads)


def _no_stats(call: _Call, q: Tensor, most: int) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    if call.form == Format.NVTE_THD:
        return torch.full((q.shape[0], q.shape[1], 1), -torch.inf, dtype=dtype)
    return torch.full((len(call.queries), q.shape[-2], most, 1), -torch.inf, dtype=dtype)


def _put(call: _Call, stats: Tensor, document: int, sums_HT: Tensor) -> None:
    first, count = call.queries[document]
    if call.form == Format.NVTE_THD:
        stats[first : first + count, :, 0] = sums_HT.T
    else:
        stats[document, :, :count, 0] = sums_HT


def _take(call: _Call, stats: Tensor, document: int) -> Tensor:
    first, count = call.queries[document]
    if call.form == Format.NVTE_THD:
        return stats[first : first + count, :, 0].T
    return stats[document, :, :count, 0]


def _attend(
    call: _Call, q_THD: Tensor, k_SGD: Tensor, v_SGV: Tensor, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output [T, H, V] and log-sum-exp [H, T]; loop over heads, because scores are large."""
    hidden = call.hidden(len(q_THD), len(k_SGD))
    shared = q_THD.shape[1] // k_SGD.shape[1]
    outputs, sums = [], []
    for head in range(q_THD.shape[1]):
        key, value = k_SGD[:, head // shared], v_SGV[:, head // shared]
        scores = (wide(q_THD[:, head]) @ wide(key).T) * call.scale
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        total = scores.logsumexp(-1)
        if sinks_H is not None:
            total = torch.logaddexp(total, sinks_H[head].to(total.dtype))
        probabilities = (scores - total[:, None]).exp().nan_to_num_(0.0)
        outputs.append(wide(probabilities.to(q_THD.dtype)) @ wide(value))
        sums.append(total)
    return torch.stack(outputs, 1).to(q_THD.dtype), torch.stack(sums)


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, attn_scale: float, p_dropout: float, set_zero: bool,
    qkv_layout: Layout, o_format: Format, do_format: Format, dqkv_layout: Layout,
    qkv_scale_inv_format: Format, do_scale_inv_format: Format, bias_type: Bias,
    attn_mask_type: Mask, softmax_type: Softmax, window_size: Sequence[int],
    bottom_right_diagonal: bool, deterministic: bool, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor,
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, fake_dtype: torch.dtype,  # noqa: E741
    aux_ctx_tensors: Sequence[Tensor], cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None, s_quantizer: Any, dp_quantizer: Any, dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of [queries, keys, values, bias, sinks]."""
    kernel = "fused_attn_bwd"
    for quantizer in (s_quantizer, dp_quantizer, dqkv_quantizer):
        no_quantizer(kernel, quantizer)
    expect(not p_dropout, kernel, "dropout is not written")
    call = _call(
        kernel, qkv_layout, attn_mask_type, bias_type, softmax_type, window_size,
        bottom_right_diagonal, attn_scale, Q, K, V, cu_seqlens_q, cu_seqlens_kv,
        cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv,
    )  # fmt: skip
    alike = dqkv_layout == qkv_layout and o_format == do_format == call.form
    expect(alike, kernel, "gradients lie as their tensors do")
    for name, x in (("the output", O), ("its gradient", dO)):
        good = x.is_contiguous() and x.dtype == Q.dtype
        expect(good, kernel, f"{name} is of {x.dtype}, with strides {x.stride()}")
        expect(x.numel() == O.numel(), kernel, f"{name} is {tuple(x.shape)}")
    out, grad = O.detach().view(*Q.shape[:-1], -1), dO.detach().view(*Q.shape[:-1], -1)
    stats = aux_ctx_tensors[0]
    offset = aux_ctx_tensors[2] if len(aux_ctx_tensors) > 2 else None
    sinks = _sinks(kernel, softmax_type, offset, Q.shape[-2])
    gradients = [torch.zeros_like(x) for x in (Q, K, V)]
    of_sinks = None if sinks is None else torch.zeros_like(sinks)
    with torch.no_grad():
        for document in range(len(call.queries)):
            saved = _Document(
                *_of(call, document, Q, K, V),
                call.rows(out, document, False),
                call.rows(grad, document, False),
                wide(_take(call, stats, document)),
            )
            targets = _of(call, document, *gradients)
            for target, value in zip(
                targets, _gradients(call, saved, sinks, of_sinks), strict=True
            ):
                target.copy_(value)
    dsinks = None if of_sinks is None else of_sinks.view(1, -1, 1, 1)
    return [*gradients, None, dsinks]


@dataclass(frozen=True, slots=True)
class _Document:
    """Operands of a document's backward: output and its gradient [T, H, V], log-sum-exp [H, T]."""

    q_THD: Tensor
    k_SGD: Tensor
    v_SGV: Tensor
    out_THV: Tensor
    grad_THV: Tensor
    sums_HT: Tensor


def _gradients(
    call: _Call, of: _Document, sinks_H: Tensor | None, dsinks_H: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; add the sinks' gradients to ``dsinks_H``."""
    queries, keys = len(of.q_THD), len(of.k_SGD)
    hidden, dtype = call.hidden(queries, keys), of.q_THD.dtype
    heads = of.q_THD.shape[1]
    shared = heads // of.k_SGD.shape[1]
    dq = wide(torch.zeros_like(of.q_THD))
    dk, dv = wide(torch.zeros_like(of.k_SGD)), wide(torch.zeros_like(of.v_SGV))
    for head in range(heads):
        q, grad = wide(of.q_THD[:, head]), wide(of.grad_THV[:, head])
        k, v = wide(of.k_SGD[:, head // shared]), wide(of.v_SGV[:, head // shared])
        scores = (q @ k.T) * call.scale
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        probabilities = (scores - of.sums_HT[head][:, None]).exp().nan_to_num_(0.0)
        gains = (grad * wide(of.out_THV[:, head])).sum(-1)
        if sinks_H is not None and dsinks_H is not None:
            sink_probability = (sinks_H[head].to(gains.dtype) - of.sums_HT[head]).exp()
            dsinks_H[head] -= (sink_probability * gains).sum().to(dsinks_H.dtype)
        dv[:, head // shared] += wide(probabilities.to(dtype)).T @ grad
        inner = wide((probabilities * (grad @ v.T - gains[:, None])).to(dtype)) * call.scale
        dq[:, head] = inner @ k
        dk[:, head // shared] += inner.T @ q
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
