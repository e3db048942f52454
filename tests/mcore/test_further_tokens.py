"""Multi-token prediction under ``--epp``, trained. Certified: test_certify_kinds.py."""

from pathlib import Path

import numpy
import pytest

from tests.mcore.resumes import logged, require_megatrons_own_numbers
from tests.mcore.runs import VOCABULARY, flags, train, write_documents

pytestmark = pytest.mark.everything


def test_losses_in_the_log_are_megatrons(tmp_path: Path) -> None:
    """Its checkpoint goes on in the other: test_trained_kinds.py."""
    model = {"mtp_num_layers": 2, "num_layers": 2}
    further = {f"mtp_{depth} loss": 1e-5 for depth in (1, 2)}
    require_megatrons_own_numbers(tmp_path, model, processes=2, others=further)


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
        (expected,), (found,) = (logged(f"mtp_{depth} loss", run.output) for run in runs)
        assert found == pytest.approx(expected, rel=2e-6) and found > 4.5
