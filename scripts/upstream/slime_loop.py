#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""slime's own training step on Megatron, in Megatron's schedule and in this project's.

    git clone --depth 1 https://github.com/THUDM/slime
    scripts/upstream/slime_loop.py --slime slime
    scripts/upstream/slime_loop.py --slime slime --cp 2

From backends/megatron_utils of the checkout, the script executes train_one_step and forward_only of
model.py with their forward steps, get_batch and DataIterator of data.py, and loss.py with
utils/ppo_utils.py (a policy's clipped loss with entropies, and log-probabilities; without their
asserts of float32). Two processes have one stage each of a tiny GPT in float64. The rest of slime
is replaced by mocks. This project provides the optimizer and, on a host without a GPU, attention
over the packed documents of samples. With --ep 2, two replicas share four experts per layer.

The loop runs by Megatron's schedule, and then in slices, turned on by slime's own hooks. The script
prints the largest difference of a gradient or a log-probability, and fails above 1e-12. No code of
slime is copied into this project.
"""

import importlib
import math
import os
import sys
import types
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "scripts" / "upstream")]
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # parts of ppo_utils.py are compiled else

import rl_loop
import torch
from framework_runs import (
    Anything,
    GradientKeeper,
    attend_within_documents,
    compare,
    of_replica,
    run_stages,
    stage_of,
)

PACKAGE = "slime.backends.megatron_utils"
HOOKS = "megatron_epp.frameworks.slime.slices"
MICRO_BATCHES, STEPS = 5, 4
ORDER = "cp_utils", "data", "loss", "model"
# As far as the steps and the loss ask slime's arguments.
ARGS = SimpleNamespace(
    data_pad_size_multiplier=16, allgather_cp=False, enable_mtp_training=False, rollout_top_p=1.0,
    custom_megatron_before_train_step_hook_path=None, save_debug_train_data=None, ci_test=False,
    custom_megatron_before_log_prob_hook_path=None, context_parallel_size=1,
    seq_length=1, micro_batch_size=1, decoder_seq_length=None, calculate_per_token_loss=False,
    check_for_nan_in_loss_and_grad=True, use_dynamic_batch_size=False, use_rollout_entropy=True,
    loss_type="policy_loss", rollout_temperature=0.8, log_probs_chunk_size=-1, entropy_coef=0.01,
    use_rollout_logprobs=False, use_opsm=False, advantage_estimator="grpo", eps_clip=0.2,
    eps_clip_high=0.28, eps_clip_c=None, get_mismatch_metrics=False, use_tis=False,
    use_kl_loss=False, recompute_loss_function=True,
)  # fmt: skip


def load(checkout: Path) -> SimpleNamespace:
    """Return the executed modules of the checkout; other imports of slime are mocks."""
    mocked = "observability utils utils.memory_utils utils.types utils.misc backends"
    mocked += " utils.distributed_utils"
    for name in ("slime", *(f"slime.{part}" for part in mocked.split()), PACKAGE):
        sys.modules[name] = Anything(name)
    utils: Any = sys.modules["slime.utils"]
    utils.accelerator = SimpleNamespace(device=lambda: "cpu", current_device=lambda: "cpu")
    utils.misc.load_function = lambda path: getattr(
        importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]
    )
    sys.modules["slime.utils.misc"] = utils.misc
    for part in ("checkpoint", "model_provider", "stateless_adam"):
        sys.modules[f"{PACKAGE}.{part}"] = Anything(f"{PACKAGE}.{part}")
    parts = "utils.ppo_utils", *(f"backends.megatron_utils.{name}" for name in ORDER)
    return SimpleNamespace(
        **{part.split(".")[-1]: _executed(checkout, f"slime.{part}") for part in parts}
    )


def _executed(checkout: Path, name: str) -> Any:
    file = checkout / f"{name.replace('.', '/')}.py"
    module: Any = types.ModuleType(name)
    module.__package__ = name.rpartition(".")[0]
    sys.modules[name] = module
    exec(compile(file.read_text(), str(file), "exec", optimize=1), module.__dict__)
    return module


def rollout(its: SimpleNamespace, number: int) -> Any:
    """Return slime's DataIterator over samples of very different lengths, a few per micro-batch.

    Log-probabilities and advantages of answers are this rank's part, as slime's rollouts cut them.
    """
    random, indices = Random(number), []
    made = torch.Generator().manual_seed(number)
    keys = "tokens loss_masks total_lengths response_lengths log_probs advantages"
    samples: dict[str, list[Any]] = {key: [] for key in keys.split()}
    for _ in range(MICRO_BATCHES):
        count, first = random.randint(1, 3), len(samples["tokens"])
        indices.append(list(range(first, first + count)))
        for _ in range(count):
            length = max(4, min(200, int(random.lognormvariate(3.8, 1.0))))
            response = random.randint(1, length - 1)
            tokens = [random.randrange(rl_loop.WORDS) for _ in range(length)]
            samples["tokens"].append(torch.tensor(tokens))
            samples["loss_masks"].append(torch.ones(response))
            noise = torch.randn(response, generator=made, dtype=torch.get_default_dtype())
            cut = partial(
                its.cp_utils.slice_log_prob_with_cp, total_length=length, response_length=response
            )
            samples["log_probs"].append(cut(0.2 * noise - math.log(rl_loop.WORDS)))
            samples["advantages"].append(cut(torch.full((response,), random.gauss(0, 1))))
            samples["total_lengths"].append(length)
            samples["response_lengths"].append(response)
    return its.data.DataIterator(samples, indices)


def train(its: SimpleNamespace, model: Any) -> list[dict[str, torch.Tensor]]:
    """Return gradients of each step, and log-probabilities and entropies of a forward-only pass."""
    optimizer = GradientKeeper(model, "grad")
    scheduler = SimpleNamespace(step=lambda increment: None)
    counts = MICRO_BATCHES, MICRO_BATCHES
    for number in range(STEPS):
        samples = [rollout(its, of_replica(number))]
        its.model.train_one_step(ARGS, 0, number, samples, [model], optimizer, scheduler, *counts)
    samples = [rollout(its, of_replica(STEPS))]
    f = its.loss.get_log_probs_and_entropy
    with torch.no_grad():
        found = its.model.forward_only(f, ARGS, [model], samples, [MICRO_BATCHES])
    named = {f"{key} {n}": x for key, values in found.items() for n, x in enumerate(values)}
    return [*optimizer.gradients, named]


def switch_slices_on() -> None:
    ARGS.custom_megatron_before_train_step_hook_path = f"{HOOKS}.before_train_step"
    ARGS.custom_megatron_before_log_prob_hook_path = f"{HOOKS}.before_log_probs"


def work(rank: int, meeting: str, checkout: Path, dtype: str, cp: int, ep: int) -> None:
    with stage_of(rank, meeting, lambda: load(checkout), dtype, cp, ep) as (its, model):
        ARGS.context_parallel_size = cp
        its.model.get_args = lambda: ARGS
        model.zero_grad_buffer = lambda: model.zero_grad(set_to_none=True)
        attend_within_documents(model)
        compare(rank, lambda: train(its, model), switch_slices_on)


if __name__ == "__main__":
    file = f"{PACKAGE.replace('.', '/')}/model.py"
    sys.exit(run_stages(__doc__, "slime", file, work, shares_rows=True, shares_experts=True))
