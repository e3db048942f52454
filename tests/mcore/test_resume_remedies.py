"""Every remedy that an error line or a page prints for a resumed job is started here.

The oracle of learning rates: the same checkpoint, whose groups and schedule are edited by hand,
loaded without a flag.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.mcore.resumes import OPTIMIZER, logged
from tests.mcore.runs import Run, flags, train, trained
from tests.mcore.test_refusals import EXPERTS

OVERRIDE, KEEP = "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"
# What the first run is started with; a rate and its name in groups and scheduler.
OLD = {
    "lr": 1e-3,
    "min_lr": 1e-4,
    "decoupled_lr": 5e-4,
    "decoupled_min_lr": 5e-5,
    "start_weight_decay": 0.1,
    "end_weight_decay": 0.3,
    "weight_decay_incr_style": "linear",
}
# Decoupled rates and the others change places in their order.
NEW = {
    **OLD,
    "lr": 4e-4,
    "min_lr": 2e-5,
    "decoupled_lr": 2e-3,
    "decoupled_min_lr": 3e-4,
    "start_weight_decay": 0.2,
    "end_weight_decay": 0.8,
}
JOBS: dict[str, dict[str, object]] = {
    "by documents": OPTIMIZER,
    "experts": {**OPTIMIZER, **EXPERTS},
    "bf16": {"bf16": True},
    "float32": {},
    "stock": {**OPTIMIZER, "epp": None, "micro_batch_size": 1},
}


def words(corpus: Path, job: str, **how: object) -> list[str]:
    own = {"pipeline_model_parallel_size": 1, "epp": True, "train_iters": 6}
    return flags(corpus, **{**own, "lr_decay_style": "linear", **JOBS[job], **how})


def saved_after_three(corpus: Path, job: str, folder: Path) -> Path:
    trained(words(corpus, job, **OLD, save=folder, save_interval=3, exit_interval=3), 1)
    return folder


def edited(folder: Path, copy: Path) -> Path:
    """A copy of a checkpoint that has the NEW rates, and all else of the old one.

    Megatron reads what is no tensor from common.pt, where that is.
    """
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    shutil.copytree(folder, copy)
    common = load_common_state_dict(str(copy / "iter_0000003"))
    scheduler, state = common["opt_param_scheduler"], common["optimizer"]
    chained = [state] if "param_groups" in state or "optimizer" in state else state.values()
    for one in chained:
        for group in one.get("optimizer", one)["param_groups"]:
            prefix = "" if group["default_config"] else "decoupled_"
            assert (group["max_lr"], group["min_lr"]) == (
                OLD[f"{prefix}lr"],
                OLD[f"{prefix}min_lr"],
            )
            group |= {"max_lr": NEW[f"{prefix}lr"], "min_lr": NEW[f"{prefix}min_lr"]}
    scheduler |= {"max_lr": NEW["lr"], "min_lr": NEW["min_lr"]}
    scheduler |= {"start_wd": NEW["start_weight_decay"], "end_wd": NEW["end_weight_decay"]}
    torch.save(common, copy / "iter_0000003" / "common.pt")
    return copy


def require_alike(run: Run, other: Run) -> None:
    assert len(run.losses) == 3
    assert run.losses == other.losses and run.grad_norms == other.grad_norms


def test_other_rates_at_resume(corpus, tmp_path: Path, job: str = "by documents") -> None:
    """With the first flag the new ones, with the second the checkpoint's, without them one line."""
    saved = saved_after_three(corpus, job, tmp_path / "saved")
    load = {"load": saved}
    override = trained(words(corpus, job, **NEW, **load, **{OVERRIDE: True}), 1)
    keep = trained(words(corpus, job, **NEW, **load, **{KEEP: True}), 1)
    by_hand = {"load": edited(saved, tmp_path / "edited")}
    require_alike(override, trained(words(corpus, job, **NEW, **by_hand), 1))
    require_alike(keep, trained(words(corpus, job, **OLD, **load), 1))
    assert override.losses != keep.losses
    neither = train(words(corpus, job, **NEW, **load), 1)
    assert neither.statuses == (2,), neither.output
    (line,) = neither.errors
    for flag in ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr"):
        said = f"--{flag.replace('_', '-')} {NEW[flag]}: the checkpoint has {OLD[flag]}"
        assert said in line, line
    for flag in (OVERRIDE, KEEP):
        assert f"--{flag.replace('_', '-')}" in line, line


@pytest.mark.everything
@pytest.mark.parametrize("job", [job for job in JOBS if job != "by documents"])
def test_other_rates_at_resume_of_other_jobs(corpus, tmp_path: Path, job: str) -> None:
    test_other_rates_at_resume(corpus, tmp_path, job)


def test_a_packed_job_goes_on_by_documents(corpus, tmp_path: Path) -> None:
    """From 4 samples a batch to 16 documents: the learning rate is the old one's, iteration by
    iteration; the old job, which goes on, is the oracle."""
    samples = {"global_batch_size": 4, "train_iters": 12, "lr_warmup_iters": 2, "min_lr": 1e-5}
    samples |= {"eval_iters": 1, "eval_interval": 3, "split": "80,20,0"}
    folder = tmp_path / "saved"
    packed = trained(words(corpus, "stock", **samples, save=folder, save_interval=6), 1)
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    documents = words(corpus, "by documents", **{**samples, "global_batch_size": 16}, load=folder)
    begun = trained([*documents, "--override-opt-param-scheduler"], 1)
    rates = logged("learning rate", packed.output)
    assert logged("learning rate", begun.output) == rates[6:] and len(set(rates)) > 8
    said = "saved without --epp after 24 samples of --seq-length; --epp counts documents, 96 in 6"
    assert begun.output.count(f"> --load {folder}: {said}") == 1
    consumed = re.findall(r"consumed samples: +(\d+)", begun.output)
    assert consumed == [str(16 * iteration) for iteration in range(7, 13)]
    for flag in ([], ["--use-checkpoint-opt-param-scheduler"]):
        refused = train([*documents, *flag], 1)
        assert refused.statuses == (2,) and len(refused.errors) == 1, refused.output
        assert said in refused.errors[0]
        assert "give --override-opt-param-scheduler to continue there" in refused.errors[0]
    # A batch of as many: the counters are the same, and nothing is said.
    alike = words(corpus, "by documents", **samples, load=folder)
    run = trained(alike, 1)
    assert logged("learning rate", run.output) == rates[6:] and "without --epp" not in run.output


# ------------------------------------------------------------------ every remedy, started

SHARDS = {"use_distributed_optimizer": True}
RESHARDABLE = {"dist_ckpt_optim_fully_reshardable": True}
ALONE = {"pipeline_model_parallel_size": 1}
# Of a job of two stages, saved after iterations 1 and 2 without RESHARDABLE: the flags that are
# refused, what the line says, and the flags of each remedy, with the iteration that is first then.
BOTH = [({OVERRIDE: True}, 3), ({KEEP: True}, 3)]
FRESH = ({"no_load_optim": True}, 3)
SAME = (SHARDS, 3)
REFUSED = [
    ({"train_iters": 5}, "number of iterations do not match", BOTH),
    ({"lr": 2e-3}, "--lr 0.002: the checkpoint has 0.001", BOTH),
    ({"weight_decay": 0.3}, "for start weight decay do not match", BOTH),
    ({"decoupled_lr": 2e-3}, "groups are others", [FRESH, ({"decoupled_lr": None}, 3)]),
    ({"use_distributed_optimizer": None}, "do not load without it; give the flag", [FRESH, SAME]),
    (ALONE, "belong to stages on ranks", [FRESH, ({"pipeline_model_parallel_size": 2}, 3)]),
    ({"ckpt_step": 7}, "an iteration that", [({"ckpt_step": 1}, 2), ({"ckpt_step": 2}, 3)]),
]


@pytest.fixture(scope="module")
def of_two_stages(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages") / "saved"
    own = {"epp": True, **SHARDS, "train_iters": 4, "exit_interval": 2}
    trained(flags(corpus, **own, save=folder, save_interval=1))
    return folder


def start(corpus: Path, folder: Path, **how: object) -> Run:
    how = {"epp": True, **SHARDS, "train_iters": 4, "load": folder, **how}
    return train(flags(corpus, **how), int(how.get("pipeline_model_parallel_size", 2)))


def require_from(run: Run, iteration: int) -> None:
    assert run.status == 0, run.output
    assert f"iteration        {iteration}/" in run.output
    assert f"iteration        {iteration - 1}/" not in run.output


@pytest.mark.everything
@pytest.mark.parametrize(("change", "said", "remedies"), REFUSED, ids=lambda value: None)
def test_what_an_error_line_advises_starts(of_two_stages, corpus, change, said, remedies) -> None:
    refused = start(corpus, of_two_stages, **change)
    assert len(refused.errors) == 1 and said in refused.errors[0], refused.output
    for remedy, iteration in remedies:
        for flag in remedy:
            named = f"--{flag.replace('_', '-')}"
            assert named in refused.errors[0] or flag in change, (named, refused.errors)
        require_from(start(corpus, of_two_stages, **{**change, **remedy}), iteration)


@pytest.mark.everything
def test_what_the_page_advises_starts(of_two_stages, corpus, tmp_path: Path) -> None:
    """docs/guides/checkpoints.md, in the order of its sections."""
    # Save once with the old degrees and the flag; then change the degrees.
    once = {"save": tmp_path / "once", "save_interval": 3, "exit_interval": 3, **RESHARDABLE}
    require_from(start(corpus, of_two_stages, **once), 3)
    require_from(start(corpus, tmp_path / "once", **ALONE, **RESHARDABLE), 4)
    # Start from an existing checkpoint.
    require_from(start(corpus, of_two_stages, no_load_optim=True, no_load_rng=True), 3)
    require_from(start(corpus, of_two_stages, finetune=True), 1)
    new = {"pretrained_checkpoint": of_two_stages, "save": tmp_path / "new", "save_interval": 2}
    require_from(start(corpus, tmp_path / "new", **new, exit_interval=2), 1)
    require_from(start(corpus, tmp_path / "new", **new), 3)
    require_from(start(corpus, of_two_stages, use_checkpoint_args=True), 3)
    # A checkpoint that the tracker file does not name; the start says how to load it.
    behind = shutil.copytree(of_two_stages, tmp_path / "behind")
    (behind / "latest_checkpointed_iteration.txt").write_text("1")
    run = start(corpus, behind)
    assert "--ckpt-step 2 would load the last" in run.output
    require_from(run, 2)
    require_from(start(corpus, behind, ckpt_step=2), 3)
    # A damaged file is deleted.
    (behind / "epp-choices.json").write_text("[]")
    (line,) = start(corpus, behind).errors
    assert "delete the file" in line
    (behind / "epp-choices.json").unlink()
    require_from(start(corpus, behind), 2)


@pytest.mark.everything
def test_a_distributed_optimizer_first_given_at_resume(corpus, tmp_path: Path) -> None:
    job = {**ALONE, "epp": True, "train_iters": 3}
    trained(flags(corpus, **job, save=tmp_path, save_interval=2, exit_interval=2), 1)
    refused = start(corpus, tmp_path, **job)
    said = "saved without --use-distributed-optimizer, do not load with it; omit the flag, or give"
    assert said in refused.errors[0], refused.output
    require_from(start(corpus, tmp_path, **job, use_distributed_optimizer=None), 3)
    require_from(start(corpus, tmp_path, **job, no_load_optim=True), 3)
    # Without it, the states of another number format do not load.
    other = {**job, "bf16": True, "use_distributed_optimizer": None}
    (line,) = start(corpus, tmp_path, **other).errors
    assert "saved without --bf16, do not load with it; omit the flag, or give --no-load" in line
    require_from(start(corpus, tmp_path, **other, no_load_optim=True), 3)


@pytest.mark.everything
def test_experts_on_other_ranks_start_without_the_optimizer(corpus, tmp_path: Path) -> None:
    job = {**ALONE, **EXPERTS, "epp": True, "train_iters": 3, **OPTIMIZER}
    saved = {"save": tmp_path, "save_interval": 2, "exit_interval": 2}
    trained(flags(corpus, **job, **saved), 2)
    again = {**job, "load": tmp_path, "expert_model_parallel_size": 2, "no_load_optim": True}
    require_from(train(flags(corpus, **again), 2), 3)
