"""Fused LM head and loss, whose backward runs inside F (layers.lm_head.fused_loss)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_epp.cost.analytic import HEAD_BLOCK_TOKENS, head_block_tokens
from megatron_epp.layers.concatenated import concatenated
from megatron_epp.layers.lm_head.fused_loss import Losses, fused_backward
from megatron_epp.mcore.patching import cpu_host

# Rows whose logits are computed at a time on a CPU, where there is no launch overhead.
CPU_BLOCK_TOKENS = 1024


def fused_head(args: Any) -> bool:
    """Return whether the backward of the LM head may run in F.

    The result is False if DDP's hooks start an overlapped gradient reduction in the stage's last
    backward, because this backward must then also compute the output layer's gradient.
    """
    hooks_reduce = args.pipeline_model_parallel_size == 1 or not args.align_grad_reduce
    return not (args.overlap_grad_reduce and hooks_reduce)


def block_tokens(args: Any) -> int:
    """Return the number of rows (tokens) that the LM head processes at a time."""
    words = args.padded_vocab_size // args.tensor_model_parallel_size
    return rows_at_once(words, cpu_host.has_gpu())


def rows_at_once(words: int, on_gpu: bool, stages: int = 1) -> int:
    """Return the number of rows (tokens) whose logits are computed at a time.

    ``words`` is the number of vocabulary rows of this rank. With vocabulary parallelism, this rank
    has 1 / ``stages`` of the vocabulary rows of a tensor-parallel rank. ``on_gpu`` is whether the
    logits are on a GPU.
    """
    if on_gpu:
        return head_block_tokens(words)
    return min(CPU_BLOCK_TOKENS * stages, HEAD_BLOCK_TOKENS[0])


class FusedHead:
    """Fused LM head and loss: an ``output_processor`` of GPTModel.forward.

    The call runs the backward of the head and returns the losses of T tokens: [1, T], or [1 + D, T]
    with D MTP modules. ``weights_1T``, of the same shape, is the gradient with respect to the
    losses. With sequence parallelism, the call all-gathers the rows once before the head, so that
    blocks of rows match blocks of labels. It reduce-scatters the gradients of the rows once.
    """

    def __init__(self, weights_1T: Tensor):
        self.weights_1T = weights_1T

    def __call__(self, **arguments: Any) -> Tensor:
        """Run the backward of the LM head, and return the losses."""
        layer = arguments["output_layer"]
        results = [
            self._early(hidden_t1H, self.weights_1T[depth : depth + 1], losses, layer)
            for depth, (hidden_t1H, losses) in enumerate(_predictions(**arguments))
        ]
        return concatenated(results)

    def _early(
        self, hidden_t1H: Tensor, weights_1T: Tensor, losses: Losses, output_layer: Any
    ) -> Tensor:
        block = rows_at_once(output_layer.output_size_per_partition, hidden_t1H.is_cuda)
        if not output_layer.sequence_parallel:
            return fused_backward(hidden_t1H, weights_1T, losses, block)
        group = output_layer.tp_group
        with _on_gathered_rows(output_layer):
            return fused_backward(
                hidden_t1H,
                weights_1T,
                losses,
                block,
                gather=partial(gather_from_sequence_parallel_region, group=group),
                scatter=partial(reduce_scatter_to_sequence_parallel_region, group=group),
            )


def losses_of_each(**arguments: Any) -> Tensor:
    """Return the losses [1 + D, T] of T tokens, for the decoder and D MTP modules.

    This function is an ``output_processor`` of GPTModel.forward. Unlike :class:`FusedHead`, it runs
    no backward.
    """
    parts = [losses(hidden_t1H, slice(None)) for hidden_t1H, losses in _predictions(**arguments)]
    return concatenated(parts)


def _predictions(
    *,
    hidden_states: Tensor | tuple[Tensor, ...],
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Any,
    scale_logits: Any,
    config: Any,
    **others: Any,
) -> Iterator[tuple[Tensor, Losses]]:
    """Yield a pair (hidden states, loss function) for the decoder, then for each MTP module.

    The loss function takes hidden states and a slice of rows, and returns the losses of these rows.
    With --mtp-detach-heads, MTP losses do not train the output layer.
    """

    def losses(depth: int, weight: Tensor | None, hidden_t1H: Tensor, rows: slice) -> Tensor:
        logits, _ = output_layer(
            hidden_t1H, weight=weight, runtime_gather_output=runtime_gather_output
        )
        return compute_language_model_loss(labels[depth : depth + 1, rows], scale_logits(logits))

    every = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
    for depth, hidden_t1H in enumerate(every):
        weight = output_weight
        if depth and config.mtp_detach_heads:
            weight = (output_layer.weight if weight is None else weight).detach()
        yield hidden_t1H, partial(losses, depth, weight)


@contextmanager
def _on_gathered_rows(output_layer: ColumnParallelLinear) -> Iterator[None]:
    """Disable the all-gather and the gradient reduction of ``output_layer`` in this context."""
    before = output_layer.sequence_parallel, output_layer.disable_grad_reduce
    output_layer.sequence_parallel, output_layer.disable_grad_reduce = False, True
    try:
        yield
    finally:
        output_layer.sequence_parallel, output_layer.disable_grad_reduce = before
