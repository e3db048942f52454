"""``tune`` on the command line: the table, JSON, the launch script, the dry run."""

import argparse
import dataclasses
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_epp.__main__ import main
from megatron_epp.cli.tune.script import layout_arguments
from megatron_epp.planner.registry import STOCK
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.survey import Choice
from tests.cli.commands import LONG_AND_SHORT, Commands
from tests.programs import BASH, Done, run, stand_in

JOB = "--effort 0 --global-batch-size 8 --batches 1 --nodes 1"
TUNE = f"tune --lengths spread --model llama3-8b --device h100-80g {JOB}"


# As Slurm's: the first of two nodes.
SCONTROL = """[[ $* == "show hostnames "node-* ]] || exit 1
echo "${3/\\[7-8\\]/7}"; echo node-9"""


def ran(script: Path = Path("run.sh"), variables: Mapping[str, str] = {}) -> Done:
    """The launch script with echo for Python, and no launcher's variables but ``variables``."""
    stand_in(Path("bin/scontrol"), SCONTROL)
    path = f"{Path('bin').absolute()}:{os.environ['PATH']}"
    only = {"PATH": path, "PYTHON": "echo", "DATA": "corpus", "TOKENIZER": "t.model"}
    return run(BASH, script.absolute(), only={**only, **variables})


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Launch script of two nodes; next to it, one.sh of one."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "spread").write_text("\n".join(map(str, LONG_AND_SHORT)))
    job = [*TUNE.replace("spread", str(folder / "spread")).split(), "--tp", "8", "--top", "1"]
    for name, more in (("two.sh", ["--nodes", "2", "--pp", "2"]), ("one.sh", [])):
        assert main([*job, *more, "--script", str(folder / name)]) == 0
    return folder / "two.sh"


def launched(entry: str = "megatron_epp.pretrain_gpt") -> argparse.Namespace:
    """What Megatron reads of the words that the script hands to the trainer."""
    done = ran()
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:2] == ["-m", "torch.distributed.run"]
    return megatrons(words[words.index(entry) + 1 :])


def megatrons(words: list[str]) -> argparse.Namespace:
    arguments = pytest.importorskip("megatron.training.arguments")
    from megatron_epp.mcore.flags.config import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return add_arguments(arguments.add_megatron_arguments(parser)).parse_args(words)


def test_a_survey_in_json_and_a_script(cli: Commands) -> None:
    more = "--script run.sh --context 8192 --memory-budget-gib 60"
    facts = cli.facts(f"{TUNE} {more}")
    choices = facts["choices"]
    seconds = [choice["seconds"] for choice in choices]
    assert seconds == sorted(seconds) and 3 <= len(choices) <= 10
    line = "tp {tp} pp {pp} cp {cp} ep 1".format(**choices[facts["row"] - 1])
    assert facts["layouts_line"].partition(" layers ")[0] == line
    for choice in choices:
        assert choice["tp"] * choice["cp"] * choice["pp"] * choice["dp"] == 8
        stages = len(choice.get("place", range(choice["pp"])))
        assert len(choice["layers"]) == stages and sum(choice["layers"]) == 32
        assert sum(choice["shares"].values()) == pytest.approx(1)
        tokens = choice["tokens_per_second"] * choice["seconds"]
        assert tokens == pytest.approx(sum(LONG_AND_SHORT))
        assert choice["peak_bytes"] <= 60 * 2**30
    parsed, first = launched(), choices[facts["row"] - 1]
    assert parsed.tensor_model_parallel_size == first["tp"]
    assert parsed.context_parallel_size == first["cp"]
    assert parsed.pipeline_model_parallel_size == first["pp"]
    assert parsed.seq_length == 8192 and parsed.global_batch_size == 8
    assert parsed.num_layers == 32 and parsed.num_query_groups == 8 and parsed.swiglu
    assert parsed.rotary_base == 500000 and parsed.padded_vocab_size == 128256
    assert parsed.epp == (first["planner"] == "epp")
    assert parsed.epp_memory_budget_gib == [60] and parsed.epp_effort == 0
    assert parsed.bf16


def test_a_budget_for_every_pipeline_rank_says_how_many_there_are(cli: Commands) -> None:
    more = "--script run.sh --context 8192 --tp 4 --top 1 --memory-budget-gib 60 50"
    assert {choice["pp"] for choice in cli.facts(f"{TUNE} {more}")["choices"]} == {2}
    parsed = launched()
    assert not parsed.epp or parsed.epp_memory_budget_gib == [60, 50]


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
NAMED = f"{TUNE} --model named --script run.sh --devices-per-node 4 --tp 2 --pp 2 --cp 1 --top 1"


def config(**described: object) -> None:
    """A config.json in the folder ``named``."""
    Path("named").mkdir()
    Path("named/config.json").write_text(json.dumps(described))


def test_the_script_launches_the_model_that_a_config_describes(cli: Commands) -> None:
    config(**QWEN3)
    assert "named (qwen3) on 1 nodes of 4" in cli.joined(NAMED)
    parsed = launched()
    assert parsed.num_layers == 8 and parsed.kv_channels == 128 and parsed.num_query_groups == 4
    assert parsed.rotary_base == 1000000 and parsed.layernorm_epsilon == 1e-6
    assert parsed.qk_layernorm and parsed.swiglu and parsed.untie_embeddings_and_output_weights
    assert parsed.padded_vocab_size == 9728  # over two ranks, as Megatron pads
    assumed = Path("run.sh").read_text().partition("so assumed: ")[2].partition(".\n")[0]
    assert {"head_dim 128", "tie_word_embeddings False"} <= set(assumed.split(", "))


def test_a_script_for_cpus_trains_in_float32(cli: Commands) -> None:
    """A CPU takes twenty times as long in bf16."""
    config(**CONFIG, model_type="llama")
    cli.said(f"{NAMED} --device cpu --devices-per-node 2 --tp 1 --context 8192")
    assert not launched().bf16


def test_the_script_of_a_hybrid_model_says_its_stages_in_its_pattern(cli: Commands) -> None:
    config(**NEMOTRON_H)
    cli.said(f"{NAMED} --placement even")
    parsed = launched("megatron_epp.pretrain_hybrid")
    pattern = parsed.hybrid_layer_pattern
    assert pattern.replace("|", "") == "M-*-M-M-" and pattern.count("|") == 1
    assert parsed.mamba_num_heads == 16 and parsed.squared_relu and not parsed.swiglu
    assert parsed.decoder_first_pipeline_num_layers is None
    assert "\ntouch" not in Path("run.sh").read_text()


def test_no_script_launches_another_model_than_was_named(cli: Commands) -> None:
    config(**CONFIG, model_type="olmo2")
    told = cli.refused(NAMED)
    assert "cannot say of named (olmo2): norms after attention and MLP; norms over all" in told
    assert not Path("run.sh").exists()
    told = cli.refused(f"{NAMED} --like olmo22")
    assert "--like 'olmo22' is not known; expected one of olmo2" in told


@pytest.mark.everything
def test_a_pipeline_with_layers_by_time_is_launched_with_megatrons_flags(cli: Commands) -> None:
    """So many micro-batches that one stage a rank is enough; even ones only if they are named."""
    Path("same").write_text("8000\n" * 256)
    line = (
        "tune --lengths same --context 8192 --global-batch-size 512 --batches 1 --effort 0 "
        "--model llama3-8b --device h100-80g --gpus 8 --tp 4 --pp 2 --vocab-parallel off --row 2 "
        "--script run.sh"
    )
    cli.said(line)
    parsed = launched()
    assert re.fullmatch(r"Et\*(17|18)\|t\*(15|14)L", parsed.pipeline_model_parallel_layout)
    assert parsed.sequence_parallel and parsed.use_distributed_optimizer
    cli.said(f"{line} --placement even")
    assert launched().pipeline_model_parallel_layout is None


def test_a_grid_with_a_hole_is_mapped_and_launched(cli: Commands) -> None:
    """Of four nodes one failed; two in a row are left, and this host is the second of them."""
    here = socket.gethostname()
    grid = {"name": "mine", "node_devices": 4, "between": "all-to-all", "nodes": [2, 2]}
    grid |= {"failed_nodes": ["a"], "hosts": ["a", "b", "c", here]}
    Path("mine.json").write_text(json.dumps(grid))
    job = f"{TUNE} --nodes 2 --devices-per-node 4 --topology mine.json --tp 4 --pp 2"
    told = cli.said(f"{job} --hostfile hosts --script run.sh")
    assert "mine, 2 x 2 nodes: tp 4 cp 1 pp 2 dp 1 on 2, 1 failed, 1 spare" in told
    assert f"hosts by node rank: 0 c, 1 {here}" in told and "0   x   .\n1 0.0 1.0\n" in told
    assert Path("hosts").read_text() == f"c\n{here}\n"
    done = ran()
    assert "--node-rank 1 " in done.stdout and "--master-addr c " in done.stdout, done.stderr
    nodes = cli.facts(job)["node_map"]
    assert nodes["nodes"] == [[1, 0], [1, 1]] and nodes["spares"] == [[0, 1]]
    script = Path("run.sh")
    script.write_text(script.read_text().replace(here, "elsewhere"))
    done = ran()
    assert done.returncode == 2 and f"{here} is not in the list of hosts" in done.stderr
    for wrong, said in (
        ("--nodes 4", "--nodes 4: 3 of the 2 x 2 nodes of --topology"),
        ("--cp 2 --pp 1 --nodes 3", "no tp x cp x pp x dp fills them"),
    ):
        assert said in cli.refused(f"{job} {wrong}")
    Path("mine.json").write_text(json.dumps(grid | {"failed_nodes": ["a", "d"]}))
    told = cli.refused(job)
    assert "topology file mine.json: failed_nodes[1] 'd': there is no such node" in told


SLURM = {"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node-[7-8]"}


@pytest.mark.parametrize(
    ("variables", "rank_and_address", "said"),
    [
        ({}, None, "no NODE_RANK"),
        ({"NODE_RANK": "1"}, None, "no MASTER_ADDR"),
        ({"MASTER_ADDR": "a"}, None, "no NODE_RANK"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "a"}, ("1", "a"), ""),
        ({"NODE_RANK": "2", "MASTER_ADDR": "a"}, None, "NODE_RANK=2"),
        ({"NODE_RANK": "first", "MASTER_ADDR": "a"}, None, "NODE_RANK=first"),
        (SLURM, ("1", "node-7"), ""),
        (SLURM | {"SLURM_NODEID": "0"}, ("0", "node-7"), ""),
        (SLURM | {"SLURM_STEP_NODELIST": "node-8"}, ("1", "node-8"), ""),
        (SLURM | {"NODE_RANK": "0", "MASTER_ADDR": "a"}, ("0", "a"), ""),
        (SLURM | {"SLURM_NNODES": "4"}, None, "SLURM_NNODES=4, not 2"),
        ({key: SLURM[key] for key in ("SLURM_NNODES", "SLURM_JOB_NODELIST")}, None, "no NODE_RANK"),
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "2"}, None, "no MASTER_ADDR"),
        (SLURM | {"SLURM_JOB_NODELIST": "?"}, None, "no MASTER_ADDR"),
    ],
)
def test_each_of_several_nodes_has_a_rank_and_the_first_ones_address(
    two_nodes: Path, variables: dict[str, str], rank_and_address: tuple | None, said: str
) -> None:
    done = ran(two_nodes, variables)
    if rank_and_address is None:
        assert done.returncode == 2 and not done.stdout, done.stdout
        assert done.stderr.count("\n") == 1 and f": {said}; expected srun --nodes 2 " in done.stderr
        return
    assert done.returncode == 0, done.stderr
    rank, address = rank_and_address
    assert f"--nnodes 2 --node-rank {rank} --master-addr {address} " in done.stdout


def test_one_node_ignores_slurms_variables(two_nodes: Path) -> None:
    text = two_nodes.with_name("one.sh").read_text()
    assert "SLURM" not in text and "NODE_RANK" not in text
    done = ran(two_nodes.with_name("one.sh"), SLURM)
    assert done.returncode == 0 and "--nproc-per-node 8 --standalone -m" in done.stdout


def test_a_host_has_fewer_gpus_than_an_nvlink_domain(cli: Commands) -> None:
    """A rack of GB200 is one node of the model, and 16 hosts of torchrun and Slurm."""
    gb200 = f"{TUNE} --device gb200-186g --top 1 --script run.sh".replace(" --nodes 1", "")
    rack = f"{gb200} --gpus 64 --tp 4 --cp 8 --dp 2"
    sixteen = {**SLURM, "SLURM_NNODES": "16"}
    for row in "12":  # with --epp, and Megatron's own
        assert "on 1 nodes of 64 x gb200-186g in hosts of 4, " in cli.joined(f"{rack} --row {row}")
        done = ran(variables=sixteen)
        assert "--nproc-per-node 4 --nnodes 16 --node-rank 1 --master-addr node-7" in done.stdout
    assert "SLURM_NNODES=1, not 16" in ran(variables={**SLURM, "SLURM_NNODES": "1"}).stderr
    for line, launch in (
        ("--gpus 4 --tp 4", "--nproc-per-node 4 --standalone "),
        ("--gpus 2 --tp 2", "--nproc-per-node 2 --standalone "),
        ("--nodes 2 --devices-per-node 4 --tp 4 --pp 2", "--nproc-per-node 4 --nnodes 2 "),
        (
            "--device h100-80g --nodes 2 --devices-per-node 4 --tp 4",
            "--nproc-per-node 4 --nnodes 2 ",
        ),
    ):
        cli.said(f"{gb200} {line}")
        assert launch in ran(variables=SLURM).stdout, line
    assert "6 devices of a node: no whole number of hosts" in cli.refused(f"{gb200} --gpus 6")
    grid = {"name": "racks", "between": "all-to-all", "nodes": [1, 2], "hosts": ["a", "b"]}
    Path("racks.json").write_text(json.dumps(grid))
    told = cli.refused(f"{gb200} --nodes 2 --tp 4 --topology racks.json")
    assert "racks.json: names nodes, each of 16 hosts of 4 gb200-186g; leave --hostfile" in told


@pytest.mark.everything
def test_it_says_plainly_when_no_pipeline_or_no_epp_is_best(cli: Commands) -> None:
    Path("equal").write_text("2048\n" * 8)
    told = cli.said(f"{TUNE} --lengths equal --context 2048")
    assert "No pipeline is best here" in told
    assert "Verdict: leave --epp out, " in told or "Verdict: either; " in told


def test_the_script_says_how_experts_are_spread() -> None:
    choice = Choice(
        *(Layout(1, 2, 2, 4), (24, 24), "epp", False, 1.0, 1e5, 0.1, 0.0, 0.1, 0.0, 0.0, 2**30, 1),
        ep=8,
    )
    words = [word for group in layout_arguments(choice) for word in group]
    parsed = megatrons([*words, "--num-experts", "128"])
    assert parsed.expert_model_parallel_size == 8 and parsed.expert_tensor_parallel_size == 1
    assert parsed.moe_token_dispatcher_type == "alltoall"
    dense = dataclasses.replace(choice, ep=1)
    assert not any("expert" in word for group in layout_arguments(dense) for word in group)
    assert "ep" not in dense.facts()


def test_a_stock_row_says_its_interleaved_stages_by_megatrons_layout_flag() -> None:
    choice = Choice(
        *(Layout(1, 1, 2, 1), (2, 2, 2, 1), STOCK, False, 1.0, 1e5, 0.1, 0.0, 0.1, 0.0, 0.0, 2**30),
        *(1, 1, False, (0, 1, 0, 1)),
    )
    words = [word for group in layout_arguments(choice) for word in group]
    assert words[-2:] == ["--pipeline-model-parallel-layout", "Et*2|t*2|t*2|tL"]
    elastic = dataclasses.replace(choice, planner="epp")  # --epp-placement says the stages
    assert not any("layout" in word for group in layout_arguments(elastic) for word in group)
