"""The script for a day with GPUs, run with stand-ins for Python and for the driver."""

import os
import re
from pathlib import Path

import pytest

from megatron_epp.certify.batches import Frame, draw, modes_drawn
from megatron_epp.certify.trial import BF16
from megatron_epp.corpus.lengths import open_corpus
from megatron_epp.cost.build import named_cost
from megatron_epp.ir import Plan
from megatron_epp.layers.recompute.wrap import EXECUTABLE
from megatron_epp.planner.options import Options
from megatron_epp.planner.registry import PLANNERS
from tests.engine.test_certificate import EVERY_DEGREE
from tests.gpu.test_shared_gpu import NCCL
from tests.mcore.runs import flags
from tests.programs import BASH, ROOT, Done, run, stand_in

pytestmark = pytest.mark.everything

# Notes what it runs; one step fails, one takes for ever.
PYTHON = """
echo "$*" >> "$CALLS"
case "$*" in
    *test_training.py*) [[ -e $MENDED ]] || { echo "E   wrong by half"; exit 1; } ;;
    *op_host.py*) [[ -e $MENDED ]] || exit 1 ;;
    *held_sms.py*) [[ -e $MENDED ]] || sleep 100 ;;
    *test_kernels.py*) echo "12 passed in 3 s" ;;
esac
"""


class Day:
    def __init__(self, folder: Path, gpus: int):
        self.folder, self.results, self.calls = folder, folder / "results", folder / "calls"
        stand_in(folder / "bin" / "nvidia-smi", f"for i in {{1..{gpus}}}; do echo GPU $i; done")
        self.python = stand_in(folder / "python", PYTHON)

    def __call__(self, *words: str) -> Done:
        self.calls.write_text("")
        script = ROOT / "scripts" / "gpu" / "gpu_day.sh"
        return run(
            *(BASH, script, "--results", self.results, *words),
            PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}",
            python=str(self.python),
            CALLS=str(self.calls),
            MENDED=str(self.folder / "mended"),
        )

    def state(self, step: str) -> str:
        return (self.results / f"{step}.state").read_text().partition("|")[0]

    @property
    def ran(self) -> str:
        return self.calls.read_text()


def test_a_day_with_one_gpu(tmp_path: Path) -> None:
    """What fails or takes too long hides nothing behind it; a second run does what is left."""
    day = Day(tmp_path, gpus=1)
    done = day("--bound", "6")
    assert done.returncode == 1, done.stderr
    assert day.state("kernels") == "ok"
    assert day.state("training") == day.state("op-host") == "FAILED with status 1"
    assert day.state("held-sms") == "OUT OF TIME after 6 s"
    assert day.state("shared-gloo-2-1") == "ok"  # the last for one GPU
    assert day.state("multi-gpu") == "skipped: needs 2 GPUs, there are 1"
    wanted = ("host.py", "test_kernels.py", "--batches 12", "test_training.py", "held_sms.py")
    order = [
        day.ran.index(what) for what in (*wanted, "gpu_stage.py", "test_offload.py", "-k nccl-4-1")
    ]
    assert order == sorted(order)
    assert "test_multi_gpu.py" not in day.ran
    page = (day.results / "README.md").read_text()
    assert "| [training](training.log) |" in page
    assert "    E   wrong by half" in page
    assert "    12 passed in 3 s" in page
    (tmp_path / "mended").touch()
    done = day()
    assert done.returncode == 0, done.stdout
    assert len(day.ran.splitlines()) == 3
    assert day.state("training") == day.state("op-host") == day.state("held-sms") == "ok"
    assert "kernels          ok before" in done.stdout
    # Named steps run again.
    assert day("kernels").returncode == 0
    assert "tests/gpu/test_kernels.py" in day.ran and len(day.ran.splitlines()) == 1


def test_a_host_that_forgets(tmp_path: Path) -> None:
    """What was brought away goes on elsewhere; only the corpus, which was not, is made again."""
    state = tmp_path / "day.tar.gz"
    first = Day(tmp_path / "first", gpus=1)
    assert first("--bound", "6", "--state", str(state)).returncode == 1
    second = Day(tmp_path / "second", gpus=1)
    (tmp_path / "second" / "mended").touch()
    assert second("--state", str(state)).returncode == 0
    ran = [line for line in second.ran.splitlines() if "nvidia" not in line]
    assert [word for line in ran for word in line.split() if word.endswith(".py")] == [
        "scripts/prepare_corpus.py",
        "scripts/gpu/op_host.py",
        "tests/gpu/test_training.py",
        "scripts/gpu/held_sms.py",
    ]
    assert "    12 passed in 3 s" in (second.results / "README.md").read_text()
    state.write_text("no archive")
    done = Day(tmp_path / "third", gpus=1)("--state", str(state))
    assert done.returncode == 2 and "no archive of a day before" in done.stderr


# The steps of --first, by worth.
FIRST = [
    *("masks", "replay-whole", "replay-split", "trains-4-1", "trains-2-2", "op-host", "experts"),
    "certify-first",
]


def test_steps_by_worth_take_ten_minutes_at_most(tmp_path: Path) -> None:
    """In commands of nine minutes: what one leaves the next does, and nothing else."""
    day = Day(tmp_path, gpus=1)
    told = day("--first")
    assert told.returncode == 2 and "make it beforehand, on any host" in told.stderr
    assert f"--results {day.results} corpus" in told.stderr and not day.ran
    listed = [line.split() for line in day("--first", "--list").stdout.splitlines()]
    names = [words[0] for words in listed]
    assert names == FIRST
    seconds = [int(words[3]) for words in listed]
    assert {words[1] for words in listed} == {"1"} and max(seconds) <= 540 and sum(seconds) <= 600
    (day.results / "stdlib.idx").touch()
    state = tmp_path / "day.tar.gz"
    assert day("--first", "--state", str(state)).returncode == 1
    assert [name for name in names if day.state(name) != "ok"] == ["op-host"]
    ran = day.ran.splitlines()
    levers = [line.split("--levers ")[1].split()[0] for line in ran if "--levers" in line]
    assert levers == ["default,-wsplit", "default"]
    assert not any(name in day.ran for name in ("test_kernels", "test_training", "held_sms"))
    trainings = [line for line in ran if "shared_gpu.py" in line]
    assert len(trainings) == 2
    for line in trainings:
        words = line.split()
        for words_of in ("--nproc-per-node 4", "--train-iters 2", "--epp-placement v",
                         "--epp-memory-budget-gib 1"):  # fmt: skip
            flag, value = words_of.split()
            assert words[words.index(flag) + 1] == value
        assert "--epp-levers" not in words  # split backwards are the default
    (tmp_path / "mended").touch()
    assert day("--first", "--state", str(state)).returncode == 0
    assert day.ran.splitlines() == [line for line in ran if "op_host.py" in line]


def test_a_gpu_step_runs_every_op_and_recompute_mode_that_training_plans() -> None:
    """Plans of the example's model over eight stages, with ample and with little memory; by the
    plans that certificates on GPUs draw."""
    cost = named_cost("llama3-8b", "h100-80g", pp=8, zero=1).with_vocabulary(True)
    tight = cost.replace(device_budget_bytes=(0.35 * cost.device_budget_bytes[0],) * 8)
    planned: tuple[set, set] = set(), set()
    for lengths, machine in (("wikipedia", cost), ("prolong", tight)):
        batch = open_corpus(lengths, 32_768).batch(0, 64)
        plan = PLANNERS["epp"](batch, machine, Options(context=32_768, effort=0)).plan
        _note(plan, planned)
    drawn: tuple[set, set] = set(), set()
    frame = Frame(61, (2, 2), 1, modes_drawn(EXECUTABLE), vocabulary_parallel=True)
    for number in range(12):
        for plan in draw(1, number, frame).step.plans:
            _note(plan, drawn)
    assert {kind.value for kind in planned[0]} >= set("FBHG") and len(planned[1]) > 1
    assert planned[0] <= drawn[0] and planned[1] <= drawn[1]
    on_gpus = [trial for trial in EVERY_DEGREE.values() if not trial.loop]
    loops = {(one.loop, one.trees) for one in EVERY_DEGREE.values() if one.dtype == BF16}
    assert loops >= {(True, False), (True, True), (False, True)}
    assert any("--epp-vocab-parallel" in words for trial in on_gpus for words in trial.models)
    script = (ROOT / "scripts" / "gpu" / "gpu_day.sh").read_text()
    assert "tests/gpu/test_certificates.py" in script


FLAG = re.compile(r"(?<!\S)--[a-z0-9-]+")
# Flags of the example that say sizes, files, or what an optimizer and a log do.
SAID_ELSEWHERE = {
    *("--adam-beta1", "--adam-beta2", "--clip-grad", "--eval-interval", "--lr-decay-style"),
    *("--lr-warmup-fraction", "--min-lr", "--weight-decay", "--rotary-base"),
    *("--dist-ckpt-optim-fully-reshardable", "--save", "--load", "--save-interval"),
    "--list-gpus",
}


def test_a_step_of_one_gpu_has_every_flag_of_the_example(tmp_path: Path) -> None:
    """Ranks that share it (shared-nccl-2-1) run a pipeline as the example's; others its shape."""
    example = (ROOT / "examples" / "pretrain_gpt_epp.sh").read_text()
    asked = set(FLAG.findall(example)) - SAID_ELSEWHERE
    listed = Day(tmp_path, gpus=1)("--list").stdout
    assert re.search(r"^shared-nccl-2-1 +1 GPUs", listed, re.M)
    seconds = [int(line.split(" GPUs,")[1].split()[0]) for line in listed.splitlines()]
    assert len(seconds) > 25 and max(seconds) <= 480
    shared = {"tensor_model_parallel_size": 1, "sequence_parallel": True, "epp": True, **NCCL}
    words = flags(tmp_path / "corpus", pipeline_model_parallel_size=2, **shared)
    script = (ROOT / "scripts" / "gpu" / "gpu_day.sh").read_text()
    assert {"--overlap-grad-reduce", "--use-distributed-optimizer", "--swiglu"} <= asked
    assert asked <= {*FLAG.findall(script), *words}
    assert shared["epp_vocab_parallel"] == "on"


def _note(plan: Plan, seen: tuple[set, set]) -> None:
    kinds, modes = seen
    kinds |= {op.kind for order in plan.orders for op in order}
    modes |= {mode for stage in plan.recompute for choice in stage for mode in choice}
