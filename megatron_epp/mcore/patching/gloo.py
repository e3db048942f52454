"""gloo on a CPU-only host: one network device per process, and unequal rows per rank.

torch creates a device for every gloo group, and a thread for every device. While no messages
arrive, each thread wakes about 125 times a second. Megatron creates dozens of groups. With as many
ranks as cores, these threads add one to five per cent to the time of an op.

Experts with tensor parallelism pass lists of tensors of different sizes
(core/tensor_parallel/mappings.py, with split sizes). NCCL supports such lists. gloo requires
tensors of equal size, and has no reduce-scatter. gloo's all-to-all supports any sizes, so both
replacements use all-to-all.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def share_gloo_device() -> None:
    """Make later gloo groups use the first group's device, unless they are created with options."""
    group: Any = dist.ProcessGroupGloo
    original = group.__init__
    first: list[Any] = []

    @wraps(original)
    def init(self: Any, store: Any, rank: int, size: int, *arguments: Any, **named: Any) -> None:
        settings = (*arguments, *named.values())
        if not all(isinstance(setting, timedelta) for setting in settings):
            original(self, store, rank, size, *arguments, **named)
        elif not first:
            original(self, store, rank, size, *arguments, **named)
            first.append(self.options)
        else:
            options = group._Options()
            options._devices, options._threads = first[0]._devices, first[0]._threads
            for timeout in settings:
                options._timeout = timeout
            original(self, store, rank, size, options)

    group.__init__ = init


def take_unequal_rows() -> None:
    """Replace torch.distributed.all_gather and torch.distributed.reduce_scatter."""
    dist.all_gather = _gathering(dist.all_gather)
    dist.reduce_scatter = _summing(dist.reduce_scatter)


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def all_gather(
        tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        sizes = [len(part) if part.dim() else 1 for part in tensor_list]
        if async_op or len(set(sizes)) == 1:
            return original(tensor_list, tensor, group, async_op)
        ranks = len(sizes)
        gathered = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
        sent = torch.cat([tensor] * ranks)
        dist.all_to_all_single(gathered, sent, sizes, [len(tensor)] * ranks, group)
        for part, received in zip(tensor_list, gathered.split(sizes), strict=True):
            part.copy_(received)
        return None

    return all_gather


def _summing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def reduce_scatter(
        output: Tensor,
        input_list: Sequence[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or op != dist.ReduceOp.SUM:
            return original(output, input_list, op, group, async_op)
        sizes, rows = [len(part) for part in input_list], len(output)
        received = output.new_empty((len(sizes) * rows, *output.shape[1:]))
        dist.all_to_all_single(
            received, torch.cat(list(input_list)), [rows] * len(sizes), sizes, group
        )
        output.copy_(received.view(len(sizes), *output.shape).sum(0))
        return None

    return reduce_scatter
