"""What ``tune`` shows of a model, of what fits and of a survey: golden texts, refusals, page."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_epp.cli.tune.report import survey_verdict, tuning_lines
from megatron_epp.planner.registry import STOCK
from megatron_epp.planner.stock import Packed, Stock
from megatron_epp.planner.tuning.layouts import Layout
from megatron_epp.planner.tuning.survey import Choice, Survey
from megatron_epp.show.units import GIB
from tests.cli.commands import Commands

LLAMA = "tune --model llama3-8b --device h100-80g"
MIXTURE = {
    "model_type": "qwen3_moe",
    "auto_map": {"AutoConfig": "evil.Config"},
    "num_nextn_predict_layers": 1,
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 9600,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "mlp_only_layers": [0],
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
}
DESCRIBED = """\
small (qwen3_moe): 0.03424 billion parameters, 0.01772 active for a token
sizes       4 layers, hidden 512, 8 heads in 4 groups of 64, MLP 1536, gated, vocabulary 9600, not
            tied
layers      1 dense (plain); 3 experts (experts 16, active experts 2, expert hidden 256)
note        auto_map: the code that it names is not used
note        num_nextn_predict_layers: multi-token prediction, not counted
assumed     not said, so taken: use_sliding_window False, decoder_sparse_step 1, tie_word_embeddings
            False, hidden_act silu, attention_bias False, norm_topk_prob False, router_aux_loss_coef
            0.001
states      18 bytes a parameter, 0.6 GiB in all: 6 on every device that holds the weight, 12 shared
            over cp x dp
not planned smaller states of adapters (LoRA), an optimizer on the host, fp8 weights, ZeRO 3 and
            FSDP
trains      with --epp as -m megatron_epp.pretrain_gpt; proof on CPUs: python -m megatron_epp
            certify --pp 2 --model small
flags
"""


@pytest.fixture
def small(folder: Path) -> Path:
    """A config.json in a folder called small."""
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps(MIXTURE))
    return Path("small/config.json")


def test_a_model_alone_is_described(small: Path, cli: Commands) -> None:
    shown = cli.said("tune --model small")
    described, flags = shown.split("flags\n")
    assert described + "flags\n" == DESCRIBED
    facts = cli.facts("tune --model small")
    assert shlex.split(flags.replace("\\\n", " ")) == facts["flags"]  # as a shell reads them
    assert "--moe-router-topk" in facts["flags"] and facts["unsaid"] == []
    attention, ends = 512 * (8 + 4 + 4 + 8) * 64 + 512, 2 * 9600 * 512
    mlp, expert = 3 * 512 * 1536 + 512, 3 * 512 * 256
    moe = 512 * 16 + 512
    every = 4 * attention + ends + mlp + 3 * (moe + 16 * expert)
    assert facts["parameters"] == pytest.approx(every, rel=1e-4)
    assert facts["active_parameters"] == facts["parameters"] - 3 * 14 * expert
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_what_flags_cannot_say_and_hostile_text_are_said_on_one_line(
    small: Path, cli: Commands
) -> None:
    config = {**MIXTURE, "model_type": "gemma2", "num_experts": None, "hidden_act": "a\x1b[2Jb"}
    small.write_text(json.dumps(config))
    shown, told = cli.ran("tune --model small", 2)
    assert "not by Megatron's flags alone, which cannot say: norms after" in " ".join(shown.split())
    assert all(line.isprintable() for line in (shown + told).splitlines())


def test_no_flags_of_another_model_are_printed(small: Path, cli: Commands) -> None:
    """A scaling of RoPE without a flag: the flags are those of a model without it."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    small.write_text(json.dumps({**MIXTURE, "rope_scaling": dynamic}))
    described, told = cli.ran("tune --model small", 2)
    assert "RoPE of type dynamic, factor 2.0" in described and "--num-layers" not in described
    assert "no flags are printed, because Megatron's cannot say: RoPE of type dynamic" in told
    facts, _ = cli.ran("tune --model small --json", 2)
    assert json.loads(facts)["flags"] == []
    assert "--num-layers 4" in cli.said("tune --model small --like qwen3_moe")


def test_the_table_of_how_many_needs_no_lengths(cli: Commands) -> None:
    shown = cli.said(f"{LLAMA} --gpus 1,2,8 --context 500000")
    assert "states fit from 2 devices on; a document of 500000 tokens from 8 on" in shown
    rows = cli.facts(f"{LLAMA} --gpus 1,2,8")["rows"]
    assert [row["gpus"] for row in rows] == [1, 2, 8] and rows[0]["layout"] is None
    tokens = [row["longest_document"] for row in rows]
    assert tokens[0] == 0 < tokens[1] < tokens[2]


def test_the_json_that_is_printed_for_an_unknown_device_is_one(cli: Commands) -> None:
    told = cli.refused(f"{LLAMA} --gpus 8 --device x")
    found = re.search(r"or a JSON file (\{.*\})", told)
    assert found is not None
    Path("mine.json").write_text(found[1])
    assert "mine, budget 74 GiB" in cli.said(f"{LLAMA} --gpus 8 --device mine.json")


FIRST = Choice(
    *(Layout(2, 1, 4, 2), (8, 8, 9, 7), "epp", False, 2.5, 81920.0, 0.1, 0.02, 0.05, 0.01, 0.0),
    *(round(73.5 * GIB), 2),
)


class _Device:
    """As much of a cost as a choice is asked of."""

    device_budget_bytes = (74 * GIB,)


def test_a_survey_as_text() -> None:
    cost = _Device()
    first = dataclasses.replace(FIRST, cost=cost)
    second = dataclasses.replace(
        first, layout=Layout(4, 1, 4, 1, 8), seconds=3.0, bubble_ratio=0.2, ep=8,
        peak_bytes=50 * GIB, tokens_per_second=68266.7, exchange_seconds=0.0,
    )  # fmt: skip
    stock = dataclasses.replace(
        first, layout=Layout(8, 1, 2, 1), layers=(8, 8, 8, 8), planner=STOCK, seconds=3.012,
        peak_bytes=60 * GIB, place=(0, 1, 0, 1), stock=Stock(
            "interleaved 2", "80% of tensor-parallel exchanges hidden", cost,
            (Packed(3.0, 8192, 0), Packed(3.024, 8192, 2)), Packed(3.1, 8192, 2),
        ),
    )  # fmt: skip
    rows = (first, second, stock)
    parts = {0: [{"weights": 1.0 * GIB, "K/V": 0.25 * GIB}, {"weights": 2.0 * GIB, "K/V": 0.0}]}
    text = tuning_lines(Survey(rows, {}, ()), "many", "theirs", rows, (0.42, None, 0.3), parts)
    assert text == (Path(__file__).parent / "survey.txt").read_text()
    stopped = tuning_lines(Survey(rows, {}, (), True), "many", "theirs", rows, (None,) * 3, {})
    assert stopped.startswith("Interrupted: this is what was found until then")
    assert "MFU" not in stopped and "stock " in stopped and "offload" not in text + stopped


STOCK_ROW = dataclasses.replace(
    FIRST, cost=_Device(), planner=STOCK, layers=(8,) * 4, layout=Layout(8, 1, 2, 1),
    place=(0, 1, 0, 1), stock=Stock(
        "interleaved 2", "", _Device(), (Packed(2.5, 8192, 0),), Packed(2.5, 8192, 0)
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("seconds_and_gib", "default"),
    [
        (((1.0, 62.8), (1.01, 50)), 1),  # 62.9 of 74 GiB are 85%
        (((1.0, 63.0), (1.01, 62.8)), 2),
        (((1.0, 73.7), (1.008, 63.0), (1.049, 59.8)), 3),
        (((1.0, 73.7), (1.051, 59.8)), 1),
        (((1.0, 73.7), (1.01, 73.7)), 1),
    ],
)
@pytest.mark.parametrize("stock", [1, 2, 3], ids="stock is row {}".format)
def test_the_default_leaves_room_if_that_costs_little(
    seconds_and_gib: tuple, default: int, stock: int
) -> None:
    epp = dataclasses.replace(FIRST, cost=_Device())
    rows = tuple(
        dataclasses.replace(
            STOCK_ROW if row == stock else epp, seconds=seconds, peak_bytes=round(gib * GIB)
        )
        for row, (seconds, gib) in enumerate(seconds_and_gib, 1)
    )
    result = Survey(rows, {}, ())
    assert result.default + 1 == default
    verdict, best, *more = survey_verdict(result)
    runs = "stock, interleaved 2" if default == stock else "--epp"
    assert re.match(rf"Best: (row {default}, )?tp [^:]*, {runs}: ", best)
    assert (f"; the default is row {default}." in verdict) == (default > 1)
    tight = [line for line in more if "tight" in line]
    if default > 1:
        slower = f"{rows[default - 1].seconds - 1:.1%}"
        gib = seconds_and_gib[0][1]
        assert tight == [
            f"Row 1 is {slower} faster, but tight: {gib:.1f} of 74.0 GiB. --row 1 takes it."
        ]
        epp_row = 2 if stock == 1 else 1
        both = f"row {epp_row} and row {stock}" if stock <= len(rows) else "row 1"
        assert f" It is about {both}, the fastest; the default " in verdict
    elif rows[0].tight:
        costs = "Row 1 is tight: within 15% of the memory budget."
        assert [line.startswith(costs) for line in tight] == [True]
        assert ("Fastest that is not tight: row 2, 5.1% slower" in tight[0]) != rows[1].tight
    else:
        assert not tight
