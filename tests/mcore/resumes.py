"""What tests of training share: six iterations in one go and in two, Megatron's own numbers."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.mcore.runs import LENGTHS, PROGRAM, Run, flags, trained, write_corpus

# Saved by parameter: the optimizer's default format holds padding, which is whatever memory held,
# and cannot be loaded with another number of stages.
OPTIMIZER = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
STOCK_ON_DOCUMENTS, STOCK_ON_CONVERSATIONS = (
    (str(Path(__file__).with_name("stock.py")), data) for data in ("documents", "conversations")
)
# Megatron's own schedule, of one document a micro-batch.
STOCK = {"micro_batch_size": 1, "calculate_per_token_loss": True, "dataloader_type": "single"}
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """A model that is trained: its corpus, its flags, what they are given to."""

    corpus: Path
    model: Mapping[str, object] = field(default_factory=dict)
    program: tuple[str, ...] = PROGRAM

    def train(self, processes: int = 2, afresh: bool = False, **how: object) -> Run:
        """A run that ends well."""
        words = flags(self.corpus, **{**self.model, **OPTIMIZER, **how})
        return trained(words, processes, self.program, afresh=afresh)


@dataclass(frozen=True)
class Six:
    """Six iterations in one go, saved in ``folder`` after three and six."""

    job: Job
    folder: Path
    run: Run


def six_iterations(job: Job, folder: Path, afresh: bool = False, **how: object) -> Six:
    """Plans are made ahead; what is compared with these plans at once."""
    ahead = {"epp": True, "epp_plan_ahead": True}
    how = {"train_iters": 6, "save": folder, "save_interval": 3, **ahead, **how}
    return Six(job, folder, job.train(afresh=afresh, **how))


def six_of(
    folder: Path,
    model: Mapping[str, object],
    program: tuple[str, ...] = PROGRAM,
    lengths: list[int] = LENGTHS,
) -> Six:
    """Six iterations of ``model`` on a corpus of its own."""
    corpus = write_corpus(folder / "documents", lengths)
    return six_iterations(Job(corpus, model, program), folder / "saved")


def after_three(six: Path, folder: Path) -> Path:
    """A checkpoint folder whose latest is the one of iteration 3."""
    shutil.copytree(six / "iter_0000003", folder / "iter_0000003")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def first_and_third(losses: list[float]) -> tuple[float, float]:
    """Of the three iterations after a start; for the second, Megatron's log shows the mean of the
    first two (training_log does not reset its sums after the first iteration of a run)."""
    first, _, third = losses
    return first, third


def tensors(folder: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of a torch_dist checkpoint, by name."""
    dcp_to_torch_save(folder, scratch)
    found: dict[str, torch.Tensor] = {}

    def collect(value, name: str):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for key, inner in enumerate(value):
                collect(inner, f"{name}.{key}")

    collect(torch.load(scratch, weights_only=False), "")
    return found


def require_equal(mine: Tensors, theirs: Tensors, at_least: int = 15) -> None:
    """Bit for bit. What is no number with a fraction is no state: the run's own folders are in the
    saved flags as bytes, of another length."""
    assert mine.keys() == theirs.keys()
    assert any("exp_avg" in name for name in mine)
    names = [name for name in mine if mine[name].is_floating_point()]
    assert len(names) >= at_least
    for name in names:
        assert torch.equal(mine[name], theirs[name]), name


def require_three_more_alike(six: Six, folder: Path, **how: object) -> Tensors:
    """Six iterations equal three, a save, a resume and three more, bit for bit; returns what is
    saved after them."""
    job, saved = six.job, folder / "resumed"
    places = {"load": after_three(six.folder, folder), "save": saved, "save_interval": 6}
    resumed = job.train(train_iters=6, epp=True, **places, **how)
    assert first_and_third(resumed.losses) == first_and_third(six.run.losses[3:])
    mine = tensors(saved / "iter_0000006", folder / "mine.pt")
    require_equal(mine, tensors(six.folder / "iter_0000006", folder / "theirs.pt"))
    return mine


def to_megatron_and_back(
    job: Job,
    folder: Path,
    stock: Mapping[str, object] | None = None,
    ours: Mapping[str, object] | None = None,
) -> None:
    """Megatron's own schedule trains iteration 4 from the checkpoint, and ours the one after, each
    with flags of its own."""
    save = {"save": folder / "stock", "save_interval": 4, "micro_batch_size": 1}
    there = job.train(train_iters=6, exit_interval=4, load=folder, **save, **(stock or {}))
    assert len(there.losses) == 1 and "iteration        4/" in there.output
    how = {"exit_interval": 5, "load": folder / "stock", "epp": True}
    back = job.train(train_iters=6, **how, **(ours or {}))
    assert len(back.losses) == 1 and "iteration        5/" in back.output


def require_same_numbers(run: Run, other: Run, iterations: int) -> None:
    """Losses and gradient norms, in as many digits as float32 has of the first."""
    assert len(run.losses) == iterations
    assert run.losses == pytest.approx(other.losses, rel=2e-6)
    assert run.grad_norms == pytest.approx(other.grad_norms, abs=2e-3)


def require_megatrons_own_numbers(
    folder: Path,
    model: Mapping[str, object],
    program: tuple[str, ...] = PROGRAM,
    processes: int = 1,
    others: Mapping[str, float] | None = None,
) -> tuple[Run, Run]:
    """Losses and gradient norms of Megatron's own schedule with one document a micro-batch, where
    documents are equally long; returns our run and Megatron's. ``others``: further figures of the
    log, none of them 0, and how far they may be off."""
    corpus = write_corpus(folder / "equal", [65] * 24)
    common = {"seq_length": 64, "max_position_embeddings": 64, "train_iters": 4, **model}
    elastic = trained(flags(corpus, epp=True, **common), processes=processes, program=program)
    words = flags(corpus, **STOCK, **common)
    stock = trained(words, program=STOCK_ON_DOCUMENTS, processes=processes)
    require_same_numbers(elastic, stock, 4)
    for name, bound in (others or {}).items():
        ours, theirs = (logged(name, run.output) for run in (elastic, stock))
        assert len(ours) == 4 and min(ours) > 0, name
        assert ours == pytest.approx(theirs, rel=bound), name
    return elastic, stock


def logged(name: str, output: str) -> list[float]:
    """A figure of every iteration's line in Megatron's log."""
    return [float(x) for x in re.findall(rf"(?<![a-z_]){name}: ([0-9.E+-]+)", output)]
