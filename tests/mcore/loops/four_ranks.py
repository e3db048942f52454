# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_four_ranks.py: four stages, whose process groups are made anew between two calls.

four_ranks.py FOLDER
"""

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import megatron_epp
from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_epp.mcore.loops.adapters.samples import Samples
from tests.mcore.loops.joined import joined
from tests.mcore.loops.rebuilt_groups import ReloadableWorld
from tests.waiting import LAST_RESORT_SECONDS

RANKS, WORDS, MICRO_BATCHES, CALLS = 4, 97, 8, 4


def build_model() -> GPTModel:
    stage = mpu.get_pipeline_model_parallel_rank()
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type="alltoall", variable_seq_lengths=True, persist_layer_norm=False,
        pipeline_model_parallel_size=RANKS, pipeline_dtype=torch.float64,
        params_dtype=torch.float64,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), WORDS, 1024,
        pre_process=stage == 0, post_process=stage == RANKS - 1, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def micro_batches(number: int) -> list[dict]:
    """Of this replica alone, for call ``number``."""
    random, made = Random(100 * number + mpu.get_data_parallel_rank()), []
    for _ in range(MICRO_BATCHES):
        length = max(8, min(400, int(random.lognormvariate(4.0, 1.2))))
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(WORDS, (1, length + 1), generator=generator)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        made.append({"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "attention_mask": mask})
    return made


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    places = torch.arange(batch["tokens"].shape[1])[None]
    output = model(batch["tokens"], places, batch.get("attention_mask"), labels=batch["labels"])
    return output, partial(loss, batch)


def loss(batch, losses):
    return losses.mean(), {"loss": losses.mean().item()}


def calls(model, prepare=lambda number: None) -> list:
    """(losses, gradients) of call after call; ``prepare`` runs before each."""
    made = []
    for number in range(CALLS):
        prepare(number)
        model.zero_grad(set_to_none=True)
        found = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches(number)),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=1,
            micro_batch_size=1,
        )
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        made.append(([item["loss"] for item in found], gradients))
    return made


def compared(model, prepare=lambda number: None) -> dict[str, object]:
    """Megatron's schedule, then slices: the worst difference, and how many plans ran."""
    expected, ran = calls(model), []
    timeout = timedelta(seconds=LAST_RESORT_SECONDS)
    adapter = Samples(loss, ("tokens", "labels"))
    megatron_epp.attach(model, adapter, observe=ran.append, timeout=timeout)
    ours = calls(model, prepare)
    worst = max(
        float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        for (_, gradients), (_, wanted) in zip(ours, expected, strict=True)
        for name, gradient in wanted.items()
    )
    near = all(
        abs(one - other) < 1e-12
        for (mine, _), (wanted, _) in zip(ours, expected, strict=True)
        for one, other in zip(mine, wanted, strict=True)
    )
    return {"worst": worst, "losses equal": near, "plans": len(ran)}


def main() -> None:
    with joined(RANKS) as (_, folder, answers):
        world = ReloadableWorld(dist.FileStore(str(folder / "second meeting"), RANKS))
        mpu.initialize_model_parallel(pipeline_model_parallel_size=4)
        model_parallel_cuda_manual_seed(1)
        model = build_model()

        def prepare(number: int) -> None:
            if number in (1, 2):
                world.rebuild()
            elif number == 3:
                world.rebuild_world()

        answers["groups made anew"] = compared(model, prepare) | {"late": world.late}


if __name__ == "__main__":
    main()
