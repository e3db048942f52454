"""Documents as training has them, for what commands read of the same files."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

documents_module = pytest.importorskip("megatron_epp.mcore.data.documents")

from megatron_epp.mcore.data.global_batches import Documents, build_documents  # noqa: E402

SEED, END = 7, 1


def documents_of(
    prefixes: Sequence[Path], weights: list[float] | None, context: int, **fields: object
) -> Documents:
    """Training documents, as Megatron's builder gives them."""
    tokenizer = SimpleNamespace(eod=END, pad=0, eos=END, vocab_size=30_000, unique_identifiers={})
    common = {
        "random_seed": SEED,
        "tokenizer": tokenizer,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "sequence_length": context,
        "split": "100,0,0",
        "blend": ([str(prefix) for prefix in prefixes], weights),
    }
    documents = build_documents(documents_module.DocumentConfig(**common | fields), [400, 0, 0])[0]
    assert documents is not None
    return documents
