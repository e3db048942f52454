# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_four_ranks.py: four processes, loops whose replicas meet in their ops.

    four_ranks.py FOLDER

Two stages of two replicas that share their layers' experts, each with documents of its own; then
four stages, whose process groups are destroyed and made anew between two calls.
"""

import sys
from datetime import timedelta
from pathlib import Path
from random import Random
from unittest.mock import patch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import megatron_epp
from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from megatron_epp.mcore.loops import loop_schedule
from tests.mcore.loops.joined import joined
from tests.mcore.loops.rebuilt_groups import ReloadableWorld
from tests.waiting import LAST_RESORT_SECONDS

RANKS, WORDS, MICRO_BATCHES, CALLS = 4, 97, 8, 4
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_router_load_balancing_type": "none",
    "expert_model_parallel_size": 2,
}


def build_model(stages: int, **changed) -> GPTModel:
    stage, experts = mpu.get_pipeline_model_parallel_rank(), changed.get("num_moe_experts")
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        moe_token_dispatcher_type="alltoall", variable_seq_lengths=True, persist_layer_norm=False,
        pipeline_model_parallel_size=stages, pipeline_dtype=torch.float64,
        params_dtype=torch.float64, **changed,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm"), WORDS, 1024,
        pre_process=stage == 0, post_process=stage == stages - 1, position_embedding_type="rope",
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
    output = model(batch["tokens"], places, batch["attention_mask"], labels=batch["labels"])
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


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


def padding_step(data_iterator, model):
    """Written in a framework, says how it is read; pads what asks for it by four rows."""
    batch = next(data_iterator)
    tokens, labels = (
        functional.pad(batch[name], (0, batch["more"])) for name in ("input_ids", "labels")
    )
    rows = tokens.shape[1]
    mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1)
    output = model(tokens, torch.arange(rows)[None], mask, labels=labels)
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


padding_step.__module__ = "swift.megatron.trainers"


def misread(model) -> dict[str, object]:
    """What calls of a framework's loop make whose second replica lays a micro-batch out otherwise
    than is read, from the third call on, while gradients are reduced by hooks: Megatron's schedule,
    then ours."""
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=False)
    wrapped = DistributedDataParallel(model.config, settings, model)
    hooks = {"no_sync_func": wrapped.no_sync, "finalize_model_grads_func": finalize_model_grads}

    def run() -> list:
        made = []
        for number in range(CALLS + 1):
            batches = micro_batches(number)
            for batch in batches:
                batch |= {"input_ids": batch.pop("tokens"), "more": 0}
            batches[3]["more"] = 4 * (mpu.get_data_parallel_rank() == 1 and number >= 2)
            wrapped.zero_grad_buffer()
            with patch.multiple(model.config, **hooks):
                get_forward_backward_func()(
                    forward_step_func=padding_step,
                    data_iterator=iter(batches),
                    model=[wrapped],
                    num_microbatches=MICRO_BATCHES,
                    seq_length=1,
                    micro_batch_size=1,
                )
            made.append([p.main_grad.clone() for p in wrapped.parameters()])
        return made

    expected, ran, said = run(), [], []
    timeout = timedelta(seconds=LAST_RESORT_SECONDS)

    def say(words: str, by: int) -> None:
        if dist.get_rank() == by:
            said.append(words)

    with (
        patch.object(loop_schedule, "say", say),
        megatron_epp.install_schedule(observe=ran.append, timeout=timeout),
    ):
        ours = run()
    worst = max(
        float((gradient - wanted).abs().max() / wanted.abs().max())
        for all_ours, all_wanted in zip(ours, expected, strict=True)
        for gradient, wanted in zip(all_ours, all_wanted, strict=True)
    )
    return {"worst": worst, "plans": len(ran), "said": said}


def compared(model, prepare=lambda number: None) -> dict[str, object]:
    """Megatron's schedule, then ours: the worst difference, and the orders that this rank ran."""
    expected, ran = calls(model), []
    timeout = timedelta(seconds=LAST_RESORT_SECONDS)
    with megatron_epp.install_schedule(observe=ran.append, timeout=timeout):
        ours = calls(model, prepare)
    worst = max(
        float((gradients[name] - gradient).abs().max() / gradient.abs().max())
        for (_, gradients), (_, wanted) in zip(ours, expected, strict=True)
        for name, gradient in wanted.items()
    )
    same = all(a[0] == b[0] for a, b in zip(ours, expected, strict=True))
    orders = [" ".join(map(str, one.plan.orders[one.records[0].stage])) for one in ran]
    return {"worst": worst, "losses equal": same, "orders": orders}


def main() -> None:
    with joined(RANKS) as (_, folder, answers):
        mpu.initialize_model_parallel(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
        model_parallel_cuda_manual_seed(1)
        answers["experts over replicas"] = compared(build_model(2, **EXPERTS))
        answers["misread on a replica"] = misread(build_model(2))
        answers["read, in lockstep"] = misread(build_model(2, **EXPERTS))
        mpu.destroy_model_parallel()
        world = ReloadableWorld(dist.FileStore(str(folder / "second meeting"), RANKS))
        mpu.initialize_model_parallel(pipeline_model_parallel_size=4)
        model = build_model(4)

        def prepare(number: int) -> None:
            if number in (1, 2):
                world.rebuild()
            elif number == 3:
                world.rebuild_world()

        answers["groups made anew"] = compared(model, prepare) | {"late": world.late}


if __name__ == "__main__":
    main()
