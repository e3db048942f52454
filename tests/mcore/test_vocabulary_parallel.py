"""The output layer over the stages: the plain model's numbers, and what shows otherwise."""

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.certify.command import BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.ir import PlanError
from megatron_epp.ir.random_plan import arbitrary_plan
from megatron_epp.mcore.certify.command import main
from megatron_epp.mcore.lm_head.head import head_for
from megatron_epp.mcore.lm_head.messages import MessageShapes
from megatron_epp.mcore.lm_head.shard import VocabularyShard
from megatron_epp.runtime.memory_meter import NoMeter
from tests.mcore.certified import certified
from tests.mcore.models import HYBRID_MOE

pytestmark = pytest.mark.everything

SPREAD = "--epp-vocab-parallel on"


def model(more: str = "", layers: int = 4) -> tuple[tuple[str, ...], ...]:
    return (tuple(f"{LLAMA} --num-layers {layers} {SPREAD} {more}".split()),)


# Of stages with other letters, its experts over the ranks that split the sequence.
HYBRID = (
    f"{LLAMA} {HYBRID_MOE} {SPREAD} --hybrid-layer-pattern=*-*-|*E*E- --sequence-parallel "
    "--expert-model-parallel-size 2"
)
EVERY_DEGREE = {
    "four stages": Trial(Degrees(pp=4, tp=1, dp=1), model(), batches=4),
    "tensor ranks that split the sequence": Trial(
        Degrees(pp=2, tp=2, dp=1), (*model("--sequence-parallel"), tuple(HYBRID.split())), batches=4
    ),
}


def require_proved(judged: Sequence[BatchVerdict], degrees: Degrees) -> None:
    for kind in ("split", "hybrid", "packed", "halved"):
        assert sum(getattr(batch.coverage, kind) for batch in judged) > 0
    for batch in judged:
        # Each chunk goes once forward and once back, and once round: to the first stage, and down.
        links = 2 * (degrees.pp - 1) + degrees.pp
        assert batch.coverage.messages == links * degrees.tp * batch.coverage.chunks
        assert bool(batch.coverage.collectives["words of a stage"]) == (degrees.tp > 1)


@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    trial = EVERY_DEGREE[name]
    lines, judged = certified(trial)
    said = [line for line in lines if "vocabulary over the stages" in line]
    assert len(said) == len(trial.models)
    require_proved(judged, trial.degrees)


def test_a_plan_and_its_job_agree_where_the_output_layer_lies() -> None:
    """A plan with H and G for a whole output layer; the other way round it is refused alike."""
    plan = arbitrary_plan([30, 5], (1, 1), Random(0), vocabulary_parallel=True)
    shapes = MessageShapes(plan, lambda chunk: 4, 8, torch.float32)
    model = SimpleNamespace(output_layer=None)
    with pytest.raises(PlanError, match=r"H and G.* give --epp-vocab-parallel on"):
        head_for(model, plan, 0, shapes, NoMeter())
    whole = arbitrary_plan([30, 5], (1, 1), Random(0))
    assert head_for(model, whole, 0, shapes, NoMeter()) is None
    group = SimpleNamespace(size=lambda: 1)
    weight = torch.nn.Parameter(torch.zeros(4, 8))
    model.output_layer = VocabularyShard(weight, 0, 2, group, scattered=False)
    with pytest.raises(PlanError, match=r"no H and G.* give --epp-vocab-parallel off"):
        head_for(model, whole, 0, shapes, NoMeter())


REFUSED = {
    "--num-layers 2 --pipeline-model-parallel-size 1": "there is one stage",
    "--num-layers 4 --pp 2 --lora-rank 4": "--lora-rank: adapters do not run with",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_combined_is_refused_in_one_line(words) -> None:
    with pytest.raises(ValueError, match=REFUSED[words]):
        main([*f"{LLAMA} --vocab-parallel {words} --batches 1".split()])
