"""Slicing mode in slime: slices compute log-probabilities, and slime computes its losses.

slime's forward step packs samples and computes losses from logits. The adapter's forward step
computes slices instead, without logits. It takes only the loss function from slime's forward step.
The loss function receives log-probabilities in place of the result of
``calculate_log_probs_and_entropy`` (slime's ``loss.py``). Policy, value and supervised losses and
log-probability passes are therefore slime's own.
"""

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import megatron_epp
from megatron_epp.mcore.loops.adapter import loss_function_of, refuse_asked
from megatron_epp.mcore.loops.adapters.token_samples import (
    TokenSamples,
    in_training,
    log_prob_step,
    log_probs_and_entropies,
    on_this_device,
    zigzag_part,
)
from megatron_epp.mcore.loops.attached import attached

_MAKES_LOG_PROBS = "calculate_log_probs_and_entropy"


class SlimeSamples(TokenSamples):
    """Adapter of slime's micro-batches.

    Args:
        args: slime's arguments.

    Raises:
        ValueError: Slices do not support the arguments.
    """

    partial_loss = True  # slime's own sharding gives a rank these rows

    def __init__(self, args: Any):
        super().__init__(_tokens_of)
        _require_sliceable(args)
        self._args = args

    def sliced(self, forward_step: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Return a forward step of slices that computes log-probabilities or a critic's values."""
        self._loops_own, self._model = forward_step, model
        if self._args.loss_type == "value_loss":
            return _values
        return log_prob_step(self._args.rollout_temperature, self._has_entropies)

    def loss(self, micro_batch: Any, outputs: Sequence[Tensor], non_loss_data: bool = False) -> Any:
        """Return the result of slime's loss function for the micro-batch."""
        function = loss_function_of(self._loops_own, micro_batch, self._model)
        local_outputs = [zigzag_part(one) for one in outputs]
        if self._args.loss_type == "value_loss":
            return function(torch.cat(local_outputs)[None])
        return _called_with(function, *log_probs_and_entropies(local_outputs))

    @property
    def _has_entropies(self) -> bool:
        """Whether the call needs entropies; in evaluation, only with ``use_rollout_entropy``."""
        training = in_training(self._model) and self._args.loss_type == "policy_loss"
        return training or bool(getattr(self._args, "use_rollout_entropy", False))


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    """Patch the model to compute slices (slime's --custom-megatron-before-train-step-hook-path).

    The first call patches the model; later calls change nothing. slime passes all arguments.

    Args:
        args: slime's arguments.
        rollout_id: Number of the rollout; not used.
        step_id: Number of the training step; not used.
        model: The list of model chunks.
        optimizer: Optimizer; not used.
        scheduler: Scheduler of the learning rate; not used.

    Raises:
        ValueError: Slices do not support the arguments or the model.
    """
    _attach(args, model)


def before_log_probs(args: Any, model: Any, store_prefix: str) -> None:
    """Patch the model for forward-only passes (--custom-megatron-before-log-prob-hook-path)."""
    _attach(args, model)


def _attach(args: Any, model: Any) -> None:
    if attached(model[0]) is None:
        megatron_epp.attach(model, SlimeSamples(args))


def _tokens_of(micro_batch: Any) -> Sequence[Tensor]:
    drawn = micro_batch.get_next(["tokens", "multimodal_train_inputs"])
    if any(one is not None for one in drawn["multimodal_train_inputs"] or ()):
        raise ValueError(
            "a micro-batch of slime's has multimodal_train_inputs; its slices are of text: use "
            "Megatron's own schedule (no attach)"
        )
    tokens: Sequence[Tensor] = drawn["tokens"]
    return tokens


def _require_sliceable(args: Any) -> None:
    asked = {
        "allgather_cp, which lays rows out otherwise": args.context_parallel_size > 1
        and getattr(args, "allgather_cp", False),
        "rollout_top_p below 1, which leaves words out": args.rollout_top_p != 1.0,
        "loss_type custom_loss, which takes logits": args.loss_type == "custom_loss",
        "routing replay, which records whole micro-batches": getattr(
            args, "use_routing_replay", False
        )
        or os.environ.get("ENABLE_ROUTING_REPLAY") == "1",
    }
    refuse_asked("slime's", "its arguments ask", asked)


def _values(data_iterator: Any, model: Any) -> tuple[Any, None]:
    """Compute the critic's output for every token; this is the forward step of slices."""
    drawn = on_this_device(next(data_iterator))
    return model(
        input_ids=drawn["tokens"], position_ids=None, attention_mask=None, labels=None
    ), None


def _called_with(function: Any, log_probs_T: Tensor, entropies_T: Tensor | None) -> Any:
    """Call the partial ``function``, slime's loss, with log-probabilities instead of logits."""

    def called_with(
        logits: Tensor,
        tokens: Tensor,
        tp_group: Any,
        with_entropy: bool = False,
        with_entropy_grad: bool = True,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        entropies = entropies_T if with_entropy else None
        if entropies is not None and not with_entropy_grad:
            entropies = entropies.detach()
        return log_probs_T[:, None], entropies

    # In the autograd graph: a loss without tokens of an answer is 0 times the sum of the logits.
    in_their_place_1T1 = (0 * log_probs_T)[None, :, None].float()
    # Recomputing the loss would save nothing, and would use these values.
    first, *rest = function.args or (None,)
    if first is not None:
        first = copy.copy(first)
        first.recompute_loss_function = False
        rest = [first, *rest]
    names = function.func.__globals__
    own = names[_MAKES_LOG_PROBS]
    names[_MAKES_LOG_PROBS] = called_with
    try:
        return function.func(*rest, in_their_place_1T1, **function.keywords)
    finally:
        names[_MAKES_LOG_PROBS] = own
