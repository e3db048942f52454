#!/usr/bin/env python3
"""Megatron-Bridge: one of its recipes over four stages, in slices.

python -m pip install <a checkout of megatron_epp>
torchrun --nproc-per-node 8 bridge_pretrain.py
"""

from typing import Any

from megatron.bridge.recipes.llama.h100.llama3 import llama3_8b_pretrain_2gpu_h100_bf16_config
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.losses import masked_next_token_loss
from megatron.bridge.training.pretrain import pretrain

import megatron_epp
from megatron_epp.mcore.loops.adapters.samples import Samples

KEYS = "tokens", "labels", "loss_mask", "position_ids"


class Slices(Callback):
    """Callback that attaches the model before the first step."""

    def on_train_start(self, context: Any) -> None:
        """Attach the model."""

        def loss(batch: Any, losses: Any, **named: Any) -> Any:
            return masked_next_token_loss(batch["loss_mask"], losses)

        megatron_epp.attach(context.model, Samples(loss, KEYS))


def main() -> None:
    cfg = llama3_8b_pretrain_2gpu_h100_bf16_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.context_parallel_size = 1
    pretrain(cfg, forward_step, callbacks=[Slices()])


if __name__ == "__main__":
    main()
