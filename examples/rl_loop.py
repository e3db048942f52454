#!/usr/bin/env python3
"""A GRPO-shaped training loop on Megatron-core, its documents cut by elastic pipelines.

    python examples/rl_loop.py

Two processes are the two stages of a small GPT in float64. For every prompt there are several
answers of very different lengths; a micro-batch is a prompt with its answers, each behind the
prompt, padded to the longest as such loops do. A pass of forwards collects the log-probabilities of
before; the loss of a step is a ratio clipped per token, averaged over each answer, then over the
answers: it needs whole answers. In slices a prompt is computed once for all of its answers.
All of it runs twice: by Megatron's own schedule, and in slices, with the loop as it is. Prints both
losses and every gradient's difference, and fails where one exceeds 1e-12.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron_epp

STAGES, WORDS, CONTEXT, CLIP, TOLERANCE = 2, 97, 256, 0.2, 1e-12
ANSWERS = ((160, 9, 40), (12, 7), (30, 22, 5, 16), (60,))  # tokens of each, by prompt
PROMPT = 32


def build_model(stage: int, **experts):
    """This rank's stage of a GPT, as any loop on megatron.core builds it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
        pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.float64,
        params_dtype=torch.float64, variable_seq_lengths=True, persist_layer_norm=False,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it
        **experts,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(config.num_moe_experts, normalization="RMSNorm")
    return GPTModel(
        config, layer, WORDS, CONTEXT,
        pre_process=stage == 0, post_process=stage == STAGES - 1, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


# ------------------------------------------------------------------ the loop: nothing of ours


def make_batches() -> list[dict]:
    """One micro-batch a prompt. B answers, S tokens of the longest, prompt included."""
    torch.manual_seed(0)
    batches = []
    for answers in ANSWERS:
        lengths = [PROMPT + tokens for tokens in answers]
        longest = max(lengths)
        tokens = torch.randint(WORDS, (len(answers), longest + 1))
        tokens[:, :PROMPT] = tokens[0, :PROMPT].clone()
        places = torch.arange(longest)
        inside = places[None] < torch.tensor(lengths)[:, None]
        rewards = torch.randn(len(answers))
        batches.append(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": (inside & (places >= PROMPT - 1)).double(),  # answers, not the prompt
                "attention_mask": torch.ones(1, 1, longest, longest, dtype=torch.bool).triu(1),
                "advantages": rewards - rewards.mean(),
                "lengths": lengths,
            }
        )
    return batches


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    places = torch.arange(batch["tokens"].shape[1])[None]
    losses = model(
        batch["tokens"], places, batch.get("attention_mask"), labels=batch["labels"]
    )  # [B, S]: minus the log-probabilities
    return losses, partial(policy_loss, batch)


def policy_loss(batch, losses_BS, non_loss_data=False):
    """The clipped ratio, averaged over each answer, then over the answers."""
    log_probs_BS, mask_BS = -losses_BS, batch["loss_mask"]
    if non_loss_data:
        return log_probs_BS.detach() * mask_BS
    ratio_BS = (log_probs_BS - batch["old_log_probs"]).exp() ** 3  # as after a few steps
    gain_BS = torch.minimum(
        ratio_BS * batch["advantages"][:, None],
        ratio_BS.clamp(1 - CLIP, 1 + CLIP) * batch["advantages"][:, None],
    )
    each_B = (gain_BS * mask_BS).sum(1) / mask_BS.sum(1)
    return -each_B.mean(), {"loss": -each_B.mean().item()}


def one_step(model, batches: list[dict]) -> list[dict]:
    """Log-probabilities of before, then losses and gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    common = {
        "forward_step_func": forward_step, "model": [model], "num_microbatches": len(batches),
        "seq_length": CONTEXT, "micro_batch_size": 1,
    }  # fmt: skip
    with torch.no_grad():
        found = get_forward_backward_func()(
            data_iterator=iter(batches), forward_only=True, collect_non_loss_data=True, **common
        )
    generator = torch.Generator().manual_seed(1)
    for batch, log_probs in zip(batches, found, strict=False):
        noise = 0.1 * torch.randn(log_probs.shape, generator=generator)  # as if the policy moved
        batch["old_log_probs"] = log_probs + noise
    model.zero_grad(set_to_none=True)
    return get_forward_backward_func()(data_iterator=iter(batches), **common)


# ------------------------------------------------------------------ twice, and compared


def work(stage: int, meeting: str) -> None:
    megatron_epp.prepare_host()  # before Megatron's import: this host may have no GPU
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_epp.mcore.loops.adapters.samples import Samples
    from megatron_epp.mcore.patching.cpu_host import double_precision

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=stage, world_size=STAGES)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=STAGES)
    with double_precision():
        model_parallel_cuda_manual_seed(1)
        model, batches = build_model(stage), make_batches()
        stock = one_step(model, batches)
        expected = {name: p.grad.clone() for name, p in model.named_parameters()}

        ran = []
        # The one line that cuts documents, and computes once what several begin with.
        megatron_epp.attach(model, Samples(policy_loss), share_from=8, observe=ran.append)
        ours = one_step(model, batches)
    errors = [
        float((p.grad - expected[name]).abs().max() / expected[name].abs().max())
        for name, p in model.named_parameters()
    ]
    print(f"stage {stage}: {len(errors)} gradients, worst difference {max(errors):.1e}", flush=True)
    if stage == STAGES - 1:
        plan, given = ran[-1].plan, sum(sum(batch["lengths"]) for batch in batches)
        print(f"{len(batches)} micro-batches, {len(plan.chunks)} chunks", flush=True)
        print(f"{given} tokens given, {sum(plan.documents)} computed", flush=True)
        for number, (a, b) in enumerate(zip(stock, ours, strict=True)):
            print(f"loss of prompt {number}: {a['loss']:.15f} stock, {b['loss']:.15f} in slices")
            errors.append(abs(a["loss"] - b["loss"]))
    dist.barrier()
    if max(errors) > TOLERANCE:
        raise SystemExit(f"stage {stage}: NOT equal (to {TOLERANCE:g})")
    print(f"stage {stage}: equal (to {TOLERANCE:g})", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, ((Path(folder) / "meeting").as_uri(),), nprocs=STAGES)


if __name__ == "__main__":
    main()
