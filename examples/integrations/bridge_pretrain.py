#!/usr/bin/env python3
"""Megatron-Bridge: one of its recipes over four stages, in slices.

python -m pip install <a checkout of megatron_epp>
torchrun --nproc-per-node 8 bridge_pretrain.py
"""

from megatron.bridge.recipes.llama.h100.llama3 import llama3_8b_pretrain_2gpu_h100_bf16_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

from megatron_epp.frameworks.bridge.slices import slices_callback


def main() -> None:
    cfg = llama3_8b_pretrain_2gpu_h100_bf16_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.context_parallel_size = 1
    pretrain(cfg, forward_step, callbacks=[slices_callback()])


if __name__ == "__main__":
    main()
