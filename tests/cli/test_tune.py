"""``tune`` on the command line: the table, JSON, the launch script, the dry run, bad input."""

import argparse
import dataclasses
import json
import socket
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cli.tune.script import layout_arguments
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.survey import Choice
from tests.cost.simple_device import OLD_H100
from tests.programs import BASH, run

LENGTHS = (8000, 6000, 3000, 2500, 1500, 900, 500, 300)
MACHINE = ("--model", "llama3-8b", "--device", "h100-80g", "--nodes", "1", "--effort", "0")


def tune(lengths: str, *others: str, batch: int = 8) -> int:
    size = ("--global-batch-size", str(batch), "--batches", "1")
    machine = () if "cpu" in others else MACHINE
    return main(["tune", "--lengths", lengths, *machine, *size, *others])


def test_a_survey_in_json_a_script_and_a_dry_run(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "launch.sh"
    more = ("--json", "--script", str(script), "--dry-run-corpus", "2", "--context", "8192")
    more += ("--memory-budget-gib", "60")
    assert tune(lengths, *more) == 0
    facts = json.loads(capsys.readouterr().out)
    choices = facts["choices"]
    seconds = [choice["seconds"] for choice in choices]
    assert seconds == sorted(seconds) and 3 <= len(choices) <= 10
    line = "tp {tp} pp {pp} cp {cp} ep 1".format(**choices[0])
    assert facts["layouts_line"].partition(" layers ")[0] == line
    for choice in choices:
        assert choice["tp"] * choice["cp"] * choice["pp"] * choice["dp"] == 8
        assert len(choice["layers"]) == choice["pp"] and sum(choice["layers"]) == 32
        assert sum(choice["shares"].values()) == pytest.approx(1)
        assert choice["tokens_per_second"] == pytest.approx(sum(LENGTHS) / choice["seconds"])
        assert choice["peak_bytes"] <= 60 * 2**30
    assert len(facts["dry_run"]) == 2
    words = launched(script)
    parsed = megatrons_parser().parse_args(words)
    first = choices[0]
    assert parsed.tensor_model_parallel_size == first["tp"]
    assert parsed.context_parallel_size == first["cp"]
    assert parsed.pipeline_model_parallel_size == first["pp"]
    assert parsed.seq_length == 8192 and parsed.global_batch_size == 8
    assert parsed.num_layers == 32 and parsed.num_query_groups == 8 and parsed.swiglu
    assert parsed.rotary_base == 500000 and parsed.padded_vocab_size == 128256
    assert parsed.epp == (first["planner"] == "epp")
    assert parsed.epp_memory_budget_gib == [60] and parsed.epp_effort == 0
    assert parsed.bf16


def test_a_script_for_cpus_trains_in_float32(lengths: str, tmp_path: Path) -> None:
    """A CPU takes twenty times as long in bf16."""
    config, script = tmp_path / "config.json", tmp_path / "launch.sh"
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    config.write_text(json.dumps({"model_type": "llama", **sizes}))
    machine = ("--model", str(config), "--device", "cpu", "--gpus", "2", "--devices-per-node", "2")
    more = ("--pp", "2", "--context", "8192", "--script", str(script))
    assert tune(lengths, *machine, *more) == 0
    assert not megatrons_parser().parse_args(launched(script)).bf16


def test_a_budget_for_every_pipeline_rank_says_how_many_there_are(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "launch.sh"
    more = ("--json", "--script", str(script), "--context", "8192", "--tp", "4", "--top", "1")
    assert tune(lengths, *more, "--memory-budget-gib", "60", "50") == 0
    assert {choice["pp"] for choice in json.loads(capsys.readouterr().out)["choices"]} == {2}
    parsed = megatrons_parser().parse_args(launched(script))
    assert not parsed.epp or parsed.epp_memory_budget_gib == [60, 50]


def launched(script: Path, entry: str = "megatron_epp.pretrain_gpt") -> list[str]:
    """The words that the script hands to the trainer."""
    done = run(BASH, script, PYTHON="echo", DATA="corpus", TOKENIZER="t.model")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:2] == ["-m", "torch.distributed.run"]
    return words[words.index(entry) + 1 :]


def megatrons_parser() -> argparse.ArgumentParser:
    arguments = pytest.importorskip("megatron.training.arguments")
    from megatron_epp.mcore.flags.config import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return add_arguments(arguments.add_megatron_arguments(parser))


CONFIG = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 9601,
}
QWEN3 = {**CONFIG, "model_type": "qwen3", "rope_theta": 1000000, "rms_norm_eps": 1e-6}
NEMOTRON_H = {**CONFIG, "model_type": "nemotron_h", "hybrid_override_pattern": "M-*-M-M-",
              "mamba_num_heads": 16, "auto_map": {"AutoConfig": "a\ntouch PWNED"}}  # fmt: skip
TWO_STAGES = ("--tp", "2", "--pp", "2", "--cp", "1", "--top", "1", "--devices-per-node", "4")


def folder_of(tmp_path: Path, config: dict) -> str:
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_script_launches_the_model_that_a_config_describes(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script, folder = tmp_path / "launch.sh", folder_of(tmp_path, QWEN3)
    assert tune(lengths, *TWO_STAGES, "--script", str(script), "--model", folder) == 0
    assert "named (qwen3) on 1 nodes of 4" in " ".join(capsys.readouterr().out.split())
    parsed = megatrons_parser().parse_args(launched(script))
    assert parsed.num_layers == 8 and parsed.kv_channels == 128 and parsed.num_query_groups == 4
    assert parsed.rotary_base == 1000000 and parsed.layernorm_epsilon == 1e-6
    assert parsed.qk_layernorm and parsed.swiglu and parsed.untie_embeddings_and_output_weights
    assert parsed.padded_vocab_size == 9728  # over two ranks, as Megatron pads
    assumed = script.read_text().partition("so assumed: ")[2].partition(".\n")[0]
    assert {"head_dim 128", "tie_word_embeddings False"} <= set(assumed.split(", "))


def test_the_script_of_a_hybrid_model_says_its_stages_in_its_pattern(
    lengths: str, tmp_path: Path
) -> None:
    script, folder = tmp_path / "launch.sh", folder_of(tmp_path, NEMOTRON_H)
    assert tune(lengths, *TWO_STAGES, "--script", str(script), "--model", folder) == 0
    words = launched(script, "megatron_epp.pretrain_hybrid")
    parsed = megatrons_parser().parse_args(words)
    pattern = parsed.hybrid_layer_pattern
    assert pattern.replace("|", "") == "M-*-M-M-" and pattern.count("|") == 1
    assert parsed.mamba_num_heads == 16 and parsed.squared_relu and not parsed.swiglu
    assert parsed.decoder_first_pipeline_num_layers is None
    assert "\ntouch" not in script.read_text()


def test_no_script_launches_another_model_than_was_named(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "launch.sh"
    folder = folder_of(tmp_path, {**CONFIG, "model_type": "olmo2"})
    assert tune(lengths, "--script", str(script), "--model", folder) == 2
    said = capsys.readouterr().err
    assert "cannot say of named (olmo2): norms after attention and MLP; norms over all" in said
    assert said.count("\n") == 1 and not script.exists()
    assert tune(lengths, "--model", folder, "--like", "olmo22") == 2
    assert "--like 'olmo22' is not known; expected one of olmo2" in capsys.readouterr().err
    assert tune(lengths, "--like", "llama") == 2
    assert "--like llama: llama3-8b is not a config.json" in capsys.readouterr().err


def test_a_pipeline_with_layers_by_time_is_launched_with_megatrons_flags(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    script = tmp_path / "launch.sh"
    whole = ("--vocab-parallel", "off")  # over the stages, even ones are as fast
    assert (
        tune(
            *(lengths, "--pp", "4", "--cp", "2", "--tp", "1", "--script", str(script), *whole),
            *("--device", OLD_H100),
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "Best: tp 1 cp 2 pp 4 dp 1" in said and "Layers by time: --" in said
    parsed = megatrons_parser().parse_args(launched(script))
    by_ends = parsed.decoder_first_pipeline_num_layers or parsed.decoder_last_pipeline_num_layers
    assert by_ends or parsed.pipeline_model_parallel_layout
    assert parsed.sequence_parallel is False and parsed.use_distributed_optimizer
    assert tune(lengths, "--pp", "4", "--cp", "2", "--partition", "even") == 0
    assert "Layers by time" not in capsys.readouterr().out


def test_a_grid_with_a_hole_is_mapped_drawn_and_launched(
    lengths: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Of four nodes one failed; two in a row are left, and this host is the second of them."""
    here = socket.gethostname()
    grid = {"name": "mine", "node_devices": 4, "between": "all-to-all", "nodes": [2, 2]}
    grid |= {"failed_nodes": ["a"], "hosts": ["a", "b", "c", here]}
    topology, hostfile, svg = (tmp_path / name for name in ("mine.json", "hosts", "grid.svg"))
    topology.write_text(json.dumps(grid))
    script = tmp_path / "launch.sh"
    files = ("--hostfile", str(hostfile), "--grid-svg", str(svg), "--script", str(script))
    job = ("--nodes", "2", "--devices-per-node", "4", "--topology", str(topology))
    job += ("--tp", "4", "--pp", "2")
    assert tune(lengths, *job, *files) == 0
    said = capsys.readouterr().out
    assert "mine, 2 x 2 nodes: tp 4 cp 1 pp 2 dp 1 on 2, 1 failed, 1 spare" in said
    assert f"hosts by node rank: 0 c, 1 {here}" in said and "0   x   .\n1 0.0 1.0\n" in said
    assert hostfile.read_text() == f"c\n{here}\n"
    drawn = svg.read_text()
    assert "<title>c, node rank 0</title>" in drawn and "<title>a</title>" in drawn
    done = run(BASH, script, PYTHON="echo", DATA="corpus", TOKENIZER="t.model")
    assert "--node-rank 1 " in done.stdout and "--master-addr c " in done.stdout, done.stderr
    assert tune(lengths, *job, "--json") == 0
    nodes = json.loads(capsys.readouterr().out)["node_map"]
    assert nodes["nodes"] == [[1, 0], [1, 1]] and nodes["spares"] == [[0, 1]]
    script.write_text(script.read_text().replace(here, "elsewhere"))
    done = run(BASH, script, PYTHON="echo", DATA="corpus", TOKENIZER="t.model")
    assert done.returncode == 1 and "this host is not in the list of hosts" in done.stderr
    for wrong, told in (
        (("--nodes", "4"), "--nodes 4: 3 of the 2 x 2 nodes of --topology"),
        (("--cp", "2", "--pp", "1", "--nodes", "3"), "no tp x cp x pp x dp fills them"),
    ):
        assert tune(lengths, *job, *wrong) == 2
        assert told in capsys.readouterr().err
    grid["failed_nodes"] = ["a", "d"]
    topology.write_text(json.dumps(grid))
    assert tune(lengths, *job) == 2
    told = capsys.readouterr().err
    assert f"topology file {topology}: failed_nodes[1] 'd': there is no such node" in told
    assert len(told.strip().splitlines()) == 1


def test_it_says_plainly_when_no_pipeline_or_no_epp_is_best(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    equal = tmp_path / "equal.txt"
    equal.write_text("\n".join(["2048"] * 8))
    assert tune(str(equal), "--context", "2048") == 0
    said = capsys.readouterr().out
    assert "No pipeline is best here" in said
    assert "No --epp is best here: stock, packed at best" in said


def test_the_script_says_how_experts_are_spread() -> None:
    choice = Choice(
        *(Layout(1, 2, 2, 4), (24, 24), "epp", False, 1.0, 1e5, 0.1, 0.0, 0.1, 0.0, 0.0, 2**30, 1),
        ep=8,
    )
    words = [word for group in layout_arguments(choice) for word in group]
    parsed = megatrons_parser().parse_args([*words, "--num-experts", "128"])
    assert parsed.expert_model_parallel_size == 8 and parsed.expert_tensor_parallel_size == 1
    assert parsed.moe_token_dispatcher_type == "alltoall"
    dense = [
        word for group in layout_arguments(dataclasses.replace(choice, ep=1)) for word in group
    ]
    assert not any("expert" in word for word in dense)
    assert "ep" not in dataclasses.replace(choice, ep=1).facts()


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (("--global-batch-size", "7", "--tp", "3"), "no tp x cp x pp x dp fills them"),
        (("--topology", "railx"), "its nodes have 16 devices; give --devices-per-node 16"),
        (("--hostfile", "x"), "--hostfile: expected a --topology file that has nodes"),
        (("--topology", "railx", "--devices-per-node", "16", "--grid-svg", "x"), "--grid-svg: exp"),
        (("--topology", "tree"), "unknown topology 'tree'"),
        (("--levers", "magic"), "unknown lever 'magic'"),
        (("--memory-budget-gib", "1"), "no layout of the 8 devices works"),
        (("--device", "h100-80g*2,a100-40g*2"), "several devices are no longer accepted"),
        (("--nodes", "0"), "expected a whole number of at least 1"),
        (("--ep", "4"), "ep 4: the model has no experts; leave it out"),
        (("--for", "verl"), "--for was removed; set degrees and layers in the framework's"),
    ],
)
def test_bad_input_is_one_line(
    lengths: str, others: tuple[str, ...], said: str, capsys: pytest.CaptureFixture
) -> None:
    assert tune(lengths, *others) == 2
    told = capsys.readouterr().err
    assert said in told and len(told.strip().splitlines()) == 1
