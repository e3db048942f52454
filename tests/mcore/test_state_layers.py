"""SSM and linear-attention layers under ``--epp``, trained. Certified: test_certify_kinds.py."""

import pytest

from tests.mcore.models import TRAINED_SSM
from tests.mcore.resumes import Job, require_megatrons_own_numbers
from tests.mcore.runs import write_corpus

pytestmark = pytest.mark.everything

PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    model = {**TRAINED_SSM, "pipeline_model_parallel_size": 1}
    require_megatrons_own_numbers(tmp_path, model, program=PROGRAM)


def test_documents_of_any_length_train_over_stages(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "documents", [400, 3, 40, 512, 9, 130])
    lengths = {"seq_length": 512, "max_position_embeddings": 512}
    run = Job(corpus, TRAINED_SSM, PROGRAM).train(epp=True, **lengths)
    assert len(run.losses) == 3
