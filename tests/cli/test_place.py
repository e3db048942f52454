"""The command line with a plan that places several stages on a rank."""

import json
import re
from pathlib import Path

import pytest

from megatron_epp.cost.build import named_cost
from megatron_epp.ir import Plan
from megatron_epp.show.units import GIB
from tests.cli.commands import GPT, Commands
from tests.cost.simple_device import OLD_H100
from tests.plans import INTERLEAVED, V_SHAPE


@pytest.fixture(params=[INTERLEAVED, V_SHAPE], ids=["interleaved", "v"])
def plan(request: pytest.FixtureRequest, folder: Path) -> Plan:
    text = request.param.replace("layers 1 1 1 1", "layers 8 8 8 8")
    Path("a.plan").write_text(re.sub(r"1([kf])\b", r"8\1", text))
    return Plan.parse(Path("a.plan").read_text())


def states_bytes(plan: Plan) -> float:
    """Of one stage."""
    cost = named_cost("gpt-7b", "a100-80g", pp=4, cp=8, zero=3, layers=plan.layers)
    return max(cost.memory.states_bytes)


def test_check(cli: Commands, plan: Plan) -> None:
    assert cli.said("check a.plan").startswith(
        "ok: 2 documents, 15 tokens in 2 chunks on 4 stages on 2 ranks, 16 ops; digest "
    )
    budget = 1.2 * states_bytes(plan) / GIB  # enough for each stage, not for two of them
    error = cli.refused(f"check a.plan {GPT} --multiple 1 --memory-budget-gib {budget:.3f}")
    assert re.search(r"error: rank 0 at F[23]\.1: holds .* GiB, the budget is .* GiB", error), error


def test_simulate(cli: Commands, plan: Plan) -> None:
    facts = cli.facts(f"simulate a.plan {GPT}")
    for name in ("peak_bytes", "budget_bytes", "states_bytes", "idle_seconds"):
        assert len(facts[name]) == 2
    assert {bubble.get("rank") for bubble in facts["bubbles"]} <= {0, 1}
    assert min(facts["states_bytes"]) > states_bytes(plan)
    busy = [facts["seconds"] - idle for idle in facts["idle_seconds"]]
    assert 0.6 * max(busy) <= facts["lower_bound_seconds"] <= facts["seconds"]
    table = cli.said(f"simulate a.plan {GPT}")
    assert "of ranks x time" in table
    assert [line.split()[0] for line in table.split("\n") if " + " in line] == ["0", "1"]


def test_draw(cli: Commands, plan: Plan) -> None:
    text = cli.said("draw a.plan --width 120")
    assert "4 stages on 2 ranks, 2 chunks" in text
    rows = [line for line in text.split("\n") if line.startswith("rank ")]
    assert len(rows) == 2 and "F0.0" in rows[0] and "B1.1" in rows[1]
    for ending in ("svg", "png", "html", "json"):
        cli.said(f"draw a.plan -o x.{ending}")
    svg = Path("x.svg").read_text()
    assert "rank 1" in svg and ">F1.0<" in svg and "stage 1</text>" not in svg
    events = json.loads(Path("x.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]
    assert '"ranks":["rank 0","rank 1"]' in Path("x.html").read_text()


def test_a_budget_is_one_number_or_one_for_every_pipeline_rank(cli: Commands) -> None:
    """Of two ranks with two stages each: of each device, not of each stage."""
    job = f"--lengths spread {GPT} --pp 2 --placement v --effort 0 --memory-budget-gib 60 70"
    said = cli.said(f"plan {job} -o v.plan")
    assert "of 60.00 70.00" in said and "\nstages      on ranks 1 0 0 1\n" in said
    assert Plan.parse(Path("v.plan").read_text()).place == (1, 0, 0, 1)
    # Its comment says so to simulate; one number for every stage means the same where it is one.
    for given in ("", "--memory-budget-gib 60 70", "--memory-budget-gib 70 60 60 70"):
        assert cli.facts(f"simulate v.plan {given}")["budget_bytes"] == [60 * GIB, 70 * GIB]
    for gib in ("70 60 60 71", "1 2 3"):
        assert cli.refused(f"simulate v.plan --memory-budget-gib {gib}").endswith(
            f"--memory-budget-gib: {len(gib.split())} numbers for 2 pipeline ranks; expected one, "
            "or one for each of them\n"
        )
    assert "fits the memory budget" in cli.said(f"compare {job} --planner epp packing")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "stages: interleaved 4, layers 4 4 4 4 4 4 4 4;"),
        ("--placement auto", "stages: interleaved 4, layers 4 4 4 4 4 4 4 4;"),
        ("--placement even", "stages: one stage a rank, layers 16 16"),
        ("--layers 17 15", "stages: one stage a rank, layers 17 15"),
        ("--planner infinipipe", "stages: one stage a rank, layers "),
        ("--planner zb-v", "stages: v, "),
        ("--planner flexsp", None),
        ("--pp 1 --tp 8 --cp 1", None),
    ],
)
def test_the_placement_is_chosen_unless_something_else_says_it(
    cli: Commands, words: str, told: str | None
) -> None:
    """As a default it ends no command; what names stages or layers is heard."""
    err = cli.ran(f"plan --lengths pair --pp 2 --effort 0 {GPT} --json {words}").err
    assert ("stages: " not in err) if told is None else (told in err)
    assert "inf%" not in err


def test_a_placement_that_cannot_be_is_refused_before_data_is_read(cli: Commands) -> None:
    told = cli.refused(f"plan --lengths missing --pp 2 {GPT} --placement interleaved 20")
    assert "--placement interleaved 20: 40 stages for 32 layers; expected at most one" in told
    told = cli.refused(f"compare --lengths missing --pp 2 {GPT} --placement auto --layers 16 16")
    assert "--placement auto chooses the layers of the stages; expected one of the two" in told


def test_tune_writes_the_placement_it_has_chosen(cli: Commands) -> None:
    """Four documents for eight ranks: several stages on each, unless one is named."""
    Path("same").write_text("8000\n" * 4)
    line = (
        f"tune --lengths same --model llama3-8b --device {OLD_H100} --nodes 8 --tp 8 --pp 8 --dp 1 "
        "--levers none --effort 0 --script run.sh"
    )
    cli.said(f"{line} --placement even")
    assert "--epp-placement even\n" in Path("run.sh").read_text()
    told = cli.said(line)
    text = Path("run.sh").read_text()
    assert "--epp-placement interleaved 4" in told and "--epp-cost-model" not in text
    found = re.search(r"--epp-placement 'place ([\d ]+) layers ([\d ]+)'", text)
    assert found is not None and found[1] == " ".join(map(str, [*range(8)] * 4))
    assert sum(map(int, found[2].split())) == 32


def test_the_choice_reads_a_config_json_as_like_says(cli: Commands) -> None:
    """A model type that is not known: vocabulary parallelism is chosen by its vocabulary, too."""
    config = {"model_type": "strange", "hidden_size": 1024, "num_hidden_layers": 4}
    config |= {"intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    config |= {"vocab_size": 32_000, "hidden_act": "silu", "tie_word_embeddings": False}
    Path("config.json").write_text(json.dumps(config))
    Path("same").write_text("2000\n" * 4)
    job = "plan --lengths same --model config.json --device h100-80g --pp 2 --effort 0 -o own.plan"
    assert "stages: " in cli.ran(f"{job} --like llama").err
    assert "--like" in cli.refused(job)
