#!/usr/bin/env python3
# ruff: noqa: E402  (the examples beside this are imported from their folders)
"""NeMo-RL's own training loop on Megatron, in Megatron's schedule and in this project's.

    git clone --depth 1 https://github.com/NVIDIA-NeMo/RL NeMo-RL
    python -m pip install pydantic
    scripts/upstream/nemo_rl_loop.py --nemo-rl NeMo-RL
    scripts/upstream/nemo_rl_loop.py --nemo-rl NeMo-RL --cp 2

From the checkout, the script executes train.py of nemo_rl/models/megatron and the packing of
data.py, its losses (algorithms/loss) and its log-probabilities over vocabulary shards
(distributed/model_utils.py), without their roundings to float32. It runs megatron_forward_backward
with its forward step, the clipped policy loss with a divergence from a reference, and
log-probability passes, in two processes with one stage each of a tiny GPT in float64. Unlike in
NeMo-RL, the temperature divides only the output of the last stage, not the hidden states of other
stages. The rest of NeMo-RL (Ray, vLLM and more) is replaced by mocks, without draft models and
replay.

Samples are padded or packed; with --cp context-parallel ranks, all samples are packed. On a
host without a GPU, this project computes the attention over packed samples.

The loop runs by Megatron's schedule, and then in slices. The script prints the largest difference
of a gradient or a log-probability, and fails above 1e-12. No code of NeMo-RL is copied into this
project.
"""

import re
import sys
import types
from contextlib import nullcontext
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
    attend_within_documents,
    compare,
    gradients_of,
    mock,
    run_stages,
    stage_of,
)

import megatron_epp

SOURCE = "nemo_rl/models/megatron/train.py"
# In the order in which they import each other; a package behind its parts.
EXECUTED = (
    "algorithms.logits_sampling_utils", "algorithms.utils", "distributed.model_utils",
    "algorithms.loss.interfaces", "algorithms.loss.loss_functions", "algorithms.loss.utils",
    "algorithms.loss.wrapper", "algorithms.loss", "models.megatron.common",
    "models.megatron.data", "models.megatron.train",
)  # fmt: skip
STEPS, MICRO_BATCHES, SAMPLES = 4, 5, 2
SAMPLING = SimpleNamespace(top_k=None, top_p=1.0, temperature=0.8)


class Batch(dict):
    """Substitute for BatchedDataDict, with the methods that the loop calls."""

    def get_multimodal_dict(self, **how: Any) -> dict:
        return {}

    def slice(self, start: int, stop: int) -> "Batch":
        return Batch({name: one[start:stop] for name, one in self.items()})


class ProcessedMicroBatch(types.SimpleNamespace):
    """Substitute for NeMo-RL's class; attributes that only other models have are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def load(checkout: Path) -> SimpleNamespace:
    """Return the executed modules of the checkout; other imports of NeMo-RL are mocks."""
    from megatron.core import parallel_state as mpu

    for name in ("nemo_rl", "nemo_rl.distributed.batched_data_dict"):
        sys.modules[name] = Anything(name)
    mock("nemo_rl", "megatron.bridge")
    batched: Any = sys.modules["nemo_rl.distributed.batched_data_dict"]
    batched.BatchedDataDict = dict  # it is written BatchedDataDict[Any]
    parts = {}
    for part in EXECUTED:
        name = f"nemo_rl.{part}"
        file = checkout / f"{name.replace('.', '/')}.py"
        if not file.exists():
            file = checkout / name.replace(".", "/") / "__init__.py"
        module: Any = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = parts[part.rpartition(".")[2]] = module
        source = re.sub(r"\.to\((dtype=)?torch\.float32\)", "", file.read_text())
        source = source.replace("pin_memory=True", "pin_memory=False")
        exec(compile(source, str(file), "exec"), module.__dict__)
    # Its context for drafts, which is entered without any.
    parts["train"].get_capture_context = lambda model, enabled: (nullcontext(), None)
    scale = parts["train"].apply_temperature_scaling
    parts["train"].apply_temperature_scaling = lambda made, sampling: (
        scale(made, sampling) if mpu.is_pipeline_last_stage() else made
    )
    return SimpleNamespace(**parts, mpu=mpu)


def micro_batches(its: SimpleNamespace, number: int, packed: bool) -> list[Any]:
    """Return samples of very different lengths, each a prompt and an answer.

    They are padded to the longest sample, or packed.
    """
    random, made = Random(number), torch.Generator().manual_seed(number)
    found = []
    for _ in range(MICRO_BATCHES):
        lengths = [max(4, min(200, int(random.lognormvariate(3.8, 1.0)))) for _ in range(SAMPLES)]
        shape = SAMPLES, max(lengths)
        ends = torch.tensor(lengths)
        places = torch.arange(shape[1]).expand(shape)
        tokens = torch.randint(rl_loop.WORDS, shape, generator=made)
        answers = (places >= ends[:, None] // 3) & (places < ends[:, None])
        log_probs = {
            f"{whose}_logprobs": -4.5 + 0.2 * torch.randn(shape, generator=made)
            for whose in ("prev", "generation", "reference_policy")
        }
        data = Batch(
            input_ids=tokens, input_lengths=ends, token_mask=answers.to(torch.get_default_dtype()),
            sample_mask=torch.ones(SAMPLES), advantages=torch.randn(shape, generator=made),
            **log_probs,
        )  # fmt: skip
        if packed:
            ranks, rank = (
                its.mpu.get_context_parallel_world_size(),
                its.mpu.get_context_parallel_rank(),
            )
            of_all, mine, params, _, boundaries = its.data._pack_sequences_for_megatron(
                tokens, ends, 2 * ranks if ranks > 1 else 1, cp_rank=rank, cp_size=ranks
            )
            rows = {
                "input_ids": of_all, "input_ids_cp_sharded": mine, "packed_seq_params": params,
                "cu_seqlens_padded": boundaries,
            }  # fmt: skip
        else:
            mask = torch.ones(1, 1, shape[1], shape[1], dtype=torch.bool).triu(1)
            rows = {
                "input_ids": tokens, "input_ids_cp_sharded": tokens, "attention_mask": mask,
                "position_ids": places,
            }  # fmt: skip
        found.append(ProcessedMicroBatch(data_dict=data, **rows))
    return found


def train(its: SimpleNamespace, model: Any) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of each step, and finally the log-probabilities of answers."""
    losses = its.loss
    clipped = losses.ClippedPGLossFn(losses.ClippedPGLossConfig(reference_policy_kl_penalty=0.1))
    shared = its.mpu.get_context_parallel_world_size() > 1

    def forward_backward(number: int, forward_only: bool) -> Any:
        packed = shared or number % 2 == 0
        batches = micro_batches(its, number, packed)
        config = {"sequence_packing": {"enabled": packed}}
        if forward_only:
            processor = its.train.LogprobsPostProcessor(config, SAMPLING)
        else:
            processor = its.train.LossPostProcessor(clipped, config, num_microbatches=MICRO_BATCHES)
        valid = sum(one.data_dict["token_mask"].sum() for one in batches)
        found = its.train.megatron_forward_backward(
            model=model, data_iterator=iter(batches), num_microbatches=MICRO_BATCHES, seq_length=1,
            mbs=SAMPLES, post_processing_fn=processor, forward_only=forward_only,
            global_valid_seqs=torch.tensor(MICRO_BATCHES * SAMPLES), global_valid_toks=valid,
            sampling_params=SAMPLING,
        )  # fmt: skip
        return zip(batches, found, strict=bool(found))

    made = []
    for number in range(STEPS):
        model.zero_grad(set_to_none=True)
        forward_backward(number, False)
        made.append(gradients_of(model))
    with torch.no_grad():
        found = forward_backward(STEPS, True)
    of_answers = (
        one["logprobs"] * batch.data_dict["token_mask"] for batch, one in found
    )  # what it says of padding is nobody's
    made.append({f"log-probabilities {n}": one for n, one in enumerate(of_answers)})
    return made


def work(rank: int, meeting: str, checkout: Path, dtype: str, cp: int) -> None:
    with stage_of(rank, meeting, lambda: load(checkout), dtype, cp) as (its, model):
        attend_within_documents(model)
        from megatron_epp.frameworks.nemo_rl.slices import NemoSamples

        compare(
            rank,
            lambda: train(its, model),
            lambda: megatron_epp.attach(model, NemoSamples()),
        )


if __name__ == "__main__":
    sys.exit(run_stages(__doc__, "NeMo-RL", SOURCE, work, shares_rows=True))
