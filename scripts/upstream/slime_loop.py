#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""slime's own training step over Megatron, run by Megatron's schedule and by ours.

    git clone --depth 1 https://github.com/THUDM/slime
    scripts/upstream/slime_loop.py --slime slime

Executes backends/megatron_utils of that checkout: train_one_step of model.py with its forward step,
get_batch and DataIterator of data.py, slice_with_cp of cp_utils.py, in two processes with a stage
each of a tiny GPT in float64. The rest of slime is mocks; the loss, the optimizer and, on a host
without a GPU, the attention over packed documents are of our own. Nothing tells us rows: they are
known by slime's rules. Prints losses and the largest difference of a gradient, and fails above
1e-12. Nothing of slime is copied into this project.
"""

import sys
import types
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "scripts" / "upstream")]

import rl_loop
import torch
from framework_runs import (
    Anything,
    GradientKeeper,
    attend_within_documents,
    compare,
    run_stages,
    stage_in_float64,
)

PACKAGE = "slime.backends.megatron_utils"
MICRO_BATCHES, STEPS = 5, 4
# As far as the step asks slime's arguments.
ARGS = SimpleNamespace(
    data_pad_size_multiplier=16, allgather_cp=False, enable_mtp_training=False, rollout_top_p=1.0,
    custom_megatron_before_train_step_hook_path=None, save_debug_train_data=None, ci_test=False,
    seq_length=1, micro_batch_size=1, decoder_seq_length=None, calculate_per_token_loss=False,
    check_for_nan_in_loss_and_grad=True,
)  # fmt: skip


def load(checkout: Path) -> tuple[Any, Any]:
    """(model.py, data.py) of the checkout; what else of slime they import is mocks."""
    folder = checkout / PACKAGE.replace(".", "/")
    mocked = "observability utils utils.memory_utils utils.types utils.misc backends"
    for name in ("slime", *(f"slime.{part}" for part in mocked.split()), PACKAGE):
        sys.modules[name] = Anything(name)
    utils: Any = sys.modules["slime.utils"]
    utils.accelerator = SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu")
    for part in ("checkpoint", "loss", "model_provider", "stateless_adam"):
        sys.modules[f"{PACKAGE}.{part}"] = Anything(f"{PACKAGE}.{part}")
    sys.modules[f"{PACKAGE}.loss"].ROLLOUT_TOP_P_TOKEN_KEYS = ()  # type: ignore[attr-defined]
    made = [_executed(folder / f"{part}.py") for part in ("cp_utils", "data", "model")]
    return made[2], made[1]


def _executed(file: Path) -> Any:
    name = f"{PACKAGE}.{file.stem}"
    module: Any = types.ModuleType(name)
    module.__package__ = PACKAGE
    sys.modules[name] = module
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return module


def rollout(data: Any, number: int) -> Any:
    """slime's DataIterator over samples of very different lengths, in micro-batches of a few."""
    random, indices = Random(number), []
    samples: dict[str, list[Any]] = {
        key: [] for key in ("tokens", "loss_masks", "total_lengths", "response_lengths")
    }
    for _ in range(MICRO_BATCHES):
        count, first = random.randint(1, 3), len(samples["tokens"])
        indices.append(list(range(first, first + count)))
        for _ in range(count):
            length = max(4, min(200, int(random.lognormvariate(3.8, 1.0))))
            response = random.randint(1, length - 1)
            tokens = [random.randrange(rl_loop.WORDS) for _ in range(length)]
            samples["tokens"].append(torch.tensor(tokens))
            samples["loss_masks"].append(torch.ones(response))
            samples["total_lengths"].append(length)
            samples["response_lengths"].append(response)
    return data.DataIterator(samples, indices)


def loss(args: Any, batch: Any, micro_batches: int, samples: int, logits_1TV: torch.Tensor) -> Any:
    """Log-probabilities of the answers' tokens, as slime's masks say."""
    following = torch.roll(batch["tokens"], -1, 1)[..., None]
    chosen_1T = logits_1TV.log_softmax(-1).gather(-1, following)[..., 0]
    value = -(chosen_1T * batch["full_loss_masks"]).sum() / samples
    return value, torch.tensor(1), {"keys": ["loss"], "values": value.detach()}


def train(loop: Any, data: Any, model: Any) -> list[dict[str, torch.Tensor]]:
    optimizer = GradientKeeper(model, "grad")
    scheduler = SimpleNamespace(step=lambda increment: None)
    for number in range(STEPS):
        loop.train_one_step(
            *(ARGS, 0, number, [rollout(data, number)], [model], optimizer, scheduler),
            MICRO_BATCHES,
            MICRO_BATCHES,
        )
    return optimizer.gradients


def work(rank: int, meeting: str, checkout: Path) -> None:
    with stage_in_float64(rank, meeting, lambda: load(checkout)) as ((loop, data), model):
        loop.get_args, loop.loss_function = lambda: ARGS, loss
        model.zero_grad_buffer = lambda: model.zero_grad(set_to_none=True)
        attend_within_documents(model)
        compare(rank, lambda: train(loop, data, model))


if __name__ == "__main__":
    sys.exit(run_stages(__doc__, "slime", f"{PACKAGE.replace('.', '/')}/model.py", work))
