"""Checkpoint folders, recorded plans and cost-model files of commit d652579 are read.

``checkpoint_d652579`` holds what that commit wrote for a tiny model with dropout, whose losses
depend on the plan by far more than rounding:

    weights.tar.xz    iteration 2 of a checkpoint
    flat, placed      the epp-* files beside it, of a job with one stage a rank and of one with two
                      (a V); ``plans``: what d652579 recorded of iterations 3 to 6 when it resumed;
                      ``losses.txt``: losses and gradient norms of these, in full precision
    cost-model.json   a measured cost model, given to the placed job by its flag

Both jobs ran out of memory in iterations 2 and 5 and lost their planner in iteration 4; the flat
one refitted its cost model in iterations 1 and 4. A run that resumes knows all of this from files.
"""

import json
import platform
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from megatron_epp.cost.profile import Profile
from megatron_epp.ir import Step, parse_records
from megatron_epp.mcore.calibrate.profile_file import device_text
from tests.mcore.resumes import OPTIMIZER
from tests.mcore.runs import Run, flags, trained, write_corpus

DATA = Path(__file__).with_name("checkpoint_d652579")
PROGRAM = (str(Path(__file__).with_name("exact_losses.py")),)
LENGTHS = [97, 63, 80, 120, 59, 72, 65, 90, 62, 128, 129, 71, 55, 77, 48, 110, 63, 8, 61, 111]
JOB = {
    **OPTIMIZER,
    "num_layers": 5,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_attention_heads": 2,
    "hidden_dropout": 0.1,
    "train_iters": 6,
    "epp": True,
    "epp_effort": 4,  # the default then
}
# Written again by the run that resumes, as they were.
PARTITION_FILE = {
    "flat": {
        "epp-budget.txt",
        "epp-cost-model.from-000002.json",
        "epp-cost-model.from-000005.json",
        "epp-default-budgets.json",
        "epp-default-host-budget.json",
        "epp-fallbacks.txt",
        "epp-partition.json",
        "epp-vocab-parallel.json",
    },
    "placed": {
        "epp-budget.txt",
        "epp-default-budgets.json",
        "epp-fallbacks.txt",
        "epp-partition.json",
        "epp-vocab-parallel.json",
    },
}

pytestmark = [
    pytest.mark.everything,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the recorded losses are those of a CPU"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("old") / "corpus", LENGTHS)


def as_of_this_host(source: Path, target: Path) -> Path:
    """Copy a measured cost model; it would be refused on a device of another name."""
    profile = json.loads(source.read_text())
    profile["provenance"]["device"] = device_text()
    target.write_text(json.dumps(profile))
    return target


def checkpoint(name: str, folder: Path) -> Path:
    """Lay out a checkpoint folder as d652579 left it."""
    shutil.copytree(DATA / name, folder)
    with tarfile.open(DATA / "weights.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    if (costs := folder / "epp-cost-model.json").exists():
        as_of_this_host(costs, costs)
    return folder


def require_losses(run: Run, name: str) -> None:
    """Bit for bit on a processor like that of the recording; kernels of another one round
    otherwise, and dropout of another plan changes the losses from the third digit on."""
    recorded = DATA / name / "losses.txt"
    processor, *lines = recorded.read_text().splitlines()
    expected = [tuple(map(float, line.split())) for line in lines]
    losses = [
        tuple(map(float, match))
        for match in re.findall(r"^exact: iteration (\d+) (\S+) (\S+)$", run.output, re.MULTILINE)
    ]
    assert [row[0] for row in losses] == [3, 4, 5, 6], run.output
    if processor == this_processor():
        assert losses == expected
    for row, recorded_row in zip(losses, expected, strict=True):
        assert row == pytest.approx(recorded_row, rel=1e-5)


def this_processor() -> str:
    """Name what decides which kernels torch runs."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    parts = [
        match[1]
        for key in ("vendor_id", "cpu family", "model", "stepping")
        if (match := re.search(rf"^{key}\s*: (.+)$", text, re.MULTILINE))
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    return " ".join([platform.machine(), *parts, capability, f"torch {torch.__version__}"])


def recorded_plans(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("iteration-*.step"))}


# Choices of a run are kept in one file now, which is written from these two.
CHOICES = {"epp-partition.json", "epp-vocab-parallel.json"}


def require_terms(written: str, old: str) -> None:
    """All that ``old``, of version 4, has is in ``written``, of version 5."""
    new_terms, old_terms = json.loads(written), json.loads(old)
    assert (new_terms.pop("profile"), old_terms.pop("profile")) == (5, 4)
    assert {name: new_terms[name] for name in old_terms} == old_terms


def resume(corpus: Path, name: str, tmp_path: Path, planned: bool = True, **how: object) -> Run:
    """Resume a job of d652579 and compare what it reads, plans and computes with that commit's.

    planned: whether its plans are those of that commit; plans of several stages a rank became
    faster since.
    """
    old, new = checkpoint(name, tmp_path / name), tmp_path / "new"
    places = {"load": old, "save": new, "save_interval": 6, "epp_record": tmp_path / "plans"}
    run = trained(flags(corpus, **{**JOB, **places, **how}), program=PROGRAM)
    # Seconds that the cost model predicts are in a plan, so one that is not read shows here.
    if planned:
        assert recorded_plans(tmp_path / "plans") == recorded_plans(DATA / name / "plans")
        require_losses(run, name)
    files = {path.name for path in DATA.joinpath(name).glob("epp-*")}
    assert files - {"epp-cost-model.json"} == PARTITION_FILE[name]
    assert (new / "epp-choices.json").exists() and PARTITION_FILE[name] >= CHOICES
    for file in sorted(PARTITION_FILE[name] - CHOICES):
        text, old_text = (new / file).read_text(), (DATA / name / file).read_text()
        if "cost-model" in file:  # of version 5 now, with further terms
            require_terms(text, old_text)
            continue
        assert text == old_text if planned else text.startswith(old_text), file
    return run


def test_a_job_resumes_from_what_it_knew(corpus: Path, tmp_path: Path) -> None:
    how = {"epp_partition": "auto", "epp_vocab_parallel": "auto", "epp_levers": "all"}
    run = resume(corpus, "flat", tmp_path, **how, epp_cost_model=None)
    assert "measured this device" not in run.output
    assert "iteration 4: planned by packing, as before the resume" in run.output
    assert "--epp-partition auto: layers 4 1 of the stages; the checkpoint's" in run.output
    assert "--epp-vocab-parallel auto: on; the checkpoint's" in run.output


def test_a_job_of_several_stages_a_rank_resumes(corpus: Path, tmp_path: Path) -> None:
    costs = as_of_this_host(DATA / "cost-model.json", tmp_path / "cost-model.json")
    how = {"epp_placement": "auto", "epp_cost_model": costs}
    run = resume(corpus, "placed", tmp_path, planned=False, **how)
    assert "--epp-placement auto: stages on ranks 1 0 0 1, layers" in run.output
    assert "--epp-vocab-parallel auto: off; the checkpoint's" in run.output
    how |= {"load": checkpoint("placed", tmp_path / "again"), "epp_plan": DATA / "placed" / "plans"}
    run = trained(flags(corpus, **{**JOB, **how}), program=PROGRAM)
    require_losses(run, "placed")


def test_recorded_plans_run(corpus: Path, tmp_path: Path) -> None:
    """The plans decide alone: nothing that training learnt is beside the weights."""
    old = checkpoint("flat", tmp_path / "flat")
    for file in old.glob("epp-*"):
        if file.name != "epp-partition.json":
            file.unlink()
    how = {"load": old, "epp_partition": "auto", "epp_plan": DATA / "flat" / "plans"}
    run = trained(flags(corpus, **{**JOB, **how}, epp_cost_model=None), program=PROGRAM)
    assert "--epp-vocab-parallel auto: on; as the plans of --epp-plan have it" in run.output
    require_losses(run, "flat")


def test_files_are_parsed_and_written_as_they_were() -> None:
    steps = sorted(DATA.glob("*/plans/*.step"))
    costs = sorted(DATA.rglob("*cost-model*.json"))
    records = sorted(DATA.glob("*/plans/*.timed"))
    assert len(steps) == 8 and len(costs) == 4 and len(records) == 2
    for path in steps:
        assert str(Step.parse(path.read_text())) == path.read_text()
    for path in costs:
        require_terms(Profile.load(str(path)).to_json(), path.read_text())
    for path in records:
        assert parse_records(path.read_text())
