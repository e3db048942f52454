"""Optimizer steps and norms over lists of tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.engine.operands import expect, wide

Lists = Sequence[Sequence[Tensor]]


def _aligned(kernel: str, lists: Lists, count: int) -> None:
    expect(len(lists) == count, kernel, f"{len(lists)} lists, expected {count}")
    for tensors in zip(*lists, strict=True):
        sizes = {x.numel() for x in tensors}
        expect(len(sizes) == 1, kernel, f"tensors of {sorted(sizes)} elements side by side")
        dense = all(x.is_contiguous() for x in tensors)
        expect(dense, kernel, "a tensor is read as if in one piece")


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, lists: Lists, scale: float) -> None:
    """Write each source times ``scale`` to its target; set ``noop_flag`` if one is not finite."""
    _aligned("multi_tensor_scale", lists, 2)
    for source, target in zip(*lists, strict=True):
        values = wide(source) * float(scale)
        if not values.isfinite().all():
            noop_flag.fill_(1)
        target.copy_(values.view(target.shape))


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, lists: Lists, scale: Tensor
) -> None:
    """Run :func:`multi_tensor_scale` with a scale that is a tensor."""
    multi_tensor_scale(chunk_size, is_infinite, lists, float(scale))


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, lists: Lists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Return the norm over all tensors [1] and, if ``per_tensor``, the norm of each tensor."""
    _aligned("multi_tensor_l2norm", lists, 1)
    each = torch.stack([wide(x).norm() for x in lists[0]])
    return each.norm()[None], each if per_tensor else each.new_empty(0)


def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, lists: Lists, lr: float, beta1: float, beta2: float,
    epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Take a step of Adam.

    ``lists`` are gradients, parameters, first moments, second moments and, for 16-bit parameters,
    main copies. ``mode`` 1 decouples weight decay (AdamW); 0 adds it to the gradient.
    """
    kernel = "multi_tensor_adam"
    _aligned(kernel, lists, 5 if len(lists) == 5 else 4)
    if int(noop_flag):
        return
    first_correction = 1 - beta1**step if bias_correction else 1.0
    second_correction = 1 - beta2**step if bias_correction else 1.0
    for tensors in zip(*lists, strict=True):
        gradient, parameter, first, second = tensors[:4]
        main = tensors[4] if len(tensors) == 5 else parameter
        values, slope = wide(main), wide(gradient).view(main.shape)
        if mode == 0:
            slope = slope + weight_decay * values
        m = wide(first) * beta1 + (1 - beta1) * slope.view(first.shape)
        v = wide(second) * beta2 + (1 - beta2) * slope.view(second.shape).square()
        update = (m / first_correction) / ((v / second_correction).sqrt() + epsilon)
        update = update.view(main.shape)
        if mode == 1:
            update = update + weight_decay * values
        values = values - lr * update
        first.copy_(m)
        second.copy_(v)
        main.copy_(values)
        if main is not parameter:
            parameter.copy_(values.view(parameter.shape))
