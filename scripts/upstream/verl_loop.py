#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""verl's own Megatron engine, in Megatron's schedule and in this project's.

    python -m pip install verl
    scripts/upstream/verl_loop.py
    git clone --depth 1 https://github.com/verl-project/verl
    scripts/upstream/verl_loop.py --verl verl --cp 2

The script imports the installed verl, or that of the checkout, with its dependencies, and calls
forward_backward_batch of its MegatronEngineWithLMHead: micro-batches by tokens, forward step, THD
packing and log-probabilities, supervised loss, and a forward-only pass. Two processes have one
stage each of a tiny GPT in float64, in place of a model that the engine would build from a
checkpoint. On a host without a GPU, attention over packed documents is this project's. With --cp,
each stage has this number of context-parallel ranks; with --ep 2, two replicas share four experts
per layer. The script prints the largest difference of a gradient or a log-probability, and fails
above 1e-12. No code of verl is copied into this project.
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
    of_replica,
    run_stages,
    stage_of,
)

ENGINE = "verl/workers/engine/megatron/transformer_impl.py"
STEPS, SAMPLES, MOST_TOKENS = 4, 12, 260  # of a micro-batch


def load(checkout: Path) -> SimpleNamespace:
    """Return the classes and functions of the imported checkout that the script uses."""
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
    """Return verl's engine with the attributes of its initialize() that a batch needs."""
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
    """Return samples of very different lengths: a prompt, and an answer with a loss."""
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
    """Return the gradients of each step, and finally the log-probabilities of each sample."""
    made, (model,) = [], engine.module
    for number in range(STEPS):
        model.zero_grad(set_to_none=True)
        engine.forward_backward_batch(batch(its, of_replica(number)), partial(its.loss, None))
        made.append(gradients_of(model))
    with torch.no_grad():
        found = engine.forward_backward_batch(
            batch(its, of_replica(STEPS)), None, forward_only=True
        )
    named_samples = enumerate(found["model_output"]["log_probs"].unbind()) if found else ()
    made.append({f"log probabilities of sample {n}": values for n, values in named_samples})
    return made


def divide_by_tokens(models: list[Any], tokens: Any, **others: Any) -> None:
    """Divide gradients by the number of tokens, as Megatron's finalize_model_grads does."""
    dist.all_reduce(tokens)
    for parameter in models[0].parameters():
        if parameter.grad is not None:
            parameter.grad /= tokens


def work(rank: int, meeting: str, checkout: Path, dtype: str, cp: int, ep: int) -> None:
    with stage_of(rank, meeting, lambda: load(checkout), dtype, cp, ep) as (its, model):
        if cp > 1:  # as Megatron-Bridge, which builds verl's models, has it there
            model.config.calculate_per_token_loss = True
            model.config.finalize_model_grads_func = divide_by_tokens
        attend_within_documents(model)
        engine = engine_around(its, model)
        # The rest of its initialize() builds a model of a checkpoint and an optimizer.
        its.Base.initialize = lambda engine: None
        compare(rank, lambda: train(its, engine), engine.initialize)


if __name__ == "__main__":
    sys.exit(run_stages(__doc__, "verl", ENGINE, work, shares_rows=True, shares_experts=True))
