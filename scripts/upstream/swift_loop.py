#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""ms-swift's own training step on Megatron, in Megatron's schedule and in this project's.

    python -m pip install ms-swift
    scripts/upstream/swift_loop.py
    git clone --depth 1 https://github.com/modelscope/ms-swift
    scripts/upstream/swift_loop.py --ms-swift ms-swift --cp 2

The script imports the installed swift, or that of the checkout, with its dependencies except
mcore_bridge, which needs kernels of a GPU and is replaced by mocks. ms-swift's PackingDataset packs
samples of very different lengths, its template collates them, and train_step of its MegatronTrainer
runs its forward step and its loss. Two processes have one stage each of a tiny GPT in float64, in
Megatron's DDP. This project provides the optimizer and, on a host without a GPU, the attention over
packed documents.

The loop runs by Megatron's schedule, and then in slices. The script prints the largest difference
of a gradient, and fails above 1e-12. No code of ms-swift is copied into this project.
"""

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "scripts" / "upstream")]

import rl_loop
import torch
from framework_runs import (
    GradientKeeper,
    attend_within_documents,
    compare,
    mock,
    run_stages,
    stage_of,
)

import megatron_epp

TRAINER = "swift/megatron/trainers/trainer.py"
STEPS, SAMPLES, CONTEXT, MICRO_BATCHES = 4, 80, 256, 5
# As far as the step asks ms-swift's arguments.
ARGS = SimpleNamespace(
    task_type="causal_lm", padding_free=True, model_type="qwen3", attention_backend="auto",
    tensor_model_parallel_size=1, pipeline_model_parallel_size=rl_loop.STAGES,
    context_parallel_size=1, cp_partition_mode="zigzag", sequence_parallel=False, fp8_recipe=None,
    micro_batch_size=1, global_batch_size=MICRO_BATCHES, num_microbatches=MICRO_BATCHES,
    seq_length=CONTEXT, enable_dft_loss=False, enable_channel_loss=False,
    dataloader_num_workers=0, dataloader_pin_memory=False, is_multimodal=False,
)  # fmt: skip


def load(checkout: Path) -> SimpleNamespace:
    """Return the classes of the imported checkout that the script uses."""
    sys.path.insert(0, str(checkout))
    mock("mcore_bridge")
    importlib.import_module("mcore_bridge").split_cp_inputs = rows_of_this_rank  # type: ignore[attr-defined]
    from swift.dataset.packing import PackingDataset
    from swift.megatron.trainers.trainer import MegatronTrainer
    from swift.template import Template

    return SimpleNamespace(Packing=PackingDataset, Trainer=MegatronTrainer, Template=Template)


class Samples:
    """Encoded samples, in the format of ms-swift's datasets."""

    def __init__(self) -> None:
        random = Random(0)
        self.lengths = [
            max(4, min(CONTEXT, int(random.lognormvariate(3.8, 1.0)))) for _ in range(SAMPLES)
        ]
        self.tokens = [
            [random.randrange(rl_loop.WORDS) for _ in range(length)] for length in self.lengths
        ]

    def __getitem__(self, which: int | str) -> Any:
        if which == "lengths":
            return self.lengths
        assert isinstance(which, int)
        tokens, length = self.tokens[which], self.lengths[which]
        answers = [-100] * (length // 3) + tokens[length // 3 :]
        return {"input_ids": [*tokens], "labels": answers, "length": length}

    def __len__(self) -> int:
        return SAMPLES


def trainer_around(its: SimpleNamespace, model: Any) -> Any:
    """Return ms-swift's trainer with the attributes of its constructor that a step needs."""
    template = object.__new__(its.Template)
    template.__dict__ |= {
        "task_type": "causal_lm", "mode": "train", "max_length": CONTEXT, "use_megatron": True,
        "padding_side": "right", "remove_unused_columns": True,
        "sequence_parallel_size": ARGS.context_parallel_size,
        "processor": SimpleNamespace(pad_token_id=0),
    }  # fmt: skip
    trainer = object.__new__(its.Trainer)
    trainer.args, trainer.template, trainer.enable_routing_replay = ARGS, template, False
    trainer.wrapped_models = [model]
    trainer.opt_param_scheduler = SimpleNamespace(step=lambda increment: None)
    trainer.data_collator = trainer._get_data_collator()
    return trainer


def train(its: SimpleNamespace, trainer: Any) -> list[dict[str, torch.Tensor]]:
    dataset = its.Packing(trainer.template, Samples())
    packs: Iterator[list[int]] = iter([[number] for number in range(len(dataset))])
    batches = iter(trainer._create_dataloader(dataset, packs))
    trainer.optimizer = GradientKeeper(trainer.wrapped_models[0], "main_grad")
    for _ in range(STEPS):
        trainer.train_step(batches)
    return trainer.optimizer.gradients


def wrapped(model: Any) -> Any:
    """Return the model in a Float16Module in DDP, like ms-swift's wrap_model."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module, MegatronModule

    class InItsPrecision(Float16Module):
        def __init__(self) -> None:
            MegatronModule.__init__(self, model.config)
            self.module = model

        def forward(self, *any: Any, **named: Any) -> torch.Tensor:
            return self.module(*any, **named)

    model.config.calculate_per_token_loss = True
    model.config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=False)
    return DistributedDataParallel(model.config, settings, InItsPrecision())


def rows_of_this_rank(inputs: torch.Tensor, boundaries: Any, dim: int) -> torch.Tensor:
    """Return this rank's rows of every document [1, T], in place of mcore_bridge's function."""
    from megatron_epp.mcore.loops.adapters.token_samples import zigzag_part

    documents = inputs[0].split(boundaries.diff().tolist())
    return torch.cat([zigzag_part(one) for one in documents])[None]


def work(rank: int, meeting: str, checkout: Path, dtype: str, cp: int) -> None:
    ARGS.context_parallel_size = cp
    with stage_of(rank, meeting, lambda: load(checkout), dtype, cp) as (its, model):
        attend_within_documents(model)
        from megatron_epp.frameworks.swift.slices import SwiftPacks

        trainer = trainer_around(its, wrapped(model))
        models = trainer.wrapped_models
        slice_it = partial(megatron_epp.attach, models, SwiftPacks())
        compare(rank, lambda: train(its, trainer), slice_it)


if __name__ == "__main__":
    sys.exit(run_stages(__doc__, "ms-swift", TRAINER, work, shares_rows=True))
