"""Slices in Megatron-Bridge: a callback of ``pretrain`` that attaches the model.

Megatron-Bridge's ``train`` stores the schedule function before its first callback runs. The
callback therefore replaces Megatron's schedules when it is made, before ``pretrain``.
"""

from typing import Any

from torch import Tensor

import megatron_epp
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.install import install_where_none

KEYS = "tokens", "labels", "loss_mask", "position_ids"


def slices_callback(**options: Any) -> Any:
    """Return a callback that attaches the model with samples [B, S] before the first step.

    Args:
        options: keywords of :func:`megatron_epp.attach`, except ``timeout`` and ``observe``.

    Raises:
        ValueError: Megatron is too old, or lacks a function that slices need.

    Example:
        >>> pretrain(cfg, forward_step, callbacks=[slices_callback(memory_gib=40)])
    """
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.losses import masked_next_token_loss

    def loss(batch: Any, losses_BS: Tensor, **named: Any) -> Any:
        return masked_next_token_loss(batch["loss_mask"], losses_BS)

    class Slices(Callback):  # type: ignore[misc, no-any-unimported]
        def on_train_start(self, context: Any) -> None:
            megatron_epp.attach(context.model, Samples(loss, KEYS), **options)

    install_where_none()
    return Slices()
