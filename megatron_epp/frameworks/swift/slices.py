"""Slicing mode in ms-swift: an adapter of packed micro-batches.

ms-swift's forward step shifts labels along a whole micro-batch; a document begins where a position
is 0. The adapter's forward step computes slices instead. ``MegatronTrainer.loss_func`` computes the
losses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_epp.mcore.loops.adapter import (
    loss_function_of,
    parts_of,
    refuse_asked,
)
from megatron_epp.mcore.loops.adapters.packed import documents_of
from megatron_epp.mcore.loops.adapters.token_samples import on_this_device, zigzag_part
from megatron_epp.mcore.loops.microbatch_iterators import SingleValue

_STEP = "MegatronTrainer.forward_step"  # the trainer of pre-training and supervised fine-tuning
_TEXT = frozenset(
    [
        *("input_ids", "labels", "loss_scale", "position_ids", "text_position_ids"),
        *("attention_mask", "attention_mask_2d", "seq_lens"),
    ]
)


class SwiftPacks:
    """Adapter of packed micro-batches (--packing, or --padding_free)."""

    partial_loss = True  # swift's own sharding gives a rank these rows

    def lengths(self, micro_batch: Any) -> Sequence[int]:
        """Return the number of tokens of every document."""
        return tuple(stop - start for start, stop in documents_of(_with_boundaries(micro_batch)))

    def rows(
        self, micro_batch: Any, document: int, start: int, stop: int
    ) -> Mapping[str, Tensor | None]:
        """Return tokens [start, stop) of a document and their labels: [1, stop - start] each."""
        packed = _with_boundaries(micro_batch)
        first, _ = documents_of(packed)[document]
        rows = slice(None), slice(first + start, first + stop)
        return parts_of(packed, ("input_ids", "labels"), rows)

    def sliced(self, forward_step: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Return the forward step that computes slices in place of the loop's ``forward_step``.

        Raises:
            ValueError: The forward step is not MegatronTrainer's, or slices do not support the
                trainer's arguments.
        """
        trainer = getattr(forward_step, "__self__", None)
        name = getattr(forward_step, "__qualname__", type(forward_step).__name__)
        if trainer is None or name != _STEP:
            raise ValueError(
                f"slices of ms-swift's micro-batches: the forward step is {name}; expected "
                f"{_STEP}: use Megatron's own schedule (no attach)"
            )
        args = trainer.args
        asked = {
            f"task_type {args.task_type}": args.task_type != "causal_lm",
            "cp_partition_mode contiguous": args.context_parallel_size > 1
            and getattr(args, "cp_partition_mode", "zigzag") != "zigzag",
            "routing replay": getattr(trainer, "enable_routing_replay", False),
        }
        refuse_asked("ms-swift's", "its arguments ask", asked)
        self._loops_own, self._model = forward_step, model
        return _token_losses

    def loss(self, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False) -> Any:
        """Return the result of ms-swift's loss function for the micro-batch."""
        # A copy: swift shifts a micro-batch's labels in place.
        source = SingleValue(dict(micro_batch))
        # The micro-batch's documents are contiguous, without padding between them.
        local_1T = torch.cat([zigzag_part(one) for one in outputs])[None]
        return loss_function_of(self._loops_own, source, self._model)(local_1T)


def _with_boundaries(micro_batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return tokens, labels shifted as in ms-swift, and the boundaries of documents."""
    tokens = micro_batch["input_ids"]
    positions = micro_batch.get("text_position_ids")
    positions = micro_batch.get("position_ids") if positions is None else positions
    if len(tokens) != 1 or positions is None or positions.dim() != 2:
        raise ValueError(
            f"a micro-batch of ms-swift's has input_ids {list(tokens.shape)} without one row of "
            "positions; expected packed samples (--packing true, or --padding_free true)"
        )
    others = [name for name, x in micro_batch.items() if isinstance(x, Tensor)]
    if strange := sorted(set(others) - _TEXT):
        raise ValueError(
            f"a micro-batch of ms-swift's has {', '.join(strange)}; its slices are of text: use "
            "Megatron's own schedule (no attach)"
        )
    starts = (positions[0] == 0).nonzero().flatten()
    return {
        "input_ids": tokens,
        "labels": torch.roll(micro_batch["labels"], -1, dims=-1),
        "cu_seqlens": torch.cat([starts, starts.new_tensor([tokens.shape[1]])]),
    }


def _token_losses(data_iterator: Any, model: Any) -> tuple[Any, None]:
    """Compute a loss for every token; this is the forward step of slices."""
    drawn = on_this_device(next(data_iterator))
    return model(
        input_ids=drawn["input_ids"], position_ids=None, attention_mask=None,
        labels=drawn["labels"],
    ), None  # fmt: skip
