"""The certificate on real processes: every degree of parallelism, and what it says of bad input."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from megatron_epp.certify import command as certify_module
from megatron_epp.certify import processes
from megatron_epp.certify.command import certify, verdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.processes import ChildLost, Children
from megatron_epp.certify.protocol import ModelSetup
from megatron_epp.certify.trial import GPT, LLAMA, Trial, certify_parser, read
from megatron_epp.cli.megatron_flags import require_known
from megatron_epp.mcore.certify.backend import MEGATRON
from megatron_epp.mcore.certify.command import main
from megatron_epp.show.table import COLUMNS
from tests.mcore.certified import certified, models
from tests.programs import ROOT, python
from tests.waiting import LAST_RESORT_SECONDS, until

# With the reduction of gradients in buckets while backward runs, and, every second batch, tied
# embeddings on two stages.
EVERY_DEGREE = {
    "stages and replicas": Trial(
        Degrees(pp=2, tp=1, dp=2),
        models(f"{LLAMA} --num-layers 4", f"{GPT} --num-layers 4"),
        batches=6,
        overlap=True,
    ),
    # Frozen linears of Megatron's, trained ones of its and of torch's around them.
    "adapters": Trial(
        Degrees(pp=2, tp=2, dp=1),
        models(f"{LLAMA} --num-layers 4 --sequence-parallel", f"{GPT} --num-layers 4"),
        batches=4,
        lora_rank=4,
    ),
    # Few heads shared by the ranks, normed queries and keys, a stage without any layer.
    "uneven stages": Trial(
        Degrees(pp=4, tp=1, dp=1),
        models(
            "--num-layers 9 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
            "--num-query-groups 1 --qk-layernorm --normalization RMSNorm --squared-relu "
            "--position-embedding-type rope --rotary-percent 0.5 --add-qkv-bias "
            "--pipeline-model-parallel-layout Et*4|t*3|t*2|L"
        ),
        batches=3,
    ),
}


@pytest.mark.everything
@pytest.mark.parametrize("name", EVERY_DEGREE)
def test_random_plans_compute_what_the_plain_model_computes(name) -> None:
    trial = EVERY_DEGREE[name]
    _, judged = certified(trial, "split", "hybrid", "packed", "recomputed", "offloaded")
    # What computes no loss has no gradient, and still sends, receives and reduces.
    assert sum(batch.coverage.untargeted.slices for batch in judged) > 0
    if trial.degrees.dp > 1:
        assert sum(batch.coverage.untargeted.chunks for batch in judged) > 0
        assert sum(batch.coverage.untargeted.replicas for batch in judged) > 0
    for batch in judged:
        # Every link carries each chunk once forward and once back.
        assert batch.coverage.messages == 2 * (trial.degrees.pp - 1) * trial.degrees.tp * (
            batch.coverage.chunks
        )
        assert {"plan digest", "gradient reduction", "token count"} <= set(
            batch.coverage.collectives
        )
    tied = [batch for batch in judged if batch.coverage.collectives["embedding copies"]]
    assert bool(tied) == (trial.degrees.pp > 1 and not trial.lora_rank)
    assert "certified: " in verdict(judged)


def test_adapters_without_a_graph_to_hang_on_are_noticed() -> None:
    """A frozen embedding's output takes no part in autograd: a first layer that is recomputed whole
    then has no gradients, which a certificate must not miss."""
    trial = Trial(
        Degrees(pp=1, tp=1, dp=1),
        models(f"{LLAMA} --num-layers 2"),
        batches=4,
        lora_rank=4,
        interfere=Path(__file__).with_name("without_graph.py"),
    )
    judged = certify(MEGATRON, trial)
    assert not all(batch.passed for batch in judged), verdict(judged)


@pytest.mark.everything
def test_without_model_flags_it_certifies_two_models(capsys) -> None:
    """Untied with grouped queries, and tied; with tensor parallelism one splits the sequence."""
    assert main(["--pp", "2", "--tp", "2", "--batches", "4"]) == 0
    shown = capsys.readouterr().out
    lines, described = shown.splitlines(), re.findall(r"PP 2, TP 2, DP 1: layers 2 2.*\n.*", shown)
    first, second = (" ".join(each.split()) for each in described)
    assert "8 heads in 4 groups" in first and "untied, sequence parallel" in first
    assert second.endswith(" tied")
    assert lines[2].split()[:4] == ["batch", "documents", "cut", "chunks"]
    numbers = [line.split()[0] for line in lines]
    assert [number for number in numbers if number.isdigit()] == ["0", "2", "1", "3"]
    assert lines[-1].startswith("certified: 4 batches, worst error ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--batches 0", "--batches 0: expected at least 1"),
        ("--cp 0", "--cp 0: expected at least 1"),
        (
            "--pp 40 --tp 2",
            "PP 40, TP 2, DP 1: 80 processes of this host; expected at most 64, as a small layout "
            "certifies what a large one runs",
        ),
        ("--pp two", "argument --pp: invalid int value: 'two'"),
        ("--timeout 0", "--timeout 0.0: expected at least 1"),
        ("--lora-rank -1", "--lora-rank -1: expected at least 0"),
    ],
)
def test_what_the_command_line_refuses(arguments, says) -> None:
    with pytest.raises(ValueError) as error:
        read(arguments.split())
    assert str(error.value) == says


def test_flags_that_megatron_does_not_know_end_with_status_2() -> None:
    done = python("-m", "megatron_epp", "certify", "--pp", "1", "--hidden-sizes", "64")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "megatron_epp: error: certify: unknown option '--hidden-sizes', here and in Megatron; "
        "did you mean --hidden-size?\n"
    )


@pytest.mark.parametrize("words", ["--loop", "--trees", "--planner=zb-v", "--documents 3"])
def test_flags_of_the_projects_own_certificates_say_where_they_are(words: str) -> None:
    with pytest.raises(ValueError, match=r"run python -m tests\.certify with the same"):
        read(words.split())


def test_every_flag_of_its_own_is_known_before_megatron_is() -> None:
    flags = [flag for action in certify_parser()._actions for flag in action.option_strings]
    assert {"--overlap", "--vocab-parallel", "--lora-rank", "--timeout"} <= set(flags)
    require_known("certify", [flag for flag in flags if flag.startswith("--")])


def test_degrees_come_from_the_model_flags_too() -> None:
    assert read([]).degrees == Degrees(2, 1, 1)
    flags = "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --num-layers 8"
    flags += " --context-parallel-size 4"
    assert read(flags.split()).degrees == Degrees(4, 2, 1, cp=4)
    few = "--pp 2 --dp 3 --cp 2"
    assert read([*flags.split(), *few.split()]).degrees == Degrees(2, 2, 3, cp=2)
    assert read(flags.split()).models == (tuple(flags.split()),)


CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 5, "hidden_size": 256, "head_dim": 32,
    "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 4000, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0],
    "moe_intermediate_size": 64,
}  # fmt: skip


def test_a_config_json_is_certified_by_the_flags_that_it_makes(tmp_path, capsys) -> None:
    """Dense first, then experts, over stages that differ."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    words = ["--model", str(tmp_path), "--pp", "2", "--batches", "1"]
    (flags,) = read([*words, "--rotary-base", "77"]).models
    assert flags[-2:] == ("--rotary-base", "77")  # what follows is added
    assert main([*words, "--cuda-graph-impl", "local"]) == 0
    shown = capsys.readouterr().out
    ignored = "flags have no effect: --cuda-graph-impl local (graphs cannot be captured, because"
    assert ignored in " ".join(shown.split())
    assert shown.startswith("PP 2, TP 1, DP 1: layers 2 1") and "qk-layernorm" in shown
    assert "experts" in shown and "certified: 1 batches" in shown
    assert max(map(len, shown.splitlines())) <= COLUMNS
    file.write_text(json.dumps({**CONFIG, "model_type": "olmo2"}))
    with pytest.raises(ValueError, match="flags cannot say: norms after attention and MLP"):
        read(words)
    with pytest.raises(ValueError, match="--like llama: how to read a --model, which is missing"):
        read(["--like", "llama"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
@pytest.mark.everything
def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    assert read(["--device", "cuda"]).device == "cuda"
    llama = models(f"{LLAMA} --num-layers 2")
    with pytest.raises(ValueError, match=r"--device cuda: every rank needs a GPU.* has 0"):
        certify(MEGATRON, Trial(Degrees(1, 1, 1), llama, batches=1, device="cuda"))


def test_a_rank_that_dies_ends_the_certificate(tmp_path) -> None:
    """And all of its processes: the parent names the rank, and nobody is left behind."""
    deadly = tmp_path / "deadly.py"
    deadly.write_text(
        "import os, signal\n"
        "import torch.distributed as dist\n"
        "from contextlib import nullcontext\n"
        "def around(number):\n"
        "    if number == 1 and dist.get_rank() == 1:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return nullcontext()\n"
    )
    trial = Trial(Degrees(2, 1, 1), models(f"{LLAMA} --num-layers 4"), batches=3, interfere=deadly)
    lines: list[str] = []
    with pytest.raises(ChildLost, match="rank 1 ended with status -9"):
        certify(MEGATRON, trial, lines.append)
    assert lines[-1].split()[0] == "0"  # the batch before was judged
    mine = psutil.Process()
    servers = mine.children()
    assert [p for p in mine.children(recursive=True) if p not in servers] == []


@pytest.mark.everything
def test_killing_the_command_ends_its_processes() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_epp", "certify", "--pp", "1", "--batches", "9999"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["0"]:  # the first batch is judged: everybody is there
            break
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=LAST_RESORT_SECONDS)
    assert not alive


def test_a_silent_rank_is_named_with_the_op_it_is_in(tmp_path, monkeypatch) -> None:
    sleepy = tmp_path / "sleepy.py"
    sleepy.write_text(
        "import time\n"
        "from pathlib import Path\n"
        "import torch.distributed as dist\n"
        "from contextlib import nullcontext\n"
        "def around(number):\n"
        f"    Path({str(tmp_path)!r}, f'there-{{dist.get_rank()}}').touch()\n"
        "    if dist.get_rank() == 1:\n"
        "        time.sleep(3600)\n"
        "    return nullcontext()\n"
    )
    prepare = certify_module._prepare

    class Impatient(Children):
        @property
        def patience_seconds(self) -> float:
            """Patience that begins when both ranks have been asked and compute."""
            until(lambda: len(list(tmp_path.glob("there-*"))) == 2)
            return 3

        @patience_seconds.setter
        def patience_seconds(self, seconds: float) -> None: ...

    def impatient(children: Children, *details) -> ModelSetup:
        prepared = prepare(children, *details)  # imports take their time
        children.__class__ = Impatient
        return prepared

    monkeypatch.setattr(certify_module, "_prepare", impatient)
    # On a busy machine a last word takes its time, too.
    monkeypatch.setattr(processes, "GRACE_SECONDS", LAST_RESORT_SECONDS)
    trial = Trial(Degrees(2, 1, 1), models(f"{LLAMA} --num-layers 4"), 1, interfere=sleepy)
    with pytest.raises(ChildLost) as error:
        certify(MEGATRON, trial)
    first, *words = str(error.value).splitlines()
    assert first == "rank 0, rank 1: no answer to 'compute' in 3 s"
    assert any("rank 0 terminated: pipeline rank 0" in line for line in words), words
