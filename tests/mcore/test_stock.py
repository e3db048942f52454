"""Without --epp: Megatron's own training, from the wheel and without a GPU, saved and resumed."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.mcore import runs
from tests.mcore.resumes import tensors

pytestmark = pytest.mark.everything

# Dropout, so that the random states have to be resumed too; no flag names the CPU, gloo or an
# evaluation interval. Every parameter is a multiple of 64 elements: between others Megatron saves
# padding that nobody has written, and it differs from run to run.
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --swiglu
    --max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm
    --attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size 2 --global-batch-size 4
    --train-iters 4 --lr 1e-2 --eval-iters 1 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 63 --log-interval 1 --use-distributed-optimizer --save-interval 2
"""


def train(*more: str | Path) -> str:
    """Train in one process that no launcher started; returns what was said."""
    done = runs.train([*FLAGS.split(), *map(str, more)], processes=0)
    assert done.status == 0, done.output[-4000:]
    return done.output


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["float32", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, precision):
    """With the distributed optimizer, which needs three seams for it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    said = train("--save", whole, *precision)
    assert "validation loss at iteration 4" in said
    assert "Transformer Engine" not in said
    parts.mkdir()
    shutil.copytree(whole / "iter_0000002", parts / "iter_0000002")
    (parts / "latest_checkpointed_iteration.txt").write_text("2")
    train("--load", parts, "--save", parts, *precision)

    expected = tensors(whole / "iter_0000004", tmp_path / "expected.pt")
    found = tensors(parts / "iter_0000004", tmp_path / "found.pt")
    assert expected.keys() == found.keys()
    assert any("exp_avg_sq" in name for name in expected)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    halfway = tensors(whole / "iter_0000002", tmp_path / "halfway.pt")
    assert not all(torch.equal(expected[name], halfway[name]) for name in expected)
