"""Megatron's output layer and loss with their backward in the forward (layers.early_loss)."""

from typing import Any

from torch import Tensor

from megatron_epp.layers.early_loss import early_backward

# Rows whose logits live at once. Large enough for the products to run at full speed.
BLOCK_TOKENS = 1024


def early_head(args: Any) -> bool:
    """Whether the last stage's head may run its backward early.

    Where hooks start the overlapped reduction during the stage's last backward, the output layer's
    gradient must come there, with the others.
    """
    hooks_reduce = args.pipeline_model_parallel_size == 1 or not args.align_grad_reduce
    return not (args.overlap_grad_reduce and hooks_reduce)


def block_tokens(args: Any) -> int:
    """Rows that the head takes at a time; 0 for all of a chunk's.

    With sequence parallelism a rank's rows are gathered with the others' first: a block of them
    would not be a block of the labels.
    """
    return 0 if args.sequence_parallel else BLOCK_TOKENS


class EarlyHead:
    """An ``output_processor`` of GPTModel.forward: token losses [1, T], backward already run.

    ``weights_1T``: the gradient of every token's loss.
    """

    def __init__(self, weights_1T: Tensor):
        self.weights_1T = weights_1T

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        runtime_gather_output: bool | None,
        compute_language_model_loss: Any,
        scale_logits: Any,
        config: Any,
        **others: Any,
    ) -> Tensor:
        def losses(hidden_t1H: Tensor, rows: slice) -> Tensor:
            logits, _ = output_layer(
                hidden_t1H, weight=output_weight, runtime_gather_output=runtime_gather_output
            )
            mine = labels if whole else labels[:, rows]
            return compute_language_model_loss(mine, scale_logits(logits))

        whole = config.sequence_parallel
        block = hidden_states.shape[0] if whole else BLOCK_TOKENS
        return early_backward(hidden_states, self.weights_1T, losses, block)
