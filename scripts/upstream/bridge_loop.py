#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""Megatron-Bridge's own forward step and loss, in Megatron's schedule and in this project's.

    python -m pip install --no-deps megatron-bridge
    scripts/upstream/bridge_loop.py
    git clone --depth 1 https://github.com/NVIDIA-NeMo/Megatron-Bridge
    scripts/upstream/bridge_loop.py --megatron-bridge Megatron-Bridge

The script executes forward_step of training/gpt_step.py and masked_next_token_loss of
training/losses.py, from the installed package or from a checkout (without their roundings to
float32). Samples are padded [B, S], and arguments are those of Megatron-Bridge's train_step. Two
processes have one stage each of a tiny GPT in float64. The rest of Megatron-Bridge is replaced by
mocks.

The loop runs by Megatron's schedule, and then in slices, whose micro-batches the forward step
loads. The script prints the largest difference of a gradient or a loss, and fails above 1e-12. No
code of Megatron-Bridge is copied into this project.
"""

import sys
import types
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "scripts" / "upstream")]

import rl_loop
import torch
from framework_runs import compare, gradients_of, mock, run_stages, stage_of

FOLDER, PACKAGE = "megatron/bridge/training", "megatron.bridge.training"
STEPS, MICRO_BATCHES, SAMPLES = 4, 5, 2
KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
# As far as the step asks its configuration.
CONFIG = SimpleNamespace(
    model=SimpleNamespace(
        virtual_pipeline_model_parallel_size=None, pipeline_model_parallel_layout=None
    ),
    dataset=SimpleNamespace(skip_getting_attention_mask_from_dataset=True),
    rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=False, check_for_spiky_loss=False),
)
STATE = SimpleNamespace(cfg=CONFIG, timers=MagicMock(), straggler_timer=MagicMock())


def load(checkout: Path) -> SimpleNamespace:
    """Return the executed modules of the checkout; other imports of Megatron-Bridge are mocks."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    mock("megatron.bridge", "modelopt")
    made = {}
    for part in ("losses", "callbacks", "gpt_step"):
        file = checkout / FOLDER / f"{part}.py"
        module: Any = types.ModuleType(f"{PACKAGE}.{part}")
        sys.modules[module.__name__] = made[part] = module
        source = file.read_text().replace(".float()", "")
        exec(compile(source, str(file), "exec"), module.__dict__)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    made["gpt_step"].get_pg_collection = lambda model: groups
    made["gpt_step"].get_model_chunk_vp_stage = lambda model: None
    return SimpleNamespace(**made, groups=groups)


def micro_batches(number: int) -> list[dict[str, Any]]:
    """Return padded samples of very different lengths, each with a prompt and an answer."""
    random, made = Random(number), torch.Generator().manual_seed(number)
    found = []
    for _ in range(MICRO_BATCHES):
        ends = torch.tensor(
            [max(4, min(200, int(random.lognormvariate(3.8, 1.0)))) for _ in range(SAMPLES)]
        )
        rows = int(ends.max())
        tokens = torch.randint(rl_loop.WORDS, (SAMPLES, rows + 1), generator=made)
        places = torch.arange(rows).expand(SAMPLES, rows)
        mask = (places >= ends[:, None] // 3) & (places < ends[:, None])
        drawn = tokens[:, :-1], tokens[:, 1:], mask.to(torch.get_default_dtype()), None, places
        found.append(dict(zip(KEYS, drawn, strict=True)))
    return found


def train(its: SimpleNamespace, model: Any) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of each step, and the losses of its micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    made = []
    for number in range(STEPS):
        model.zero_grad(set_to_none=True)
        found = get_forward_backward_func()(
            forward_step_func=partial(its.gpt_step.forward_step, STATE),
            data_iterator=iter(micro_batches(number)), model=[model],
            num_microbatches=MICRO_BATCHES, seq_length=1, micro_batch_size=SAMPLES,
            decoder_seq_length=1, forward_only=False, adjust_tensor_shapes_fn=None,
            p2p_communicator=P2PCommunicator(its.groups.pp, model.config),
            pg_collection=its.groups,
        )  # fmt: skip
        losses = {f"loss {n}": one["lm loss"] for n, one in enumerate(found)}
        made.append({**gradients_of(model), **losses})
    return made


def work(rank: int, meeting: str, checkout: Path, dtype: str) -> None:
    with stage_of(rank, meeting, lambda: load(checkout), dtype) as (its, model):

        def slice_it() -> None:
            from megatron_epp.frameworks.bridge.slices import slices_callback

            slices_callback().on_train_start(SimpleNamespace(model=model))

        compare(rank, lambda: train(its, model), slice_it)


if __name__ == "__main__":
    sys.exit(run_stages(__doc__, "Megatron-Bridge", f"{FOLDER}/gpt_step.py", work))
