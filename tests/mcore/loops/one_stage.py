# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_one_stage.py: two tensor-parallel ranks, one stage; answers as JSON.

    one_stage.py FOLDER

Log-probabilities without logits, whole and in slices; slices within a memory bound; positions of
several axes; what attach refuses.
"""

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[3])]

import megatron_epp
from megatron_epp.mcore.patching import cpu_host

cpu_host.install_cpu_host()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_epp.mcore.loops import attached, token_log_probs
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.install import Installation
from megatron_epp.mcore.loops.settings import Settings
from tests.mcore.loops.joined import joined

WORDS, CONTEXT, BLOCK = 98, 128, 7
LENGTHS = ((24, 16), (96,), (9, 12, 20), (40,))  # 41 rows are padded for two ranks


def build(kind: str = "rope") -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
        tensor_model_parallel_size=2, sequence_parallel=True, params_dtype=torch.float64,
        persist_layer_norm=False, mrope_section=[1, 1, 2] if kind == "mrope" else None,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), WORDS, CONTEXT,
        position_embedding_type=kind, share_embeddings_and_output_weights=True,
    )  # fmt: skip


def micro_batches(lengths=LENGTHS) -> list[dict]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for of in lengths:
        shape, longest = (len(of), max(of)), max(of)
        tokens = torch.randint(WORDS, (len(of), longest + 1), generator=generator)
        inside = torch.arange(longest) < torch.tensor(of)[:, None]
        made.append(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": inside.double(),
                "temperature": 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64),
                "attention_mask": torch.ones(1, 1, longest, longest, dtype=torch.bool).triu(1),
                "position_ids": torch.arange(longest).expand(shape),
                "lengths": of,
            }
        )
    return made


def inputs_of(batch: dict) -> dict:
    names = "position_ids", "attention_mask"
    return {"input_ids": batch["tokens"], **{name: batch.get(name) for name in names}}


def by_logits(data_iterator, model):
    batch = next(data_iterator)
    logits = gather_from_tensor_model_parallel_region(model(**inputs_of(batch)))
    every = (logits / batch["temperature"][..., None]).log_softmax(-1)
    chosen = every.gather(-1, batch["labels"][..., None])[..., 0]
    made = torch.stack((chosen, -(every.exp() * every).sum(-1)), -1)
    return made, partial(policy_loss, batch)


def without_logits(data_iterator, model):
    batch = next(data_iterator)
    made = megatron_epp.log_probs(
        model,
        batch["labels"],
        temperature=batch["temperature"],
        entropy=True,
        **inputs_of(batch),
    )
    return torch.stack(made, -1), partial(policy_loss, batch)


def policy_loss(batch, made_BS2, non_loss_data=False):
    """A mean over sequences of means, and entropies."""
    mask = batch["loss_mask"]
    each = ((made_BS2[..., 0].exp() ** 0.5 + 0.3 * made_BS2[..., 1]) * mask).sum(1) / mask.sum(1)
    return each.mean(), {"loss": each.mean().item()}


def step(model, batches, forward_step) -> tuple[list, dict]:
    model.zero_grad(set_to_none=True)
    made = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(batches), model=[model],
        num_microbatches=len(batches), seq_length=1, micro_batch_size=1,
    )  # fmt: skip
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):  # of this rank's rows
            dist.all_reduce(gradients[name])
    return made, gradients


def difference(found, expected) -> float:
    values = [abs(a["loss"] - b["loss"]) for a, b in zip(found[0], expected[0], strict=True)]
    gradients = [
        float((found[1][name] - wanted).abs().max() / wanted.abs().max())
        for name, wanted in expected[1].items()
    ]
    return float(torch.tensor(values + gradients).max())  # what is no number among them shows


def refusal(do) -> str:
    try:
        do()
    except ValueError as error:
        return str(error)
    return "went well"


KEYS = ("tokens", "labels", "loss_mask", "temperature")


def log_probs(ran: list) -> dict:
    """Log-probabilities whole, and in slices within ever less memory."""
    model, found = build(), {}
    expected = step(model, micro_batches(), by_logits)
    with patch.object(token_log_probs, "rows_at_once", lambda *any: BLOCK):
        found["whole"] = difference(step(model, micro_batches(), without_logits), expected)
        installed = Installation(Settings(observe=ran.append))
        made = megatron_epp.attach(model, Samples(policy_loss, KEYS), memory_gib=1)
        for name, mib in (("all fits", 1024), ("some fits", 0.15), ("least", 0.12)):
            made.memory = made.memory.of(model.config, WORDS, mib * 2**20)
            found[name] = [
                difference(step(model, micro_batches(), without_logits), expected),
                [[span.document for span in chunk.spans] for chunk in ran[-1].plan.chunks],
            ]
        made.memory = made.memory.of(model.config, WORDS, 2**10)
        found["nothing fits"] = refusal(lambda: step(model, micro_batches(), without_logits))
    batch = micro_batches()[1]
    with torch.no_grad():
        for name, labels, temperature in (
            ("labels", batch["labels"][:, 1:], 1.0),
            ("no labels", None, 1.0),
            ("temperature", batch["labels"], 0.0),
            ("temperatures", batch["labels"], torch.ones(3)),
        ):
            found[name] = refusal(
                lambda labels=labels, temperature=temperature: megatron_epp.log_probs(
                    model, labels, temperature=temperature, **inputs_of(batch)
                )
            )
    installed.remove()
    return found


class OfSeveralAxes(Samples):
    """Positions of a picture's tokens: the adapter's inputs tell, the slices follow."""

    def inputs(self, micro_batch, document):
        return {**inputs_of(micro_batch), "labels": micro_batch["labels"]}


def several_axes(ran: list) -> dict:
    model = build("mrope")
    batches = micro_batches(((64,), (24,)))
    for batch in batches:
        length = batch["tokens"].shape[1]
        places = torch.arange(length)
        axes = torch.stack((places // 2, places % 7, places * 3 % 11))
        batch["position_ids"] = axes[:, None]

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        losses = model(**inputs_of(batch), labels=batch["labels"])
        return losses[..., None].expand(*losses.shape, 2), partial(policy_loss, batch)

    expected = step(model, batches, forward_step)
    with Installation(Settings(observe=ran.append)):
        made = megatron_epp.attach(model, OfSeveralAxes(policy_loss), memory_gib=1)
        made.memory = made.memory.of(model.config, WORDS, 0.1 * 2**20)
        found = step(model, batches, forward_step)
        made.adapter = Samples(policy_loss)  # of text, whose axes are one
        other = difference(step(model, batches, forward_step), expected)
    return {
        "axes": [difference(found, expected), len(ran[-1].plan.chunks)],
        "axes left out": other,
    }


def refusals() -> dict:
    found = {}

    class Strange(torch.nn.Module):
        """Two language models."""

        def __init__(self):
            super().__init__()
            self.one, self.other, self.config = build(), build(), None

    for name, model in (("two", Strange()), ("none", torch.nn.Linear(1, 1))):
        found[name] = refusal(lambda model=model: megatron_epp.attach(model, Samples()))
    model = build()
    model.config.context_parallel_size = 4
    found["heads"] = refusal(lambda: megatron_epp.attach(model, Samples()))
    model.config.context_parallel_size = 1
    said: list[str] = []
    with patch.object(attached, "say", said.append):
        megatron_epp.attach(build(), Samples())
    found["attached"] = " ".join(said)
    model.config.num_moe_experts, model.config.moe_router_load_balancing_type = 4, "sinkhorn"
    found["sinkhorn"] = refusal(lambda: megatron_epp.attach(model, Samples()))
    return found


def main() -> None:
    ran: list = []
    with joined(2) as (_, _, answers):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        answers |= log_probs(ran) | several_axes(ran) | refusals()


if __name__ == "__main__":
    main()
