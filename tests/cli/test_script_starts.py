"""The launch script of every row of ``tune`` starts on its GPUs, and is the row's job."""

import json
import os
import re
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cli.tune import command
from megatron_epp.cli.tune.script import launch_script
from megatron_epp.cost.overlap import overlaps_experts
from megatron_epp.planner.tuning.survey import Choice
from tests.cli.commands import Commands
from tests.programs import BASH, ROOT, python, run, stand_in

STARTER = Path(__file__).with_name("script_starts.py")
QUICK = "--lengths wlb --effort 0 --top 3 --global-batch-size 32 --batches 1"
# The documents' own example (docs/guides/choosing_degrees.md).
DOCUMENTED = "--model llama3-8b --device h100-80g --nodes 1 --context 32768 --global-batch-size 16"
SMALL = {
    "num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 8192,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
    "max_position_embeddings": 65536,
}  # fmt: skip
MLA = {
    **SMALL, "model_type": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 32,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DSA = {
    **MLA, "model_type": "deepseek_v32", "index_n_heads": 16, "index_head_dim": 128,
    "index_topk": 2048,
}  # fmt: skip
CASES = [
    pytest.param(f"{DOCUMENTED} --tp 4 --pp 1", 9, id="documented, few rows"),
    *(
        pytest.param(line, major, id=line.split()[1] + name, marks=pytest.mark.everything)
        for line, major, name in (
            (f"{DOCUMENTED}", 9, ", documented"),
            ("--model llama3-8b --device b200-180g --nodes 1 --tp 2 --batches 2", 10, ""),
            ("--model llama3-8b --device a100-40g --nodes 1 --tp 4 --batches 2", 8, ", recomputes"),
            ("--model qwen3-30b-a3b --device h100-80g --gpus 16 --tp 2 --cp 1", 9, ""),
            ("--model qwen3-30b-a3b --device gb200-186g --gpus 16 --tp 1 --pp 2", 10, ", overlaps"),
            ("--model mla --device h100-80g --nodes 1 --tp 2", 9, ""),
            ("--model dsa --device h100-80g --nodes 1 --tp 1 --pp 2", 9, ""),
            ("--model nemotron-h-8b --device h100-80g --nodes 1 --tp 4", 9, ""),
            ("--model nemotron-3-nano --device h200-141g --gpus 16 --tp 1 --pp 2", 9, ""),
            ("--model qwen3-next-80b --device b200-180g --gpus 16 --tp 2 --pp 4", 10, ""),
        )
    ),
]  # fmt: skip
CANNOT = (  # what Megatron has no job for
    "no length of samples fits all batches",
    "Megatron overlaps experts' exchanges in GPT models only, not in hybrids",
    "Megatron runs attention with an indexer and CP by --cp-comm-type allgather only",
)


def surveyed(line: str) -> tuple:
    """The job and all choices of a survey, and its documents and context."""
    with patch.object(command, "_write_and_print") as shown:
        assert main(["tune", *line.split()]) == 0
    job, result, _, batches, drawn, _ = shown.call_args.args
    job.arguments.script = "run.sh"
    context = job.arguments.context or int(batches.corpus.inputs.max())
    return job, result.choices, len(drawn[0]), context


def launched(script: str, *more: str) -> tuple[str, str, list[str]]:
    """Connections, entry and words of a launch script with ``more`` flags."""
    Path("run.sh").write_text(script)
    echo = stand_in(Path("echo"), 'echo "$CUDA_DEVICE_MAX_CONNECTIONS"; printf "%s\\0" "$@"')
    here = {"PYTHON": str(echo.absolute()), "DATA": "corpus", "TOKENIZER": "t.model"}
    done = run(BASH, Path("run.sh").absolute(), *more, NODE_RANK="0", MASTER_ADDR="a", **here)
    assert done.returncode == 0, done.stderr
    connections, _, rest = done.stdout.partition("\n")
    words = rest.split("\0")[:-1]
    at = next(n for n, word in enumerate(words) if word.startswith("megatron_epp."))
    return connections, words[at], words[at + 1 :]


def has_what_was_planned(row: Choice, words: list[str], script: str) -> None:
    """The flags of the nearest job of Megatron's own to a row of stock."""
    stock, text = row.stock, f"{' '.join(words)} "
    assert stock is not None and stock.static is not None
    assert "--epp" not in text and "--dataloader-inter-document-masking " in text
    assert ("--cp-comm-type a2a " in text) == (row.layout.cp > 1)
    experts = overlaps_experts(stock.cost)
    assert ("--tp-comm-overlap " in text) == (bool(stock.overlap) and not experts)
    assert ("--overlap-moe-expert-parallel-comm " in text) == (bool(stock.overlap) and experts)
    layers = re.search("--recompute-method block --recompute-num-layers ([0-9]+) ", text)
    assert int(layers[1] if layers else 0) == stock.static.recomputed
    length = re.search("--seq-length ([0-9]+) ", text)
    assert length is not None and int(length[1]) < stock.static.tokens + 2 * row.layout.tp * 8
    assert "Megatron cuts documents at the ends of samples" in script
    predicted = re.search(r"# Predicted: (\S+) s an iteration, (\S+) tokens/s", script)
    assert predicted is not None
    tokens = row.tokens_per_second * row.seconds
    assert float(predicted[1]) * float(predicted[2]) == pytest.approx(tokens, rel=2e-3)
    if len(stock.batches) == 1:
        assert float(predicted[1]) == pytest.approx(row.seconds, rel=1e-3)
    elif row.batches == len(stock.batches):
        # One length for all batches is not faster, but for the rounding of the row's own plans.
        assert float(predicted[1]) >= row.seconds * 0.99


@pytest.mark.parametrize(("line", "major"), CASES)
def test_the_script_of_every_row_starts(line: str, major: int) -> None:
    for name, described in (("mla", MLA), ("dsa", DSA)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(described))
    job, rows, documents, context = surveyed(f"{QUICK} {line}")
    cases, started = [], []
    for row in rows:
        try:
            script = launch_script(job, row, documents, context)
        except ValueError as refusal:
            assert row.stock is not None and str(refusal) in CANNOT
            continue
        # The other way needs a package that only hosts with GPUs have.
        more = ["--no-dsa-indexer-rotate-activation"] if "--model dsa" in line else []
        connections, entry, words = launched(script, *more)
        split = row.layout.tp * row.layout.cp > 1
        one = row.stock is not None and split and major < 10
        assert connections == ("1" if one else "32")
        if row.stock is not None:
            has_what_was_planned(row, words, script)
        cases.append((job.devices, major, connections, entry, words))
        started.append(row)
    assert {row.stock is None for row in started} == {True, False}
    Path("cases").write_text(json.dumps(cases))
    with_gpus = {**os.environ, "EPP_ENGINE": "tests.engine", "PYTHONPATH": str(ROOT)}
    done = python(STARTER, Path("cases").absolute(), Path("answers").absolute(), only=with_gpus)
    assert done.returncode == 0, done.stderr
    for row, answer in zip(started, json.loads(Path("answers").read_text()), strict=True):
        assert isinstance(answer, int), (row, answer)
        if row.stock is not None:
            tokens = row.tokens_per_second * row.seconds
            assert answer == pytest.approx(tokens, rel=0.05), row
        else:
            multiple = 2 * row.layout.tp * row.layout.cp
            assert 0 <= answer / documents - context < multiple


def test_a_row_that_megatron_cannot_run_names_the_best_with_epp(cli: Commands) -> None:
    line = f"tune {QUICK} {DOCUMENTED} --tp 4 --pp 1 --cp 1"
    rows = cli.facts(line)["choices"]
    stock, epp = (
        next(n for n, row in enumerate(rows, 1) if (row["planner"] == "stock") == is_stock)
        for is_stock in (True, False)
    )
    reason = "no length of samples fits all batches"
    with patch("megatron_epp.cli.tune.script.stock_job", side_effect=ValueError(reason)):
        told = cli.refused(f"{line} --row {stock} --script run.sh")
        assert not Path("run.sh").exists()
        assert told.endswith(f": {reason}; row {epp} is the best with --epp: --row {epp}\n")
        assert f"error: --script: row {stock}, stock" in told
