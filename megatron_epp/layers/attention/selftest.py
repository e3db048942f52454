"""Whether a kernel computes what attention is, on this device: asked before training, not after.

A kernel that aligns the mask at the other end, or forgets a gradient, trains without a word. So
each kind of call is made once with few rows and judged against plain attention in float64; what
rounding alone may cost is known from plain attention in the kernel's own number format.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_epp.layers.attention.reference import ReferenceKernel
from megatron_epp.layers.attention.varlen import CuSeqlens, Kernel, Operands

# (queries, keys) of the documents of a call.
CALLS: dict[str, tuple[tuple[int, int], ...]] = {
    "a document": ((192, 192),),
    "documents side by side": ((64, 64), (1, 1), (130, 130)),
    "a slice behind its context": ((96, 352),),
    "a slice of few tokens": ((5, 300),),
}
# Behind a document of so many tokens the reference would hold too much: wider windows are tried in
# slices alone.
MOST_WINDOW = 1024
OF_SINKS = "gradient of the sinks"
NAMES = (
    "output",
    "gradient of the queries",
    "gradient of the keys",
    "gradient of the values",
    OF_SINKS,
)
ALLOWANCE = 2.0  # times the error of plain attention in the same number format
# A sink has one number for a gradient, in which the roundings of all rows' outputs meet: whether
# plain attention's is nearer than so many of the format's steps is luck.
LUCK = 2.0
SEED = 20260117


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
    """Raise a ValueError that names ``kernel`` and what it gets wrong, if anything.

    ``value_size``: of values; 0: ``head_size``. ``before``, ``sinks``: of the layers that it is
    for, which see so many inputs in front of each (None: all), with or without sinks.
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
            if not error <= ALLOWANCE * reference_error:  # nan is wrong, too
                raise ValueError(
                    f"attention back end {kernel.name}, {what}: the {name} is off by {error:.2g} "
                    f"of its size, plain attention in {str(dtype).removeprefix('torch.')} by "
                    f"{reference_error:.2g}; expected at most {ALLOWANCE:g} times that"
                )


def _calls(before: int | None) -> dict[str, tuple[tuple[int, int], ...]]:
    """In windows: documents that reach out of them, and slices with as much context as they see."""
    if before is None:
        return CALLS
    long = min(before, MOST_WINDOW) + 64
    return {
        "a document in windows": ((long, long),),
        "documents in windows side by side": ((long, long), (1, 1), (50, 50)),
        "a slice behind the end of its context": ((96, before + 96),),
        "a slice of few tokens behind the end of its context": ((5, before + 5),),
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
    """Return the errors of ``kernel`` and of plain attention in ``dtype``.

    Those of the output and of the gradients of q, k, v and the sinks: the root-mean-square distance
    to float64 over the size of the right answer; of the sinks over the size of what adds up to it,
    since terms of both signs may leave next to nothing. ``sizes``: of heads of q and k, and of v.
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


def _sink_weights(kernel: ReferenceKernel, call: Operands) -> Tensor:
    """Return the share of the softmax that every row's sinks take: [T, H, 1]."""
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
