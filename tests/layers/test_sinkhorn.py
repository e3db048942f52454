"""Sinkhorn over the documents of a chunk: each as if it were alone, and balanced."""

import pytest
import torch

from megatron_epp.layers.moe.sinkhorn import TOLERANCE, weights

LENGTHS = (9, 1, 30, 4)
EXPERTS = 6


@pytest.fixture
def logits_TE() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    rows = sum(LENGTHS) + 3  # padding
    return 2 * torch.randn(rows, EXPERTS, generator=generator, dtype=torch.float64)


@pytest.fixture
def owners_T() -> torch.Tensor:
    counts = torch.tensor([*LENGTHS, 3])
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def test_each_document_is_balanced_as_if_it_were_alone(logits_TE, owners_T) -> None:
    made_TE = weights(logits_TE, owners_T, len(LENGTHS))
    for document in range(len(LENGTHS)):
        mine = owners_T == document
        alone = weights(logits_TE[mine], torch.zeros(int(mine.sum()), dtype=torch.int64), 1)
        torch.testing.assert_close(made_TE[mine], alone, rtol=1e-12, atol=0)


def test_experts_and_tokens_weigh_alike(logits_TE, owners_T) -> None:
    """Of experts up to when the iteration ends, of tokens nearly so; of all at once neither is."""
    made_TE = weights(logits_TE, owners_T, len(LENGTHS))
    for document, length in enumerate(LENGTHS):
        mine_TE = made_TE[owners_T == document]
        assert (mine_TE.sum(0) * EXPERTS - 1).abs().max() < 1e-5
        assert (mine_TE.sum(1) * length - 1).abs().max() < 100 * TOLERANCE
    together = weights(logits_TE, torch.zeros_like(owners_T), 1)
    shares = together[owners_T == 2].sum(0)
    assert (shares / shares.mean() - 1).abs().max() > 0.05


def test_a_chunk_without_documents_chooses_by_its_logits(logits_TE) -> None:
    nobody = torch.zeros(len(logits_TE), dtype=torch.int64)
    torch.testing.assert_close(weights(logits_TE, nobody, 0), logits_TE.exp())
