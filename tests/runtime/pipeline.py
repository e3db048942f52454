"""A small model whose stages run every kind of op on whatever device they are put: layers whose
results are saved or offloaded, a head that is spread or runs its backward early, and a rendezvous
of the replicas in every op. ``reference`` runs it on the host, op by op and in one thread."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.ir import HandOver, Kind, Op, Payload, Plan, StageOp, lower
from megatron_epp.ir.program.sequence import sequence
from megatron_epp.layers.lm_head.fused_loss import fused_backward

WIDTH, LAYERS, ROWS = 6, 3, 12  # 12 rows of 6 doubles: more than the least that is offloaded


def drawn(*seed: int, rows: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) / 2


class Stage:
    """``modes``: o for a layer whose saved tensors leave the device, k for one that keeps them.
    ``host_store``: a HostStore; ``group``: ranks that compute every op together, None for nobody.
    ``at``: is called when an op begins."""

    def __init__(
        self,
        plan: Plan,
        stage: int,
        device: torch.device,
        host_store: Any,
        letters: str = "k" * LAYERS,
        group: Any = None,
        at: Callable[[Op], object] = lambda op: None,
    ):
        self.plan, self.stage, self.device, self.host = plan, stage, device, host_store
        self.modes, self.group, self.at = letters, group, at
        self.is_last, self.spread = stage == plan.stages - 1, plan.vocabulary_parallel
        self.weights = [
            drawn(1, stage, layer).to(device).requires_grad_() for layer in range(LAYERS)
        ]
        self.words = drawn(2, stage).to(device)
        self.words_gradient = torch.zeros(WIDTH, WIDTH, dtype=torch.float64, device=device)
        self.met = torch.zeros(1, dtype=torch.float64, device=device)
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._aside: dict[int, list[Tensor]] = {}
        self._of_head: dict[int, Tensor] = {}
        self._loss_gradient: dict[int, Tensor] = {}
        self.handed: list[Tensor] = []

    def results(self) -> list[Tensor]:
        return [*(w.grad for w in self.weights), self.words_gradient, self.met]

    def _begin(self, op: Op, tensor: Tensor | None) -> None:
        self.at(op)
        if self.group is None:
            return
        if tensor is None:
            tensor = self.weights[0].detach()
        mine = tensor.sum()[None]
        dist.all_reduce(mine, group=self.group)
        self.met += mine

    def _hand_over(self, tensor: Tensor) -> Tensor:
        self.handed.append(tensor)
        return tensor

    def forward(self, chunk: int, received: Tensor | None) -> Tensor | None:
        self._begin(Op(Kind.FORWARD, chunk), received)
        if received is None:
            rows = drawn(3, chunk, rows=ROWS + self.plan.chunks[chunk].tokens)
            received = (rows.pin_memory() if self.device.type == "cuda" else rows).to(
                self.device, non_blocking=True
            )
        x = y = received.requires_grad_()
        for letter, weight in zip(self.modes, self.weights, strict=True):
            if letter == "o" and not self.plan.forward_only:
                with self.host.layer(chunk, lambda tensor: False):
                    y = (y @ weight).tanh()
            else:
                y = (y @ weight).tanh()
        self.host.wait()
        if self.is_last and not self.spread:
            weights = torch.ones(1, len(y), dtype=y.dtype, device=self.device)
            y = fused_backward(y[:, None], weights, self._losses, block=5).sum()
        self._saved[chunk] = x, y
        if self.is_last and not self.spread:
            return None
        return self._hand_over(y.detach())

    def _losses(self, part: Tensor, rows: slice) -> Tensor:
        return (part @ self.words).square().sum(-1).transpose(0, 1) / 2

    def head(self, chunk: int, received: Tensor) -> Tensor | None:
        self._begin(Op(Kind.HEAD, chunk), received)
        self._of_head[chunk] = received.clone()
        made = received + (received @ self.words).tanh()
        if self.is_last:
            self._loss_gradient[chunk] = made
            return None
        return self._hand_over(made)

    def head_weight(self, chunk: int) -> None:
        self._begin(Op(Kind.HEAD_WEIGHT, chunk), None)
        x = self._of_head.pop(chunk)
        self.words_gradient += x.T @ x

    def _gradients(self, kind: Kind, chunk: int, gradient: Tensor | None) -> list[Tensor]:
        self._begin(Op(kind, chunk), gradient)
        x, y = self._saved.pop(chunk)
        self.host.prefetch(chunk)
        if self.is_last and self.spread:
            gradient = self._loss_gradient.pop(chunk)
        return list(torch.autograd.grad(y, (x, *self.weights), gradient))

    def _add(self, gradients: Sequence[Tensor]) -> None:
        for weight, more in zip(self.weights, gradients, strict=True):
            weight.grad = more if weight.grad is None else weight.grad.add_(more)

    def backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        first, *others = self._gradients(Kind.BACKWARD, chunk, gradient)
        self._add(others)
        return None if self.stage == 0 else self._hand_over(first)

    def input_backward(self, chunk: int, gradient: Tensor | None) -> Tensor | None:
        first, *self._aside[chunk] = self._gradients(Kind.INPUT, chunk, gradient)
        return None if self.stage == 0 else self._hand_over(first)

    def weight_backward(self, chunk: int) -> None:
        self._begin(Op(Kind.WEIGHT, chunk), None)
        self._add(self._aside.pop(chunk))

    def abandon(self) -> None:
        self._saved.clear()


def shape_of(plan: Plan) -> Callable[[Any], tuple[int, int]]:
    return lambda message: (ROWS + plan.chunks[message.chunk].tokens, WIDTH)


def drawn_letters(stage: int, seed: int) -> str:
    return "".join(Random(f"{stage} {seed}").choice("ok") for _ in range(LAYERS))


class _Keeping:
    """A store that leaves everything where it is."""

    def wait(self) -> None: ...

    def prefetch(self, chunk: int) -> None: ...


def on_host(plan: Plan, stage: int, at: Callable[[Op], object] = lambda op: None) -> Stage:
    """The stage on a host without a GPU."""
    return Stage(plan, stage, torch.device("cpu"), _Keeping(), at=at)


def reference(plan: Plan) -> list[list[Tensor]]:
    """Every stage's results, ``met`` aside."""
    stages = [on_host(plan, stage) for stage in range(plan.stages)]
    sends = {}  # by (stage, op): its message
    for rank, program in enumerate(lower(plan)):
        for item in program:
            if isinstance(item, StageOp):
                maker = item.stage, item.op
            elif isinstance(item, Op):
                maker = plan.stages_of(rank)[0], item
            elif isinstance(item, HandOver) or getattr(item, "kind", None) is Kind.SEND:
                sends[maker] = item.message
    wants = {
        Kind.FORWARD: Payload.ACTIVATION,
        Kind.BACKWARD: Payload.GRADIENT,
        Kind.INPUT: Payload.GRADIENT,
        Kind.HEAD: Payload.HEAD,
    }
    do: dict[Kind, str] = {
        Kind.FORWARD: "forward",
        Kind.BACKWARD: "backward",
        Kind.INPUT: "input_backward",
        Kind.WEIGHT: "weight_backward",
        Kind.HEAD: "head",
        Kind.HEAD_WEIGHT: "head_weight",
    }
    boxes: dict[tuple, Tensor] = {}
    for stage, op in sequence(plan):
        given = (boxes.pop((stage, wants[op.kind], op.chunk), None),) if op.kind in wants else ()
        made = getattr(stages[stage], do[op.kind])(op.chunk, *given)
        if made is not None:
            message = sends[stage, op]
            boxes[message.target, message.payload, op.chunk] = made.clone()
    return [one.results()[:-1] for one in stages]
