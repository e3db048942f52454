"""Training that runs out of memory goes on: less is planned, the same documents are computed."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_epp.control.memory_budget import BUDGET_FILE
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import DEVICES, GIB
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.profile import Profile
from tests.mcore.runs import PROGRAM, Run, flags, train

LIMIT_GIB = 0.0007
HUNGRY = str(Path(__file__).with_name("hungry.py"))
EVALUATION = {"train_iters": 2, "eval_interval": 1, "eval_iters": 1, "split": "70,30,0"}
# Two ranks that share layers.
SHARED = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2}


def run(corpus: Path, way: str = "", **changes: object) -> Run:
    """A run that finds no memory where ``way`` says (hungry.py)."""
    return train(flags(corpus, epp=True, **changes), program=(HUNGRY, way) if way else PROGRAM)


@pytest.fixture(scope="module")
def measured(corpus, tmp_path_factory) -> dict[str, object]:
    """A cost model's bytes as measured here, and seconds that are the same in every run; dropout,
    as a repetition must draw what the first attempt drew."""
    folder = tmp_path_factory.mktemp("measured")
    how = {"hidden_dropout": 0.1, "epp_cost_model": folder / "made.json"}
    done = run(corpus, **how | {"epp_cost_model": None}, epp_record=folder, train_iters=1)
    assert done.status == 0, done.output
    predicted = analytic_profile(Model("m", 4, 32, 64, 4, 2, 8, 128, gated=True), DEVICES["cpu"])
    names = ("layer_seconds", "first_seconds", "last_seconds", "recompute_seconds")
    seconds = {name: getattr(predicted, name) for name in names}
    seconds |= {"link_seconds_per_token": 0.0, "link_latency_seconds": 1e-5}
    measured = Profile.load(str(folder / "epp-cost-model.json"))
    dataclasses.replace(measured, **seconds).save(str(folder / "made.json"))
    return how


def test_a_limit_that_nobody_knew_of_is_survived(corpus, measured, tmp_path) -> None:
    """Losses and gradients are those of a run whose budget was small from the start."""
    limit = {**measured, "epp_memory_limit_gib": LIMIT_GIB}
    hit = run(corpus, **limit, epp_plan_ahead=True, epp_record=tmp_path / "hit")
    assert hit.status == 0, hit.output
    repeated = re.findall(
        r"repeated with less memory: (iteration \d+ pipeline rank \d .*)", hit.output
    )
    assert repeated
    assert re.search(
        r"pipeline rank (\d), stage \1, iteration \d+: was in [FB]\d+ .*: out of memory", hit.output
    )
    kept = (tmp_path / "hit" / BUDGET_FILE).read_text()
    assert all(line in kept for line in repeated)
    budgets = dict(re.findall(r"pipeline rank (\d) budget_bytes (\d+)", kept))
    assert budgets["0"] == budgets["1"]

    limit["epp_memory_budget_gib"] = int(budgets["0"]) / GIB
    knew = run(corpus, **limit, epp_record=tmp_path / "knew")
    assert knew.status == 0, knew.output
    assert "repeated with less memory" not in knew.output
    assert len(hit.losses) == 3
    assert (hit.losses, hit.grad_norms) == (knew.losses, knew.grad_norms)
    for iteration in (1, 2, 3):
        name = f"iteration-00000{iteration}.step"
        steps = [(tmp_path / which / name).read_text() for which in ("hit", "knew")]
        assert steps[0] == steps[1]


@pytest.mark.everything
def test_what_was_predicted_too_little_is_learnt_once_and_nothing_of_it_ends_training(
    corpus, tmp_path
) -> None:
    """The analytic cost model counts what fused kernels save, in the job's data type; a host's
    layers save more. The budget was cut again in every iteration; and what cannot be kept ended
    the training."""
    records = tmp_path / "records"
    (records / "errors.txt").mkdir(parents=True)
    (records / BUDGET_FILE).mkdir()
    ran = run(corpus, train_iters=8, epp_memory_budget_gib=0.0006, epp_record=records)
    assert len(ran.losses) == 8
    learnt = re.findall(
        r"iteration (\d+) pipeline rank (\d) budget_bytes (\d+) correction ([\d.]+) near",
        ran.output,
    )
    assert {rank for _, rank, _, _ in learnt} == {"0", "1"}
    assert {int(budget) for _, _, budget, _ in learnt} == {int(0.0006 * GIB)}
    corrections = [float(correction) for _, _, _, correction in learnt]
    assert min(corrections) > 1.1 and max(corrections) < 2
    # Plans differ, so does the error; what is learnt once is hardly learnt again.
    assert len(learnt) <= 6
    for each in "01":
        own = [(int(at), float(correction)) for at, rank, _, correction in learnt if rank == each]
        early = max(correction for at, correction in own if at <= 5)
        assert all(correction < 1.1 * early for at, correction in own if at > 5)
    cut = [f"{records}/{BUDGET_FILE}, cannot be kept", f"--epp-record {records} cannot be kept"]
    for words in cut:
        assert ran.output.count(words) == 1, ran.output


def validation(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"validation loss at .*lm loss value: ([0-9.E+-]+)", text)]


def test_an_evaluation_without_memory_is_repeated_in_smaller_chunks(corpus) -> None:
    plain, starved = (run(corpus, way, **EVALUATION) for way in ("", "evaluation"))
    assert starved.status == 0, starved.output
    assert re.search(
        r"the evaluation after iteration 1 is repeated in smaller chunks: pipeline rank 1 ran "
        r"out of memory at F\d+ of stage 1, \d+ tokens",
        starved.output,
    )
    assert plain.losses == starved.losses
    assert len(validation(plain.output)) >= 2
    assert validation(starved.output) == pytest.approx(validation(plain.output), rel=1e-5)


@pytest.mark.everything
@pytest.mark.parametrize(
    ("way", "changes", "said"),
    [
        (
            "",
            {"epp_memory_limit_gib": 0.00001, "train_iters": 1},
            r"document \d+ of \d+ tokens on stage \d needs at least .* GiB",
        ),
        (
            "starving",
            EVALUATION,
            r"document \d+ of \d+ tokens does not fit in evaluation|"
            r"pipeline rank 1 ran out of memory at F\d+ of stage 1 in the evaluation after "
            r"iteration 1, \d tokens, and there are no smaller chunks",
        ),
        (  # one of two, in the midst of a layer
            "alone",
            SHARED,
            r"iteration 2: was in F0 .*out of memory \(none for the scores\) on one of the ranks "
            r"that share its layers",
        ),
    ],
)
def test_what_cannot_go_on_ends_with_one_line(corpus, measured, way, changes, said) -> None:
    ended = run(corpus, way, **changes if way else {**measured, **changes})
    (line,) = ended.errors
    assert re.search(said, line)
    assert 2 in ended.statuses and (way == "alone" or ended.statuses == (2, 2))
    assert way or "repeated with less memory" in ended.output
