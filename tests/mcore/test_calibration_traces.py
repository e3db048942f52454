"""A calibration leaves no trace: what is trained afterwards is as if nobody had measured."""

import pytest

from tests.mcore.runs import flags, train, trained, write_corpus


@pytest.mark.parametrize("how", ["nothing", "probe", "error"])
def test_distributed_data_parallelism_is_left_as_it_was_found(how):
    """Probing one layer finishes its bucket's parameter gather, which dispatches the next one's;
    left in flight that gather ends iteration 2 with Megatron's own assertion."""
    run = trained([how], processes=1, program=("-m", "tests.mcore.probed_ddp"))
    assert run.output.rstrip().endswith("trained")


def test_measured_calibration_under_every_overlap_of_the_example_scripts(tmp_path):
    """Two replicas of two stages, several buckets: the flags of examples/ with the cost model that
    they get, measured at start."""
    corpus = write_corpus(tmp_path / "corpus", [90, 17, 33, 120, 60, 20, 75, 41] * 4)
    words = flags(
        corpus,
        epp=True,
        epp_cost_model=None,
        ddp_bucket_size=4000,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        train_iters=3,
        epp_record=tmp_path / "saved",
    )
    run = train(words, processes=4)
    assert run.status == 0, run.output[-3000:]
    assert len(run.losses) == 3
    assert (tmp_path / "saved" / "epp-cost-model.json").exists()
