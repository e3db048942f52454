"""Ranks that share one GPU, their messages through the host's memory: the losses of one rank.

NCCL wants a GPU for each rank, gloo does not: one GPU tells whether pipelines compute rightly.
"""

from pathlib import Path

import pytest

from tests.gpu.test_training import ITERATIONS, corpus, words  # noqa: F401
from tests.mcore.runs import Run, train

pytestmark = pytest.mark.gpu

SHARED = (str(Path(__file__).with_name("shared_gpu.py")),)


def trained(corpus: Path, pp: int, tp: int, **changes) -> Run:  # noqa: F811
    flags = words(
        corpus,
        epp=True,
        epp_attention="torch",
        distributed_backend="gloo",
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=tp,
        epp_memory_budget_gib=2,  # each rank would take the whole device for its own
        **changes,
    )
    return train(flags, processes=pp * tp, program=SHARED, seconds=400)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2)])
def test_losses_are_those_of_one_rank(corpus, pp, tp) -> None:  # noqa: F811
    alone = trained(corpus, 1, 1)
    # With a measured cost model: messages between the stages are timed.
    spread = trained(corpus, pp, tp, epp_cost_model=None)
    assert alone.status == spread.status == 0, alone.output + spread.output
    assert len(spread.losses) == ITERATIONS
    assert spread.losses == pytest.approx(alone.losses, rel=0.01)
