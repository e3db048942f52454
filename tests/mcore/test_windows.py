"""Sliding windows under ``--epp``: refused. Certified: test_certify_kinds.py, test_experts.py."""

from tests.mcore.runs import flags, train, write_corpus


def test_windows_beyond_the_context_end_with_status_2(tmp_path) -> None:
    corpus = write_corpus(tmp_path / "documents", [30] * 12)
    run = train(
        flags(corpus, epp=True, pipeline_model_parallel_size=1, window_size="128,0"), processes=1
    )
    assert run.status == 2, run.output
    (line,) = run.errors
    assert line.endswith(
        "give --window-size W,0 with W from 1 to --seq-length less 1, or leave it out"
    )
