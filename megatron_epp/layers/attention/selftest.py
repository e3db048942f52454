"""Self-test of an attention kernel on this device, before training.

If a kernel aligns the mask at the wrong end, or omits a gradient, training raises no error. Each
kind of call is therefore made once with few rows and compared with reference attention in float64.
The tolerance is ``ALLOWANCE`` times the error of reference attention in the kernel's dtype; for the
gradient of the sinks, this error counts as at least ``LUCK`` times the dtype's epsilon.

:func:`backward_seconds` compares the speed of kernels.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.attention.layer_attention import Heads
from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.varlen import CuSeqlens, Kernel, Operands
from megatron_epp.runtime.clock import CudaClock

# (queries, keys) of the documents of a call.
CALLS: dict[str, tuple[tuple[int, int], ...]] = {
    "a document": ((192, 192),),
    "documents side by side": ((64, 64), (1, 1), (130, 130)),
    "a slice after its context": ((96, 352),),
    "a slice of few tokens": ((5, 300),),
}
# Longer unsliced documents would take too much memory in the reference: wider windows are tested
# with slices only.
MOST_WINDOW = 1024
OF_SINKS = "gradient of the sinks"
NAMES = (
    "output",
    "gradient of the queries",
    "gradient of the keys",
    "gradient of the values",
    OF_SINKS,
)
ALLOWANCE = 2.0  # factor on the error of reference attention in the same dtype
# A sink's gradient is one number, which sums the rounding errors of all rows. That reference
# attention is nearer than this many steps of the dtype is chance.
LUCK = 2.0
SEED = 20260117
# Tokens of the timed document, timed backwards, and seconds of work before them, after which a GPU
# has the clock rate of training.
TIMED_TOKENS, REPEATS, WORK_SECONDS = 4096, 7, 0.1


def require_right(
    kernel: Kernel,
    heads: int,
    groups: int,
    head_size: int,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
    value_size: int = 0,
    before: int | None = None,
    sinks: bool = False,
) -> None:
    """Test the forward and backward of ``kernel`` against reference attention on this device.

    Args:
        kernel: the kernel.
        heads: number of query heads.
        groups: number of key heads.
        head_size: head size of queries and keys.
        scale: scale of the logits.
        dtype: dtype of the tensors.
        device: device of the tensors.
        value_size: head size of values; 0 means ``head_size``.
        before: number of earlier tokens that a query sees (window); None for all.
        sinks: whether there are sinks.

    Raises:
        ValueError: an error exceeds its tolerance; the message names the kernel, the call and the
            tensor.
        RuntimeError: the kernel does not support a call.
    """
    sizes = head_size, value_size or head_size
    for what, lengths in _calls(before).items():
        kernel_errors, reference_errors = errors(
            kernel, lengths, heads, groups, sizes, scale, dtype, device, before, sinks
        )
        for name, error, reference_error in zip(
            NAMES, kernel_errors, reference_errors, strict=False
        ):
            if name == OF_SINKS:
                reference_error = max(reference_error, LUCK * torch.finfo(dtype).eps)
            if not error <= ALLOWANCE * reference_error:  # NaN fails too
                raise ValueError(
                    f"attention back end {kernel.name}, {what}: the {name} is off by {error:.2g} "
                    f"of its size, plain attention in {str(dtype).removeprefix('torch.')} by "
                    f"{reference_error:.2g}; expected at most {ALLOWANCE:g} times that"
                )


def _calls(before: int | None) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return by name each call's documents (queries, keys); slices have more keys than a window."""
    if before is None:
        return CALLS
    long = min(before, MOST_WINDOW) + 64
    return {
        "a document in windows": ((long, long),),
        "documents in windows side by side": ((long, long), (1, 1), (50, 50)),
        "a slice after the end of its context": ((96, before + 96),),
        "a slice of few tokens after the end of its context": ((5, before + 5),),
    }


def errors(
    kernel: Kernel,
    lengths: Sequence[tuple[int, int]],
    heads: int,
    groups: int,
    sizes: tuple[int, int],
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
    before: int | None = None,
    sinks: bool = False,
) -> tuple[list[float], list[float]]:
    """Return the errors of ``kernel`` and of reference attention in ``dtype``.

    Each list has the errors of the output, of the gradients of q, k and v, and of the sinks'
    gradient if there are sinks. An error is the 2-norm of the difference from the float64 result,
    relative to the 2-norm of this result. The gradient of a sink is a sum; its error is relative to
    the 2-norm of the summands, because these may cancel.

    Args:
        kernel: the kernel.
        lengths: (number of queries, number of keys) of every document.
        heads: number of query heads.
        groups: number of key heads.
        sizes: (head size of queries and keys, head size of values).
        scale: scale of the logits.
        dtype: dtype of the tensors.
        device: device of the tensors.
        before: number of earlier tokens that a query sees (window); None for all.
        sinks: whether there are sinks.
    """
    size, value = sizes
    queries, keys = zip(*lengths, strict=True)
    cu_seqlens = CuSeqlens.of(queries, keys, device)
    generator = torch.Generator().manual_seed(SEED)

    def draw(rows: int, count: int, width: int) -> Tensor:
        tensor = torch.randn(rows, count, width, generator=generator, device="cpu")
        return tensor.to(device, dtype)

    q, grad = draw(sum(queries), heads, size), draw(sum(queries), heads, value)
    k, v = draw(sum(keys), groups, size), draw(sum(keys), groups, value)
    offsets = draw(1, heads, 1).flatten() if sinks else None

    def call(to: torch.dtype) -> Operands:
        of_sinks = None if offsets is None else offsets.to(to)
        return Operands(q.to(to), k.to(to), v.to(to), cu_seqlens, of_sinks)

    written_out, exact = ReferenceKernel(scale, before), call(torch.float64)
    right, outputs, reference = (
        _run(tried, grad.to(to), call(to))
        for tried, to in ((written_out, torch.float64), (kernel, dtype), (written_out, dtype))
    )
    scales = [tensor.norm() for tensor in right]
    if offsets is not None:
        scales[-1] = (_sink_weights(written_out, exact) * right[0] * grad.double()).norm()
    return _distances(outputs, right, scales), _distances(reference, right, scales)


def backward_seconds(
    kernels: Sequence[Kernel],
    heads: Heads,
    device: torch.device,
    clock: Callable[[], Any] = CudaClock,
) -> list[float]:
    """Return, for each kernel, the median seconds of the backward of ``TIMED_TOKENS`` tokens.

    The tokens are one document. The kernels run in turn, ``REPEATS`` times each.

    Args:
        kernels: kernels to compare.
        heads: heads of the calls.
        device: device of the tensors.
        clock: function that creates the clock (runtime/clock.py) of one backward.
    """

    def zeros(count: int, size: int) -> Tensor:
        return torch.zeros(TIMED_TOKENS, count, size, dtype=heads.dtype, device=device)

    lengths = CuSeqlens.of([TIMED_TOKENS], [TIMED_TOKENS], device)
    qkv = (
        zeros(heads.query, heads.size),
        zeros(heads.key, heads.size),
        zeros(heads.key, heads.value),
    )
    call, grad_THD = Operands(*qkv, lengths), zeros(heads.query, heads.value)

    def run(kernel: Kernel) -> Callable[[], float]:
        _, kept = kernel.forward(call, True)
        timer = clock()
        timer.start()
        kernel.backward(grad_THD, call, kept)
        stop = timer.mark()
        return lambda: timer.seconds(stop)

    for kernel in kernels:  # kernels are chosen and compiled
        run(kernel)()
    end = time.perf_counter() + WORK_SECONDS
    while time.perf_counter() < end:
        run(kernels[-1])()
    runs = [[run(kernel) for kernel in kernels] for _ in range(REPEATS)]
    return [median(seconds() for seconds in of_kernel) for of_kernel in zip(*runs, strict=True)]


def _sink_weights(kernel: ReferenceKernel, call: Operands) -> Tensor:
    """Return the sinks' part of every row's softmax [T, H, 1]."""
    ones = torch.ones_like(call.tensors[2][..., :1])
    out_TH1, _ = kernel.forward(dataclasses.replace(call, v_SGD=ones), False)
    return 1 - out_TH1


def _run(kernel: Kernel, grad: Tensor, call: Operands) -> tuple[Tensor, ...]:
    out, kept = kernel.forward(call, True)
    return out, *kernel.backward(grad, call, kept)


def _distances(
    outputs: Sequence[Tensor], right: Sequence[Tensor], scales: Sequence[Tensor]
) -> list[float]:
    rows = zip(outputs, right, scales, strict=True)
    return [float((output.double() - exact).norm() / scale) for output, exact, scale in rows]
