"""Adapters cut micro-batches of common forms and put outputs together again; lies are refused."""

from types import SimpleNamespace

import pytest
import torch

from megatron_epp.corpus.shared_prefixes import shared_prefixes
from megatron_epp.mcore.loops.adapter import forest_of, lengths_of, side_by_side
from megatron_epp.mcore.loops.adapters.packed import PackedDocuments, documents_of
from megatron_epp.mcore.loops.adapters.samples import Samples, masked_sum


def samples() -> dict:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6])
    return {
        "tokens": torch.arange(18).view(3, 6),
        "labels": torch.arange(18).view(3, 6) + 1,
        "loss_mask": mask,
    }


def params(ends: list[int], padded: list[int] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        cu_seqlens_q=torch.tensor(ends, dtype=torch.int32),
        cu_seqlens_q_padded=None if padded is None else torch.tensor(padded, dtype=torch.int32),
    )


def test_samples_end_behind_their_last_target() -> None:
    assert Samples().lengths(samples()) == (4, 2, 1)
    assert Samples().lengths({**samples(), "lengths": [5, 3, 2]}) == (5, 3, 2)
    assert Samples().lengths({"tokens": torch.zeros(2, 6)}) == (6, 6)


def test_outputs_of_samples_are_padded_for_the_loops_loss() -> None:
    seen = []
    adapter = Samples(lambda batch, outputs: seen.append(outputs) or (outputs.sum(), {}))
    outputs = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0]), torch.tensor([7.0])]
    adapter.loss(samples(), outputs)
    assert seen[0].tolist() == [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0]]
    total, tokens, report = masked_sum(samples(), seen[0])
    assert total == 10 + 6 and tokens == 5 and report["lm loss"].tolist() == [16, 5]


@pytest.mark.parametrize("padded", [None, [0, 4, 10]])
def test_packed_documents_lie_where_the_borders_say(padded) -> None:
    batch = {
        "input_ids": torch.arange(10)[None],
        "labels": 1 + torch.arange(10)[None],
        "packed_seq_params": params([0, 3, 8], padded),
    }
    adapter = PackedDocuments(lambda batch, outputs: outputs)
    assert adapter.lengths(batch) == (3, 5)
    begin = 3 if padded is None else 4
    assert documents_of(batch) == [(0, 3), (begin, begin + 5)]
    of_its_own = {name: batch[name] for name in ("input_ids", "labels")}
    of_its_own |= {"cu_seqlens_q": torch.tensor([[0, 3, 8]]), "cu_seqlens_q_padded": padded}
    assert documents_of(of_its_own) == documents_of(batch)
    made = adapter.rows(batch, 1, 1, 4)
    assert made["input_ids"].tolist() == [[begin + 1, begin + 2, begin + 3]]
    whole = adapter.loss(batch, [torch.ones(3), 2 * torch.ones(5)])
    gap = [0.0] * (begin - 3)
    assert whole.tolist() == [[1.0] * 3 + gap + [2.0] * 5 + [0.0] * (10 - begin - 5)]


def test_borders_beyond_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="cu_seqlens end at row 9, the micro-batch has 6"):
        documents_of({"tokens": torch.zeros(1, 6), "cu_seqlens": torch.tensor([0, 9])})
    with pytest.raises(ValueError, match=r"without packed_seq_params or cu_seqlens.*\(it has x\)"):
        documents_of({"x": 1})


def test_rows_that_are_drawn_decide_what_is_shared() -> None:
    """A temperature, positions, features: outputs may depend on all but what the loss alone reads.
    That tokens and labels are alike is not enough."""
    tokens = torch.arange(8).expand(2, 8)
    mask, heat = torch.ones(2, 8), torch.ones(2, 8)
    mask[1, 2], heat[1, 5] = 0, 0.5
    features = torch.zeros(2, 8, 3)
    features[1, 6, 2] = 1
    whole = {"tokens": tokens, "labels": tokens + 1, "loss_mask": mask}
    batch = {**whole, "temperature": heat, "features": features, "lengths": (8, 8)}
    keys = ("tokens", "labels", "loss_mask")

    def shared(*more: str, loss_keys=("loss_mask",)) -> int:
        found = forest_of(Samples(keys=(*keys, *more), loss_keys=loss_keys), batch, 0, 8, 1)
        return found.nodes[0].stop if found.shares else 0

    assert shared() == 8 and shared("temperature") == 5 and shared("features") == 6
    assert shared("temperature", loss_keys=("loss_mask", "temperature")) == 8
    assert shared(loss_keys=()) == 2

    class Claims(Samples):
        """Looks at tokens alone."""

        def prefixes(self, micro_batch):
            return shared_prefixes(list(tokens.numpy()), 1)

    assert forest_of(Claims(), batch, 0, 8).shares
    with pytest.raises(ValueError) as error:
        forest_of(Claims(keys=(*keys, "temperature")), batch, 0, 8)
    assert str(error.value) == (
        "the adapter's prefixes of micro-batch 0: 'temperature' of document 1 in [0:8] are not "
        "those of document 0; expected equal rows (shared_prefixes finds them)"
    )

    class Long(Samples):
        """Gives a row too many."""

        def rows(self, micro_batch, document, start, stop):
            return super().rows(micro_batch, document, start, stop + 1)

    with pytest.raises(
        ValueError, match=r"document 0, tokens \[0:7\]: 'tokens' has shape \(1, 8\)"
    ):
        forest_of(Long(keys=keys), {**batch, "lengths": (7, 7)}, 0, 8, 1)


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([], "finds no document in micro-batch 1; expected one"),
        ([3, 0], "says 0 tokens for document 1 of micro-batch 1; expected 1 to 8"),
        ([9], "says 9 tokens for document 0 of micro-batch 1; expected 1 to 8, the model's pos"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths, says) -> None:
    with pytest.raises(ValueError, match=says):
        lengths_of(SimpleNamespace(lengths=lambda micro_batch: lengths), None, 1, 8)


def test_slices_side_by_side_are_padded_together() -> None:
    """With a row that there is: a temperature of 0 would divide by it."""
    parts = [
        {"tokens": torch.ones(1, 2), "labels": None},
        {"tokens": 2 * torch.ones(1, 1), "labels": None},
    ]
    made = side_by_side(parts, 4)
    assert made["tokens"].tolist() == [[1, 1, 2, 2]] and made["labels"] is None


# ------------------------------------------------------------------ models that cannot be cut


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"window_size": (5, 0), "softmax_type": "learnable"}, None),
        ({"num_moe_experts": 8}, None),
        ({"multi_latent_attention": True}, None),
        ({"mtp_num_layers": 1}, "slices do not compute multi-token prediction"),
        (
            {"experimental_attention_variant": "dsa"},
            "slices do not compute other attention variants",
        ),
        ({"experimental_attention_variant": "gdn"}, None),
        (
            {"overlap_moe_expert_parallel_comm": True},
            "slices do not compute MoE: token exchange overlapped with computation",
        ),
        ({"enable_mhc_connections": True}, "slices do not compute several residual streams"),
        ({"enable_hyper_connections": True}, "slices do not compute several residual streams"),
        ({"hc_count": 4}, "slices do not compute several residual streams"),
        ({"hc_count": 1}, None),
        ({"fp8": "hybrid"}, "slices do not compute fp8 (fp8)"),
        ({"fp4": "e2m1"}, "slices do not compute fp4 (fp4)"),
        ({"attention_dropout": 0.1}, "slices do not compute dropout in attention"),
        ({"context_parallel_size": 2}, None),
        ({"context_parallel_size": 8}, "4 attention heads of a tensor-parallel rank do not divide"),
        ({"window_size": (5, 5)}, "slices compute windows of W tokens before each, fewer"),
        ({"window_size": (64, 0)}, "slices compute windows of W tokens before each, fewer"),
        ({"softmax_type": "odd"}, "slices do not compute a softmax of type odd (softmax_type)"),
        ({"position_embedding_type": "yarn"}, None),
        (
            {"position_embedding_type": "relative"},
            "slices do not compute positions of type relative",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8}}, None),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 8}},
            "slices do not compute rotary embeddings that follow a call's length (rope_type dyn",
        ),
    ],
)
def test_attach_says_what_slices_do_not_compute(changed, says) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    from megatron_epp.mcore.capabilities.table import limit_for

    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, attention_dropout=0.0
    )
    for name, value in changed.items():  # as it stands: Megatron's own checks are not asked
        setattr(config, name, value)
    model = GPTModel.__new__(GPTModel)
    positions = changed.get("position_embedding_type", "rope")
    model.__dict__ |= {
        "config": config,
        "max_sequence_length": 64,
        "position_embedding_type": positions,
    }
    found = limit_for("slices", model)
    assert found is None if says is None else str(found).startswith(says)
    assert "--" not in str(found)


def test_what_slices_do_not_compute_is_said_in_the_callers_words() -> None:
    """A loop has the model's configuration, and no flags."""
    from megatron_epp.mcore.capabilities.table import TABLE, in_settings

    said = [in_settings(f"{row.what}: {row.instead}") for row in TABLE if row.slices]
    assert said and not [line for line in said if "--" in line]
    assert in_settings("give --moe-token-dispatcher-type alltoall, or run without --epp") == (
        "give moe_token_dispatcher_type alltoall, or run without slices"
    )
