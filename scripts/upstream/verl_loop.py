#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""verl's own Megatron engine, run by Megatron's schedule and by ours.

    python -m pip install verl
    scripts/upstream/verl_loop.py
    git clone --depth 1 https://github.com/verl-project/verl
    scripts/upstream/verl_loop.py --verl verl --cp 2

Imports verl, of what pip has installed or of that checkout, with what it needs, and calls
forward_backward_batch of its MegatronEngineWithLMHead: its micro-batches by tokens, its forward
step, THD packing and log probabilities, its supervised loss, and a pass of forwards. Two processes
have a stage each of a tiny GPT in float64, which stands where the engine would have built one of a
checkpoint; on a host without a GPU the attention over packed documents is of our own. Nothing tells
us rows: they are known by verl's rules. With --cp so many ranks share each stage's rows. Prints the
largest difference of a gradient or a log probability, and fails above 1e-12. Nothing of verl is
copied into this project.
"""

import os
import sys
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "scripts" / "upstream")]

import rl_loop
import torch
import torch.distributed as dist
from framework_runs import (
    attend_within_documents,
    compare,
    gradients_of,
    run_stages,
    stage_of,
)

ENGINE = "verl/workers/engine/megatron/transformer_impl.py"
STEPS, SAMPLES, MOST_TOKENS = 4, 12, 260  # of a micro-batch


def load(checkout: Path) -> SimpleNamespace:
    """What is used of the checkout, which is imported."""
    sys.path.insert(0, str(checkout))
    from megatron_epp.frameworks.verl import slices as verl_samples

    verl_samples.register_engine()
    # verl asks for engines of the device that it sees; ours is one of cuda.
    os.environ |= {"VERL_ENGINE_VENDOR": verl_samples.VENDOR, "VERL_ENGINE_DEVICE": "cuda"}
    from verl.utils import tensordict_utils
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine
    from verl.workers.utils.losses import sft_loss

    return SimpleNamespace(
        make_data=tensordict_utils.get_tensordict, Config=McoreEngineConfig,
        Engine=EngineRegistry.get_engine_cls("language_model", "megatron"), loss=sft_loss,
        Base=MegatronEngine,
    )  # fmt: skip


def engine_around(its: SimpleNamespace, model: Any) -> Any:
    """verl's engine as its initialize() leaves it, as far as a batch asks it."""
    engine = object.__new__(its.Engine)
    engine.engine_config = its.Config(
        pipeline_model_parallel_size=rl_loop.STAGES, sequence_parallel=False,
        context_parallel_size=model.config.context_parallel_size,
    )  # fmt: skip
    engine.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    engine.module, engine.tf_config = [model], model.config
    engine.enable_routing_replay = False
    return engine


def batch(its: SimpleNamespace, number: int) -> Any:
    """Samples of very different lengths: a prompt, and an answer that counts."""
    random, made = Random(number), torch.Generator().manual_seed(number)
    lengths = [max(4, min(200, int(random.lognormvariate(3.8, 1.0)))) for _ in range(SAMPLES)]
    tokens = [torch.randint(rl_loop.WORDS, (length,), generator=made) for length in lengths]
    masks = [(torch.arange(length) > length // 3).long() for length in lengths]
    tensors = {
        "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
    }
    settings = {
        "use_dynamic_bsz": True, "max_token_len_per_gpu": MOST_TOKENS, "temperature": 1.0,
    }  # fmt: skip
    return its.make_data(tensors, settings)


def train(its: SimpleNamespace, engine: Any) -> list[dict[str, torch.Tensor]]:
    """Gradients of each step, and at last log probabilities, by the sample."""
    made, (model,) = [], engine.module
    for number in range(STEPS):
        model.zero_grad(set_to_none=True)
        engine.forward_backward_batch(batch(its, number), partial(its.loss, None))
        made.append(gradients_of(model))
    with torch.no_grad():
        found = engine.forward_backward_batch(batch(its, STEPS), None, forward_only=True)
    named_samples = enumerate(found["model_output"]["log_probs"].unbind()) if found else ()
    made.append({f"log probabilities of sample {n}": values for n, values in named_samples})
    return made


def divide_by_tokens(models: list[Any], tokens: Any, **others: Any) -> None:
    """What Megatron's finalize_model_grads does with the tokens that last stages tell."""
    dist.all_reduce(tokens)
    for parameter in models[0].parameters():
        if parameter.grad is not None:
            parameter.grad /= tokens


def work(rank: int, meeting: str, checkout: Path, dtype: str, cp: int) -> None:
    with stage_of(rank, meeting, lambda: load(checkout), dtype, cp) as (its, model):
        if cp > 1:  # as Megatron-Bridge, which builds verl's models, has it there
            model.config.calculate_per_token_loss = True
            model.config.finalize_model_grads_func = divide_by_tokens
        attend_within_documents(model)
        engine = engine_around(its, model)
        # The rest of its initialize() builds a model of a checkpoint and an optimizer.
        its.Base.initialize = lambda engine: None
        compare(rank, lambda: train(its, engine), engine.initialize)


if __name__ == "__main__":
    sys.exit(run_stages(__doc__, "verl", ENGINE, work, shares_rows=True))
