"""A training run on one GPU on real text in bf16: its loss is that of Megatron's own run."""

import sys
from pathlib import Path

import numpy
import pytest

from megatron_epp.mcore.patching import emulated_engine
from tests.mcore.resumes import STOCK, STOCK_ON_DOCUMENTS
from tests.mcore.runs import PROGRAM, Run, flags, trained

pytestmark = pytest.mark.gpu

# With emulated kernels, what takes seconds.
SMALL, LARGE = (96, 8, 64, "4e-3"), (512, 20, 256, "1e-3")
CONTEXT, ITERATIONS, HIDDEN, RATE = SMALL if emulated_engine.is_wanted() else LARGE


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The text of Python's standard library, a byte a token, in documents of one length: those
    that Megatron's own schedule can be given one by one."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("text") / "bytes"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for path in sorted(Path(sys.modules["os"].__file__).parent.glob("*.py")):
        text = numpy.frombuffer(path.read_bytes(), dtype=numpy.uint8)
        if len(text) > CONTEXT:
            builder.add_item(torch.from_numpy(text[: CONTEXT + 1].astype(numpy.int64)))
            builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def words(corpus: Path, **changes) -> list[str]:
    named = {
        "num_layers": 4,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 2 * HIDDEN,
        "pipeline_model_parallel_size": 1,
        "global_batch_size": 8,
        "train_iters": ITERATIONS,
        "seq_length": CONTEXT,
        "max_position_embeddings": CONTEXT,
        "vocab_size": 256,
        "lr": RATE,
        "bf16": True,
        # Megatron's own run would want apex for its output layer.
        "no_gradient_accumulation_fusion": True,
    }
    return flags(corpus, **(named | changes))


@pytest.fixture(scope="module")
def weights(corpus, tmp_path_factory) -> Path:
    """A checkpoint for runs on other stages to begin with: each draws its first weights itself."""
    folder = tmp_path_factory.mktemp("weights")
    trained(words(corpus, epp=True, train_iters=1, save=folder, save_interval=1), processes=1)
    return folder


def trained_from(
    weights: Path, corpus: Path, pp: int, tp: int, ranks: int, program=PROGRAM, **changes
) -> Run:
    """A run on that many stages and tensor-parallel ranks, which begins with ``weights``."""
    named = {
        "epp": True,
        "pipeline_model_parallel_size": pp,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": True if tp > 1 else None,
        "load": weights,
        "finetune": True,
    }
    line = words(corpus, **(named | changes))
    return trained(line, processes=ranks, program=program, seconds=400)


@pytest.fixture(scope="module")
def plain(corpus) -> Run:
    """Megatron's own run."""
    line = words(corpus, epp_cost_model=None, **STOCK)
    return trained(line, processes=1, program=STOCK_ON_DOCUMENTS)


@pytest.mark.parametrize(
    ("attention", "unfused"), [("te", True), ("te", None), ("torch", True)], ids=str
)
def test_loss_is_that_of_the_run_without_epp(corpus, plain, attention, unfused, engine) -> None:
    """With linears, too, that add up their weights' gradients in their product (the default)."""
    named = {"epp_attention": attention, "no_gradient_accumulation_fusion": unfused}
    elastic = trained(words(corpus, epp=True, **named), processes=1)
    assert ("with emulated kernels" in elastic.output) == emulated_engine.is_wanted()
    assert len(plain.losses) == len(elastic.losses) == ITERATIONS
    assert elastic.losses == pytest.approx(plain.losses, rel=0.01)
    assert elastic.losses[-1] < 0.8 * elastic.losses[0]
