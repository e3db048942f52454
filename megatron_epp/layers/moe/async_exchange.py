"""All-to-all whose start and whose wait are two autograd nodes, with other work between them.

    F    start: send x ...  other work  ... wait: y
    B    start: wait for dx ...  other work  ... wait: send dy

Autograd runs nodes in the reverse order of their creation. The order of exchanges in backward is
therefore the reverse of that in forward, and equal on all ranks of the group. While a gradient is
exchanged, it is not in the graph: the backward of the wait returns a placeholder of the same shape,
which the backward of the start ignores.
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class AsyncExchange:
    """One all-to-all of rows, and the opposite all-to-all of their gradients.

    Args:
        group: Ranks that exchange rows.
        sent: Number of rows that this rank sends to each rank of the group.
        received: Number of rows that this rank receives from each rank of the group.
    """

    def __init__(self, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]):
        self._group, self._sent, self._received = group, sent, received
        self._buffers: tuple[Tensor, ...] = ()
        self.gradients: tuple[Tensor, ...] = ()  # underway, from the backward of wait to start's
        self._in_flight: list[tuple[Any, Tensor]] = []  # handles, and the tensors that they send

    def start(self, *tensors: Tensor) -> None:
        """Start to send the rows of ``tensors``; call :meth:`wait` before the next use."""
        self._buffers = _Start.apply(self, *tensors)

    def wait(self) -> tuple[Tensor, ...]:
        """Return the received rows of every tensor."""
        buffers, self._buffers = self._buffers, ()
        return _Wait.apply(self, *buffers)

    def launch(self, tensors: Sequence[Tensor], back: bool) -> tuple[Tensor, ...]:
        """Start the all-to-all of ``tensors``, or ``back`` of their gradients; return buffers."""
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        buffers = []
        for tensor in tensors:
            buffer = tensor.new_empty((sum(received), *tensor.shape[1:]))
            tensor = tensor.contiguous()
            handle = dist.all_to_all_single(
                buffer, tensor, received, sent, group=self._group, async_op=True
            )
            self._in_flight.append((handle, tensor))
            buffers.append(buffer)
        return tuple(buffers)

    def finish(self) -> None:
        """Wait for the all-to-all underway; on a GPU, the present stream waits."""
        for handle, _ in self._in_flight:
            handle.wait()
        self._in_flight.clear()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return exchange.launch(tensors, back=False)

    @staticmethod
    def backward(ctx: Any, *placeholders: Tensor):
        exchange = ctx.exchange
        exchange.finish()
        gradients, exchange.gradients = exchange.gradients, ()
        return None, *gradients


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, exchange: AsyncExchange, *buffers: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        exchange.finish()
        ctx.mark_dirty(*buffers)  # the exchange has filled them
        return buffers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor):
        ctx.exchange.gradients = ctx.exchange.launch(gradients, back=True)
        return None, *gradients
