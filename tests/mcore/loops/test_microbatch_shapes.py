"""Rows and documents of micro-batches of common forms, and what is said of others."""

from types import SimpleNamespace

import pytest
import torch

from megatron_epp.mcore.loops.microbatch_shapes import measured, shape_of
from megatron_epp.mcore.loops.replica.rank_status import agreed
from megatron_epp.planner.calls.microbatch import MicrobatchShape


def test_samples_side_by_side() -> None:
    found = shape_of({"tokens": torch.zeros(3, 8)})
    assert found == MicrobatchShape(8, 3)
    assert found.tokens == 24 and found.pairs == 3 * 36


@pytest.mark.parametrize(
    "boundaries",
    [
        {"cu_seqlens": torch.tensor([[0, 5, 8, 8]])},
        {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 8]))},
    ],
)
def test_packed_documents(boundaries) -> None:
    found = shape_of({"input_ids": torch.zeros(1, 9), **boundaries})
    assert found == MicrobatchShape(9, 1, (5, 3))
    assert found.pairs == 15 + 6


ALONE = {"tokens": torch.zeros(1, 8), "packed_seq_params": SimpleNamespace(local_cp_size=1)}


@pytest.mark.parametrize(
    "other",
    [
        *(None, torch.zeros(3), {"x": 1}, {"tokens": [1, 2]}, {"tokens": torch.zeros(4)}),
    ],
)
def test_what_cannot_be_told(other) -> None:
    assert shape_of(other) is None


@pytest.mark.parametrize("own", [ALONE, {"tokens": torch.zeros(1, 8), "local_cp_size": 2}])
def test_rows_of_a_micro_batch_on_ranks_of_its_own_are_nobodys_to_tell(own) -> None:
    """Dynamic context parallelism: told rows would be divided by all ranks of a stage."""
    assert measured(own, None, 0) is None
    assert measured(own, lambda batch: 8, 0) is None


def test_a_mapping_of_an_unknown_form_ends_nothing() -> None:
    strange = {"tokens": torch.zeros(1, 4), "packed_seq_params": SimpleNamespace(boundaries=[0, 4])}
    assert measured(strange, None, 0) is None


def test_a_function_of_the_loop() -> None:
    assert measured("anything", lambda batch: 7, 0) == MicrobatchShape(7)
    assert measured("anything", lambda batch: MicrobatchShape(7, 2), 0) == MicrobatchShape(7, 2)
    assert measured({"tokens": torch.zeros(3, 8)}, lambda batch: None, 0) is None
    with pytest.raises(ValueError, match=r"lengths\(micro-batch 3\) gave str; expected a Micro"):
        measured("anything", lambda batch: "7", 3)
    with pytest.raises(ValueError, match="0 rows x 1 samples: expected at least 1"):
        measured("anything", lambda batch: 0, 3)
    with pytest.raises(ValueError, match="documents of 9 tokens in a micro-batch of 8"):
        MicrobatchShape(8, 1, (5, 4))


def test_ranks_that_differ_are_named() -> None:
    assert agreed([None, [1, 2], [1, 2]], "it has", None) == [1, 2]
    assert agreed([None, None], "it has", None) is None
    with pytest.raises(ValueError, match="micro-batch 1 differs over ranks: it has 2 on rank 1, 3"):
        agreed([None, [1, 2], [1, 3]], "it has", None)
