#!/usr/bin/env python3
"""Time of attention by mask and layout: which calls compute the masked tiles of a causal mask.

    scripts/gpu/attention_masks.py [--tokens 2048 8192 32768] [--slice 8192] [--context 32768]

The first tables have chunks of one and of eight documents, by these kernels:

    bottom right    Transformer Engine's, packed documents, mask padding_causal_bottom_right
    top left        the same with the mask padding_causal; equal without context
    dense           the same for one document in SBHD, mask causal, as in training without --epp
    torch           torch's FlashAttention 2

The last table has a slice after its context. There, *two calls* computes the backward of the slice
with the log-sum-exp of whole rows, once over the context (mask padding) and once over its own rows
(padding_causal). F and B are the device's median milliseconds after 0.1 s of work. *ps a pair* is
the time of B by pairs of a query and a key that it sees. *error* is the largest error of output and
gradients for fewer tokens, relative to that of reference attention in bf16; above 2 it is WRONG,
and the exit status is 1.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from megatron_epp.layers.attention.flash import FlashKernel
from megatron_epp.layers.attention.layer_attention import Heads
from megatron_epp.layers.attention.selftest import ALLOWANCE, WORK_SECONDS, errors
from megatron_epp.layers.attention.te import MASK, TOP_LEFT_MASK
from megatron_epp.layers.attention.te_direct import LAYOUT, own_arguments
from megatron_epp.layers.attention.varlen import CuSeqlens, Kernel, Operands
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.runtime.clock import CudaClock

REPEATS, CHECK_HEADS = 5, (4, 2)
SBHD = "sbhd_sbhd_sbhd"


class Packed:
    """Transformer Engine's fused kernel of packed documents (THD) with a mask."""

    layout, form = LAYOUT, "thd"

    def __init__(self, name: str, mask: str, scale: float):
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        self.name, self.mask, self.scale, self._module = name, mask, scale, fused_attn

    def of_layers(self, before: int | None, sinks: bool) -> "Packed":
        raise ValueError("no windows, no sinks")

    def arguments(self, call: Operands, mask: str) -> dict[str, Any]:
        """Return the arguments that forward and backward have in common."""
        return own_arguments(call) | {
            "fake_dtype": call.q_THD.dtype,
            "fused_attention_backend": self._module.FusedAttnBackend["F16_arbitrary_seqlen"],
            "attn_scale": self.scale,
            "qkv_layout": self.layout,
            "o_format": self.form,
            "attn_mask_type": mask,
            "window_size": (-1, 0) if "causal" in mask else (-1, -1),
            "bottom_right_diagonal": mask == MASK,
        }

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        out_THD, needed, *_ = self._module.fused_attn_fwd(
            is_training=backward, **self.arguments(call, self.mask)
        )
        return out_THD, (out_THD, needed)

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        return self.gradients(grad_THD, call, kept, self.mask)

    def gradients(
        self, grad_THD: Tensor, call: Operands, kept: Any, mask: str
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v under ``mask``."""
        out_THD, needed = kept
        gradients = self._module.fused_attn_bwd(
            o=out_THD,
            d_o=grad_THD,
            aux_ctx_tensors=needed,
            do_format=self.form,
            dqkv_layout=self.layout,
            **self.arguments(call, mask),
        )
        return tuple(gradients[:3])


class TwoCalls(Packed):
    """The same for one slice; its backward computes context and own rows apart."""

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        own = call.q_THD.shape[0]
        context = call.k_SGD.shape[0] - own
        halves = []
        for rows, mask in ((slice(context), "padding"), (slice(context, None), TOP_LEFT_MASK)):
            k, v = call.k_SGD[rows], call.v_SGD[rows]
            lengths = CuSeqlens.of([own], [len(k)], k.device)
            part = Operands(call.q_THD, k, v, lengths)
            halves.append(self.gradients(grad_THD, part, kept, mask))
        (dq, *front), (more, *back) = halves
        return dq + more, *(torch.cat(both) for both in zip(front, back, strict=True))


class Dense(Packed):
    """The same for documents of one length, of which row after row lies in memory (SBHD)."""

    layout, form = SBHD, "sbhd"

    def arguments(self, call: Operands, mask: str) -> dict[str, Any]:
        lengths = call.cu_seqlens
        tensors = (self._apart(x, call) for x in (call.q_THD, call.k_SGD, call.v_SGD))
        padded = {"cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None}
        most = {"max_seqlen_q": lengths.most_queries, "max_seqlen_kv": lengths.most_keys}
        return (
            super().arguments(call, mask) | padded | most | dict(zip("qkv", tensors, strict=True))
        )

    def _apart(self, x_THD: Tensor, call: Operands) -> Tensor:
        """Return rows of documents one after the other as [S, B, H, D]."""
        most = call.cu_seqlens.most_queries
        return x_THD.view(-1, most, *x_THD.shape[1:]).transpose(0, 1).contiguous()

    def _packed(self, x_SBHD: Tensor) -> Tensor:
        return x_SBHD.transpose(0, 1).flatten(0, 1)

    def forward(self, call: Operands, backward: bool) -> tuple[Tensor, Any]:
        out, kept = super().forward(call, backward)
        heads, size = call.q_THD.shape[1], call.v_SGD.shape[2]
        return self._packed(out.view(*out.shape[:2], heads, size)), kept

    def backward(self, grad_THD: Tensor, call: Operands, kept: Any) -> tuple[Tensor, ...]:
        gradients = super().backward(self._apart(grad_THD, call), call, kept)
        return tuple(map(self._packed, gradients))


def milliseconds(kernel: Kernel, call: Operands, grad: Tensor) -> tuple[float, float]:
    """Return the device's median milliseconds (F, B) of a call, after work."""

    def run() -> tuple[CudaClock, Any, Any]:
        clock = CudaClock()
        clock.start()
        _, kept = kernel.forward(call, True)
        middle = clock.mark()
        kernel.backward(grad, call, kept)
        return clock, middle, clock.mark()

    end = None
    while end is None or time.perf_counter() < end:
        clock, _, stop = run()
        clock.wait(stop)
        end = end or time.perf_counter() + WORK_SECONDS  # the first call compiles
    runs = [run() for _ in range(REPEATS)]
    timed = [(clock.seconds(middle), clock.seconds(stop)) for clock, middle, stop in runs]
    forward = median(middle for middle, _ in timed)
    return 1e3 * forward, 1e3 * median(stop - middle for middle, stop in timed)


def worst_error(kernel: Kernel, lengths: Sequence[tuple[int, int]], heads: Heads) -> float:
    """Return the largest error of output and gradients, relative to reference attention's."""
    few = heads if heads.query <= CHECK_HEADS[0] else replace(heads, query=4, key=2)
    sizes = few.query, few.key, (few.size, few.size), few.scale, few.dtype
    ours, plain = errors(kernel, lengths, *sizes, torch.device("cuda"))
    return max(mine / theirs for mine, theirs in zip(ours, plain, strict=True))


def table(
    what: str,
    kernels: Mapping[Kernel, float],
    lengths: Sequence[tuple[int, int]],
    heads: Heads,
) -> dict[str, float]:
    """Print a table of ``kernels`` (with their errors); return milliseconds of B by kernel."""
    device = torch.device("cuda")
    queries, keys = zip(*lengths, strict=True)

    def draw(rows: int, count: int) -> Tensor:
        return torch.randn(rows, count, heads.size, dtype=heads.dtype, device=device)

    k, v = draw(sum(keys), heads.key), draw(sum(keys), heads.key)
    call = Operands(draw(sum(queries), heads.query), k, v, CuSeqlens.of(queries, keys, device))
    grad = draw(sum(queries), heads.query)
    pairs = sum(q * (2 * s - q + 1) / 2 for q, s in lengths)
    print(f"\n{what}\n{'kernel':14}      F ms      B ms  ps a pair  error", flush=True)
    of_kernel = {}
    for kernel, error in kernels.items():
        forward, backward = milliseconds(kernel, call, grad)
        of_kernel[kernel.name] = backward
        print(
            f"{kernel.name:14}  {forward:8.3f}  {backward:8.3f}  {1e9 * backward / pairs:9.1f}  "
            f"{error:5.2f}{'' if error <= ALLOWANCE else '  WRONG'}",
            flush=True,
        )
    return of_kernel


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    for name, value in (("slice", 8192), ("context", 32768), ("heads", 32), ("groups", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--size", type=int, default=128, help="of a head (default: 128)")
    parser.add_argument("--checked", type=int, default=1024, help="tokens whose errors are judged")
    wanted = parser.parse_args()
    cpu_host.install_cpu_host()
    if not cpu_host.has_gpu_kernels():
        sys.exit("attention_masks: no CUDA GPU here")
    scale, few = wanted.size**-0.5, wanted.checked
    heads = Heads(wanted.heads, wanted.groups, wanted.size, scale, torch.bfloat16)
    bottom_right, torchs = Packed("bottom right", MASK, scale), FlashKernel(scale)
    dense = Dense("dense", "causal", scale)
    kernels = bottom_right, Packed("top left", TOP_LEFT_MASK, scale), dense, torchs
    whole = {each: worst_error(each, [(few // 8, few // 8)] * 8, heads) for each in kernels}
    packed = {each: error for each, error in whole.items() if each is not dense}
    kernels = bottom_right, TwoCalls("two calls", MASK, scale), torchs
    sliced = {each: worst_error(each, [(few // 4, few)], heads) for each in kernels}
    found: dict[str, dict[str, float]] = {}
    for tokens in wanted.tokens:
        for documents, tried in ((1, whole), (8, packed)):
            size = tokens // documents
            name = f"{documents} x {size} tokens"
            found[name] = table(name, tried, [(size, size)] * documents, heads)
    name = f"a slice of {wanted.slice} tokens after {wanted.context}"
    lengths = [(wanted.slice, wanted.slice + wanted.context)]
    found[name] = table(name, sliced, lengths, heads)
    print()
    for name, of_kernel in found.items():
        first, *others = of_kernel
        shown = (f"{kernel} {of_kernel[kernel] / of_kernel[first]:.2f}" for kernel in others)
        print(f"{name}: B beside {first}: {', '.join(shown)}")
    best = {name: min(of, key=lambda kernel: of[kernel]) for name, of in found.items()}
    where = [name for name, kernel in best.items() if kernel == torchs.name]
    print(f"torch's B is the fastest: {', '.join(where) or 'nowhere'}")
    return int(max(*whole.values(), *sliced.values()) > ALLOWANCE)


if __name__ == "__main__":
    sys.exit(main())
