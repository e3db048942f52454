"""A calibration leaves no trace: what is trained afterwards is as if nobody had measured."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.cost.profile import Profile
from tests.mcore.runs import ROOT, Run, environment, train, write_corpus


@pytest.mark.parametrize("how", ["nothing", "probe", "error"])
def test_distributed_data_parallelism_is_left_as_it_was_found(how):
    """Probing one layer finishes its bucket's parameter gather, which dispatches the next one's;
    left in flight that gather ends iteration 2 with Megatron's own assertion."""
    run = train([how], processes=1, program=("-m", "tests.mcore.probed_ddp"))
    assert run.status == 0, run.output
    assert run.output.rstrip().endswith("trained")


def example(corpus: Path, save: Path, *more: object, **layout: int) -> Run:
    """examples/pretrain_gpt_epp.sh as it stands, but for sizes and the tokenizer."""
    sizes = "--hidden-size 32 --ffn-hidden-size 88 --vocab-size 127 --tokenizer-type NullTokenizer"
    variables = {"SIZE": "tiny", "GPUS": 4, "CONTEXT": 128, "BATCH": 6, "ITERS": 20, **layout}
    done = subprocess.run(
        ["bash", ROOT / "examples" / "pretrain_gpt_epp.sh", *sizes.split(), *map(str, more)],
        cwd=ROOT,
        env={
            **environment(4),
            **{name: str(value) for name, value in variables.items()},
            "DATA": str(corpus),
            "TOKENIZER": "none",
            "SAVE": str(save),
            "PYTHON": sys.executable,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )
    return Run(done.returncode, done.stdout)


def test_the_example_script_trains_saves_and_resumes_in_another_layout(tmp_path):
    """Twenty iterations in two halves with the script's own flags: bf16, distributed optimizer, all
    overlaps in several buckets, evaluation, and the cost model that they get, measured at start.
    First two stages of two tensor-parallel ranks, then two replicas of two stages."""
    corpus = write_corpus(tmp_path / "corpus", [90, 17, 33, 120, 60, 20, 75, 41] * 100)
    save = tmp_path / "saved"
    more = ("--ddp-bucket-size", 4000, "--dist-ckpt-optim-fully-reshardable")
    first = example(corpus, save, *more, "--exit-interval", 10, TP=2, PP=2)
    assert first.status == 0, first.output[-3000:]
    assert len(first.losses) == 10
    assert "tp 2" in Profile.load(str(save / "epp-cost-model.json")).provenance.model
    second = example(corpus, save, *more, TP=1, PP=2)
    assert second.status == 0, second.output[-3000:]
    assert len(second.losses) >= 10 and "iteration       20/      20" in second.output
    assert "is of another model" in second.output and "measured this device" in second.output
    # It goes on where it was: the loss of random tokens is near that of guessing, and fell.
    assert all(0 < loss < 1.1 * math.log(128) for loss in first.losses + second.losses)
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "20"
