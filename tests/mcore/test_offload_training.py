"""Layers in the host's memory while the trainer trains: the lever, the budget, and a plan's letter.

On a CPU the copies go to another buffer; the cost model is told that they cost nothing.
"""

import dataclasses
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.analytic import without_states
from megatron_epp.cost.catalogue.devices import DEVICES, GIB
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.host_memory import host_peak_bytes
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Step
from megatron_epp.planner.options import Options
from megatron_epp.planner.replicas import plan_step
from tests.mcore.runs import VOCABULARY, Run, flags, trained, write_corpus

pytestmark = pytest.mark.everything

INPUTS, DOCUMENTS = 128, 6
MODEL = Model("megatron", 4, 32, 128, 4, 2, 8, VOCABULARY + 1, gated=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Documents of one length: every batch is planned alike."""
    folder = tmp_path_factory.mktemp("corpus")
    return write_corpus(folder / "documents", [INPUTS + 1] * (3 * DOCUMENTS))


@pytest.fixture(scope="module")
def profile() -> Profile:
    made = analytic_profile(MODEL, DEVICES["cpu"], logits_held=False)
    return dataclasses.replace(made, host_bytes_per_second=1e15)


@pytest.fixture(scope="module")
def ample(profile) -> Cost:
    return Cost(StageLayout(without_states(profile), (4,)), (1e15,))


@pytest.fixture(scope="module")
def tight_gib(ample) -> float:
    """Two thirds of what keeping everything takes: cutting the batch alone costs time."""
    options = Options(context=INPUTS)
    (planned,) = plan_step([INPUTS] * DOCUMENTS, ample, options, "epp").planned
    return 0.65 * planned.peak_bytes[0] / GIB


def trained_on(corpus: Path, folder: Path, profile: Profile, **changes) -> tuple[Run, Step]:
    """A run of one stage, and the plan of its first iteration."""
    path = folder / "cost.json"
    profile.save(str(path))
    words = flags(
        corpus,
        pipeline_model_parallel_size=1,
        global_batch_size=DOCUMENTS,
        ffn_hidden_size=MODEL.ffn_hidden,
        epp=True,
        epp_record=folder / "plans",
        **{"epp_cost_model": path, **changes},
    )
    run = trained(words, processes=1)
    return run, Step.parse((folder / "plans" / "iteration-000001.step").read_text())


def offloaded(step: Step) -> int:
    return sum(choice.count("o") for stage in step.plans[0].recompute for choice in stage)


def on_the_host(run: Run) -> list[float]:
    """MiB by iteration, as the log has them."""
    return [float(x) for x in re.findall(r"on the host ([0-9.]+) MiB", run.output)]


def test_the_lever_and_the_hosts_memory_have_an_effect(
    corpus, profile, ample, tight_gib, tmp_path
) -> None:
    asked = {"epp_levers": "default,offload", "epp_memory_budget_gib": tight_gib}
    folders = [tmp_path / name for name in ("free", "little")]
    for folder in folders:
        folder.mkdir()
    free, plan = trained_on(corpus, folders[0], profile, **asked)
    (promised,) = host_peak_bytes(ample, plan.plans[0])
    assert offloaded(plan) and max(on_the_host(free)) > 0
    assert "no memory on the host" not in free.output
    little, narrow = trained_on(
        corpus, folders[1], profile, **asked, epp_host_memory_gib=0.1 * promised / GIB
    )
    assert offloaded(narrow) < offloaded(plan)
    assert max(on_the_host(little), default=0.0) <= 0.1 * promised / 2**20 + 0.05
    assert little.losses == pytest.approx(free.losses, rel=1e-5)


def test_a_given_plan_offloads_as_far_as_the_host_has_room(corpus, profile, tmp_path) -> None:
    """Where it has none the layers stay, which is said; the loss is the same."""
    from megatron_epp.ir import Plan

    text = f"plan v1\ndocuments {' '.join([str(INPUTS)] * DOCUMENTS)}\nlayers 4\n"
    text += "".join(f"chunk {c}: {c}[0:{INPUTS}]\n" for c in range(DOCUMENTS))
    text += f"recompute 0:{' 2o1f1k' * DOCUMENTS}\n"
    text += "stage 0: F0 F1 F2 F3 F4 F5 B5 I4 B3 I2 W4 B1 B0 W2\n"
    path = tmp_path / "given.plan"
    path.write_text(str(Plan.parse(text)))
    run, _ = trained_on(corpus, tmp_path, profile, epp_plan=path, epp_host_memory_gib=0.0005)
    assert "no memory on the host" in run.output and max(on_the_host(run)) <= 0.512 + 0.05


def test_the_host_must_have_what_is_asked_for(monkeypatch) -> None:
    from megatron_epp.mcore.job import job_cost

    whole = SimpleNamespace(total=64 * GIB, available=40 * GIB)
    monkeypatch.setattr(job_cost.psutil, "virtual_memory", lambda: whole)
    monkeypatch.setattr(job_cost.Path, "exists", lambda self: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    asked = partial(SimpleNamespace, epp_host_memory_gib=8, epp_plan_ahead=False)
    assert job_cost.host_budget_bytes(asked()) == 8 * GIB
    assert job_cost.host_budget_bytes(asked(epp_host_memory_gib=None)) == (
        job_cost.CPU_HOST_FRACTION * 5 * GIB
    )
    # What planner processes take is left free: 16 of 400 MiB are 6.25 GiB, of 8 ranks.
    planned = asked(epp_host_memory_gib=None, epp_plan_ahead=True, epp_plan_cores=16)
    free = (40 - 6.25) / 8 * GIB
    assert job_cost.host_budget_bytes(planned) == job_cost.CPU_HOST_FRACTION * free
    with pytest.raises(ValueError) as refused:
        job_cost.host_budget_bytes(asked(epp_host_memory_gib=8.5))
    assert str(refused.value) == (
        "--epp-host-memory-gib 8.5: this host has 8 GiB for each of its 8 ranks; expected less"
    )
