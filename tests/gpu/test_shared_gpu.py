"""Ranks that share one GPU, their messages through the host's memory: the losses of one rank.

NCCL wants a GPU for each rank, gloo does not: one GPU tells whether pipelines compute rightly.
"""

from pathlib import Path

import pytest

from megatron_epp.te_reference import reference_switch

# ruff: noqa: F811  fixtures of another module
from tests.gpu.test_training import ITERATIONS, corpus, weights, words  # noqa: F401
from tests.mcore.runs import Run, train

pytestmark = pytest.mark.gpu

MANY = pytest.mark.skipif(
    reference_switch.is_wanted(), reason="needs a GPU: more than two ranks over the reference"
)
SHARED = (str(Path(__file__).with_name("shared_gpu.py")),)


def trained(corpus: Path, weights: Path, pp: int, tp: int, **changes) -> Run:
    flags = words(
        corpus,
        epp=True,
        load=weights,
        finetune=True,
        epp_attention="torch",
        distributed_backend="gloo",
        pipeline_model_parallel_size=pp,
        tensor_model_parallel_size=tp,
        epp_memory_budget_gib=2,  # each rank would take the whole device for its own
        **changes,
    )
    return train(flags, processes=pp * tp, program=SHARED, seconds=400)


@pytest.mark.parametrize(
    ("pp", "tp"),
    [(2, 1), pytest.param(4, 1, marks=MANY), pytest.param(2, 2, marks=MANY)],
    ids=["2-1", "4-1", "2-2"],
)
def test_losses_are_those_of_one_rank(corpus, weights, pp, tp) -> None:
    alone = trained(corpus, weights, 1, 1)
    # With a measured cost model: messages between the stages are timed.
    spread = trained(corpus, weights, pp, tp, epp_cost_model=None)
    assert alone.status == spread.status == 0, alone.output + spread.output
    assert len(spread.losses) == ITERATIONS
    assert spread.losses == pytest.approx(alone.losses, rel=0.01)
