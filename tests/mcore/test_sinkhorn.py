"""MoE by sinkhorn under ``--epp``: certified, with faults injected, never cut, trained."""

from collections.abc import Mapping

import pytest

from megatron_epp.certify.batches import Frame, RandomBatch
from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.control.accept import accept
from megatron_epp.control.step_source import SourcedStep
from megatron_epp.ir import Plan, PlanError, Step
from tests.mcore.certified import certified
from tests.mcore.fault_injection import FAULTS, first_seed, inject, names
from tests.mcore.runs import flags, train, trained

TABLE = FAULTS / "sinkhorn.py"
# Matrices of experts are split over the tensor-parallel ranks, as Megatron does by default.
MODEL = (
    f"{LLAMA} --num-layers 2 --sequence-parallel --num-experts 8 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 384 --moe-router-load-balancing-type sinkhorn"
)
FRAME = Frame(61, (2,), replicas=1, modes="k", splits=True, whole=True)


def shows(fault: str, drawn: RandomBatch) -> bool:
    """Whether the batch has chunks with several documents of several tokens; where padding counts,
    also one whose tokens the two ranks cannot share evenly."""
    chunks = drawn.step.plans[0].chunks
    several = any(sum(span.tokens > 4 for span in chunk.spans) > 1 for chunk in chunks)
    uneven = any(chunk.tokens % 2 and chunk.tokens > 20 for chunk in chunks)
    return several and (uneven or fault != "weigh padding")


@pytest.fixture(scope="module")
def judged() -> Mapping[str, BatchVerdict]:
    seed = first_seed(TABLE, FRAME, shows)
    return inject(TABLE, Trial(Degrees(pp=1, tp=2, dp=1), (tuple(MODEL.split()),), seed=seed))


@pytest.mark.parametrize("way", ["nothing", "nothing again"])
def test_random_plans_compute_what_the_plain_model_computes(judged, way) -> None:
    batch = judged[way]
    assert batch.passed, batch
    assert batch.coverage.packed and not batch.coverage.cut and batch.coverage.selective
    assert batch.collectives["logits of whole documents"] > 0


@pytest.mark.parametrize("way", [way for way in names(TABLE) if "nothing" not in way])
def test_what_is_broken_shows(judged, way) -> None:
    batch = judged[way]
    assert not batch.problems and not batch.passed
    assert batch.loss_error > 1e4 * BOUND, batch
    assert (batch.gradient_error <= BOUND) == (way == "balance in evaluation"), batch


def test_context_parallel_ranks_choose_as_one() -> None:
    """Over all rows of a document, whichever ranks have them."""
    model = MODEL.replace("--sequence-parallel ", "")
    certified(Trial(Degrees(pp=1, tp=1, dp=1, cp=2), (tuple(model.split()),), batches=2))


def test_a_plan_that_cuts_is_refused() -> None:
    text = (
        "plan v1\ndocuments 5 3\nlayers 1\nchunk 0: 0[0:2]\nchunk 1: 0[2:5] 1[0:3]\n"
        "recompute 0: 1k 1k\nstage 0: F0 F1 B1 B0\n"
    )
    step = Step.parse(str(Plan.parse(text)))
    made, job = SourcedStep(step, str(step)), {"layers": (1,), "replica": 0, "replicas": 1}
    accept(made, [5, 3], False, **job)
    with pytest.raises(PlanError, match=r"chunk 0 has 0\[0:2\], and .+ expected whole documents"):
        accept(made, [5, 3], False, full_documents=True, **job)


# ------------------------------------------------------------------ inside the trainer


LENGTHS = [60, 7, 9, 30, 5, 12] * 8


EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 1,
    "moe_ffn_hidden_size": 16,
    "moe_router_load_balancing_type": "sinkhorn",
}


def test_training_cuts_no_document(corpus, tmp_path) -> None:
    changes = {**EXPERTS, "epp_record": tmp_path, "epp_plan_ahead": True, "train_iters": 2}
    run = trained(flags(corpus, epp=True, **changes))
    assert len(run.losses) == 2
    for path in sorted(tmp_path.glob("*.step")):
        for plan in Step.parse(path.read_text()).plans:
            spans = [span for chunk in plan.chunks for span in chunk.spans]
            assert len(spans) == len(plan.documents)


def test_a_planner_that_cuts_is_refused(corpus) -> None:
    run = train(flags(corpus, epp=True, epp_planner="seq1f1b", **EXPERTS))
    assert run.status and set(run.statuses) <= {2, -15}, run.output
    (line,) = run.errors
    assert line.endswith(
        "planner 'seq1f1b' cuts documents, which must stay whole here; "
        "expected one of epp, packing, packing-best, 1f1b, zb-v, adaptis"
    )
