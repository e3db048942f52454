"""Multi-token prediction under ``--epp``: its rows, trained. Certified: test_certify_kinds.py."""

import re
from itertools import pairwise
from pathlib import Path

import numpy
import pytest

from megatron_epp.mcore.data.global_batches import BatchDocument
from megatron_epp.mcore.data.mtp_targets import (
    Predictions,
    TargetRows,
    mtp_tokens,
    target_counts,
)
from tests.mcore.resumes import STOCK_ON_DOCUMENTS
from tests.mcore.runs import VOCABULARY, flags, train, write_corpus, write_documents

pytestmark = pytest.mark.everything

# ------------------------------------------------------------------ rows

TOKENS = numpy.array([3, 1, 4, 1, 5, 9, 2])
MASK = numpy.array([1, 0, 1, 1, 0, 1], numpy.float32)


class OneDocument:
    def inputs(self, sample: int, start: int, stop: int) -> numpy.ndarray:
        assert 0 <= start <= stop <= len(MASK)
        return TOKENS[start:stop]

    def targets(self, sample: int, start: int, stop: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        assert 0 <= start <= stop <= len(MASK)
        return TOKENS[start + 1 : stop + 1], MASK[start:stop]


def rolled(values: numpy.ndarray, by: int) -> numpy.ndarray:
    """As Megatron rolls a document alone: zeros come in behind its end."""
    return numpy.concatenate((values[by:], numpy.zeros(by)))[: len(values)]


@pytest.mark.parametrize("cut", [(), (1,), (2, 5), (1, 2, 3, 4, 5)])
def test_rows_of_slices_are_those_of_the_rolled_document(cut: tuple[int, ...]) -> None:
    """Of documents shorter than the depths, too."""
    document, predictions, sample = OneDocument(), Predictions(8, 0.3), BatchDocument(0, len(MASK))
    counts = target_counts(document, sample, predictions)
    boundaries = (0, *cut, sample.length)
    tokens, labels, weights, masks = [], [], [], []
    for start, stop in pairwise(boundaries):
        targets = TargetRows(predictions, stop - start)
        targets.add(slice(0, stop - start), document, sample, (start, stop), lambda: counts)
        tokens.append(mtp_tokens(document, sample, (start, stop), predictions.depths))
        labels.append(targets.labels)
        weights.append(targets.weights)
        masks.append(targets.mtp_mask)
    tokens, labels, weights, masks = (
        numpy.concatenate(each, axis=1) for each in (tokens, labels, weights, masks)
    )
    for depth in range(predictions.each):
        mask = rolled(MASK, depth)
        assert counts[depth] == mask.sum()
        counted = mask > 0
        assert (labels[depth] == rolled(TOKENS[1:], depth))[counted].all()
        if depth:
            assert (tokens[depth - 1] == rolled(TOKENS[:-1], depth)).all()
            mean = mask / max(1, mask.sum())
            assert (masks[depth - 1] == mask).all()
            assert weights[depth] == pytest.approx(0.3 / 8 * MASK.sum() * mean)
        else:
            assert (weights[0] == MASK).all()


# ------------------------------------------------------------------ trained


def test_losses_in_the_log_are_megatrons(tmp_path: Path) -> None:
    """With one document a micro-batch; and its checkpoint goes on in the other."""
    corpus = write_corpus(tmp_path / "documents", [65] * 24)
    model = {"mtp-num-layers": 2, "num-layers": 2, "seq-length": 64, "max-position-embeddings": 64}
    stock = {"micro-batch-size": 1, "calculate-per-token-loss": True, "dataloader-type": "single"}
    saved = {"save": tmp_path / "saved", "save-interval": 2}
    theirs = train(flags(corpus, **model, **stock, **saved), program=STOCK_ON_DOCUMENTS)
    ours = train(flags(corpus, **model, epp=True, **{"train-iters": 2}))
    again = train(flags(corpus, **model, epp=True, load=tmp_path / "saved", finetune=True))
    assert ours.status == theirs.status == again.status == 0, ours.output + theirs.output
    assert ours.losses == pytest.approx(theirs.losses[:2], rel=1e-5) and len(ours.losses) == 2
    assert ours.grad_norms == pytest.approx(theirs.grad_norms[:2], rel=1e-3)
    assert again.losses[0] < ours.losses[0]
    for depth in (1, 2):
        mine, others, later = (further_losses(run.output, depth) for run in (ours, theirs, again))
        assert len(mine) == 2 and mine == pytest.approx(others[:2], rel=1e-5)
        assert later[0] < mine[0]


def further_losses(output: str, depth: int) -> list[float]:
    return [float(x) for x in re.findall(rf"mtp_{depth} loss: ([0-9.E+-]+)", output)]


def test_documents_too_short_for_a_depth_count_in_no_mean(tmp_path: Path) -> None:
    """A logged loss is the mean over a depth's targets: documents without one change nothing."""
    model = {"mtp-num-layers": 2, "num-layers": 2, "seq-length": 64, "max-position-embeddings": 64}
    model |= {"pipeline-model-parallel-size": 1, "train-iters": 1, "global-batch-size": 8}
    model |= {"split": "100,0,0", "epp": True, "epp-blend": "documents"}
    long = [17, 33, 9, 40]  # tokens; a document of 2 has a target of the next token alone
    texts = numpy.random.RandomState(3).randint(0, VOCABULARY, (4, 64))
    documents = [text[:length] for text, length in zip(texts, long, strict=True)]
    alone = write_documents(tmp_path / "alone", documents * 2, dtype=numpy.uint16)
    mixed = write_documents(tmp_path / "mixed", [*documents, *texts[:, :2]], dtype=numpy.uint16)
    runs = [train(flags(corpus, **model), processes=1) for corpus in (alone, mixed)]
    for depth in (1, 2):
        (expected,), (found,) = (further_losses(run.output, depth) for run in runs)
        assert found == pytest.approx(expected, rel=2e-6) and found > 4.5
