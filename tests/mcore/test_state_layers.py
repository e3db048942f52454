"""SSM and linear-attention layers under ``--epp``, trained. Certified: test_certify_kinds.py."""

from tests.mcore.resumes import Job, require_megatrons_own_numbers
from tests.mcore.runs import write_corpus

PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")

MODEL = {
    "hybrid_layer_pattern": "M*G-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def test_equal_documents_give_megatrons_own_numbers(tmp_path) -> None:
    model = {**MODEL, "pipeline_model_parallel_size": 1}
    require_megatrons_own_numbers(tmp_path, model, program=PROGRAM)


def test_documents_of_any_length_train_over_stages(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "documents", [400, 3, 40, 512, 9, 130])
    lengths = {"seq_length": 512, "max_position_embeddings": 512}
    run = Job(corpus, MODEL, PROGRAM).train(epp=True, **lengths)
    assert len(run.losses) == 3
