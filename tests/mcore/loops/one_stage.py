# ruff: noqa: E402  (the host is prepared before the first import of Megatron)
"""Run by test_one_stage.py: two tensor-parallel ranks, one stage; answers as JSON.

    one_stage.py FOLDER

Log-probabilities without logits, whole and in slices; slices within a memory bound; positions of
several axes; shared prefixes; what attach refuses.
"""

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[3])]

from tests.mcore.loops.loop import (  # isort: skip  (prepares the host)
    WORDS,
    call,
    difference,
    inputs_of,
    joined,
    micro_batches,
    outcome,
    trained,
)

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_epp
from megatron_epp.mcore.loops import attached, planned_call, token_log_probs
from megatron_epp.mcore.loops.adapters.samples import Samples
from megatron_epp.mcore.loops.install import Installation
from megatron_epp.mcore.loops.settings import Settings

CONTEXT, BLOCK = 128, 7
BATCHES = micro_batches((24, 16), (96,), (9, 12, 20), (40,))  # 41 rows are padded for two ranks


def build(kind: str = "rope") -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2,
        attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False, normalization="RMSNorm",
        tensor_model_parallel_size=2, sequence_parallel=True, params_dtype=torch.float64,
        persist_layer_norm=False, mrope_section=[1, 1, 2] if kind == "mrope" else None,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), WORDS + 1, CONTEXT,
        position_embedding_type=kind, share_embeddings_and_output_weights=True,
    )  # fmt: skip


def by_logits(data_iterator, model):
    batch = next(data_iterator)
    logits = gather_from_tensor_model_parallel_region(model(**inputs_of(batch)))
    every = (logits / batch["temperature"][..., None]).log_softmax(-1)
    chosen = every.gather(-1, batch["labels"][..., None])[..., 0]
    made = torch.stack((chosen, -(every.exp() * every).sum(-1)), -1)
    return made, partial(policy_loss, batch)


def without_logits(data_iterator, model):
    batch = next(data_iterator)
    heat, named = batch["temperature"], inputs_of(batch)
    made = megatron_epp.log_probs(model, batch["labels"], temperature=heat, entropy=True, **named)
    return torch.stack(made, -1), partial(policy_loss, batch)


def by_losses(data_iterator, model):
    batch = next(data_iterator)
    losses = model(**inputs_of(batch), labels=batch["labels"])
    return losses[..., None].expand(*losses.shape, 2), partial(policy_loss, batch)


def policy_loss(batch, made_BS2, non_loss_data=False):
    """A mean over sequences of means, and entropies."""
    mask = batch["loss_mask"]
    each = ((made_BS2[..., 0].exp() ** 0.5 + 0.3 * made_BS2[..., 1]) * mask).sum(1) / mask.sum(1)
    return each.mean(), {"loss": each.mean().item()}


def within(made, mib: float) -> None:
    """The model ``made`` has a memory bound of ``mib`` MiB."""
    made.memory = made.memory.of(made.part.config, WORDS + 1, mib * 2**20)


def log_probs(ran: list) -> tuple[dict, list]:
    """Log-probabilities whole, and in slices within ever less memory; and what is refused."""
    model, found = build(), {}
    expected = trained(model, BATCHES, by_logits)
    with patch.object(token_log_probs, "rows_at_once", lambda *any: BLOCK):
        found["whole"] = difference(trained(model, BATCHES, without_logits), expected)
        with Installation(Settings(observe=ran.append)):
            keys = ("tokens", "labels", "loss_mask", "temperature")
            made = megatron_epp.attach(model, Samples(policy_loss, keys), memory_gib=1)
            for name, mib in (("all fits", 1024), ("some fits", 0.15), ("least", 0.12)):
                within(made, mib)
                found[name] = [
                    difference(trained(model, BATCHES, without_logits), expected),
                    [[span.document for span in chunk.spans] for chunk in ran[-1].plan.chunks],
                ]
            within(made, 2**-10)
            said = [
                (r"attach\(memory_gib=", outcome(lambda: trained(model, BATCHES, without_logits)))
            ]
    labels = BATCHES[1]["labels"]
    for says, labels_BS, heat in (
        (
            r"log_probs: labels are \[1, 95\], the model's hidden .* 1 samples of 96",
            labels[:, 1:],
            1,
        ),
        (r"log_probs: labels=None on the last stage; expected \[B, S\] tokens", None, 1),
        ("log_probs: temperature 0.0; expected more than 0", labels, 0.0),
        (
            r"log_probs: temperature is \[3\], labels are \[1, 96\]; expected one that expands",
            labels,
            torch.ones(3),
        ),
    ):
        named = inputs_of(BATCHES[1])
        with torch.no_grad():
            refused = partial(megatron_epp.log_probs, model, labels_BS, temperature=heat, **named)
            said.append((says, outcome(refused)))
    return found, said


class OfSeveralAxes(Samples):
    """Positions of a picture's tokens: the adapter's inputs tell, the slices follow."""

    def inputs(self, micro_batch, document):
        return {**inputs_of(micro_batch), "labels": micro_batch["labels"]}


def several_axes(ran: list) -> dict:
    model = build("mrope")
    batches = micro_batches((64,), (24,))
    for batch in batches:
        places = torch.arange(batch["tokens"].shape[1])
        axes = torch.stack((places // 2, places % 7, places * 3 % 11))
        batch["position_ids"] = axes[:, None]
    expected = trained(model, batches, by_losses)
    with Installation(Settings(observe=ran.append)):
        made = megatron_epp.attach(model, OfSeveralAxes(policy_loss), memory_gib=1)
        within(made, 0.1)
        found = difference(trained(model, batches, by_losses), expected)
        made.adapter = Samples(policy_loss)  # of text, whose axes are one
        other = difference(trained(model, batches, by_losses), expected)
    return {"axes": [found, len(ran[-1].plan.chunks)], "axes left out": other}


def shared() -> dict:
    """Two of three samples begin alike, in one of two micro-batches; what each call says."""
    model, batches, lines = build(), micro_batches((64, 24, 30), (16,)), []
    for name in ("tokens", "labels"):
        batches[0][name] = batches[0][name].clone()
        batches[0][name][2, :12] = batches[0][name][0, :12]
    expected = trained(model, batches, by_losses)
    with Installation(Settings()), patch.object(planned_call, "say", lines.append):
        made = megatron_epp.attach(model, Samples(policy_loss), memory_gib=1, share_from=9)
        error = difference(trained(model, batches, by_losses), expected)
        call(model, batches[1:], by_losses, forward_only=True)
        made.share_from = 0
        call(model, batches, by_losses, forward_only=True)
    return {"shared": [error, *lines]}


class Strange(torch.nn.Module):
    """Two language models."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.config = build(), build(), None


def with_settings(**settings) -> GPTModel:
    model = build()
    vars(model.config).update(settings)
    return model


def bad_attaches() -> list:
    decoders = "with a decoder of Megatron's layers"
    sinkhorn = {"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"}
    return [
        (f"attach: {says}", outcome(partial(megatron_epp.attach, model, Samples())))
        for says, model in (
            (f"a Strange holds several modules {decoders}", Strange()),
            (f"a Linear holds no module of Megatron's {decoders}", torch.nn.Linear(1, 1)),
            (
                "2 attention heads of a tensor-parallel rank do not divide over 4",
                with_settings(context_parallel_size=4),
            ),
            (
                "slices do not compute MoE: load balancing over the tokens of a call",
                with_settings(**sinkhorn),
            ),
        )
    ]


def main() -> None:
    ran: list = []
    with joined(2) as (_, answers):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        found, said = log_probs(ran)
        answers |= found | several_axes(ran) | shared() | {"bad": said + bad_attaches()}
        lines: list[str] = []
        with patch.object(attached, "say", lines.append):
            megatron_epp.attach(build(), Samples())
        answers["attached"] = " ".join(lines)


if __name__ == "__main__":
    main()
