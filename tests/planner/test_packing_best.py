"""The planner that searches its packing length, and stock in ``compare``."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.__main__ import main
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.overlap import EXPERTS, TENSOR, overlapped, overlaps
from megatron_epp.ir import Kind
from megatron_epp.planner import PLANNERS, Options
from megatron_epp.planner.published.schedules import packing_lengths

K = 1024
BEST = "packing-best"
COST = named_cost("gpt-7b", "a100-80g", pp=4, cp=8, zero=1)


def test_a_batch_shorter_than_two_contexts_is_not_one_micro_batch() -> None:
    """24K tokens: two micro-batches of the context idle on four stages."""
    lengths, options = [2 * K] * 12, Options(context=16 * K)
    packing, best = (PLANNERS[name](lengths, COST, options) for name in ("packing", BEST))
    assert packing.packing_tokens == 16 * K and packing.chunks == 2
    assert 2 * K <= best.packing_tokens < 8 * K and best.chunks >= 4
    assert packing.seconds / best.seconds > 1.2


@given(st.lists(st.integers(64, 20_000), min_size=1, max_size=24), st.integers(0, 40_000))
@settings(max_examples=40)
@pytest.mark.everything
def test_it_is_the_best_of_its_lengths_and_epp_is_no_slower(lengths, context) -> None:
    options = Options(context=context, effort=0)
    found = PLANNERS[BEST](lengths, COST, options)
    tokens = list(packing_lengths(max(lengths), context))
    assert tokens[0] >= max(lengths) and tokens[-1] == max(context, max(lengths))
    each = [PLANNERS["packing"](lengths, COST, Options(context=one)) for one in tokens]
    fitting = [one for one in each if one.fits]
    assert found.seconds == min(one.seconds for one in fitting or [found])
    assert found.packing_tokens in tokens
    if found.fits:
        assert PLANNERS["epp"](lengths, COST, options).seconds <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "layout", "hidden"),
    [
        ("llama3-8b", {"tp": 4}, TENSOR),
        ("qwen3-30b-a3b", {"ep": 8, "dp": 8}, EXPERTS),
        ("llama3-8b", {"cp": 4}, 0.0),
    ],
)
def test_overlaps_hide_their_fraction_of_an_exchange(model, layout, hidden) -> None:
    cost = named_cost(model, "h100-80g", pp=2, zero=1, **layout)
    exposed, rest = (
        each.seconds.communication_per(Kind.FORWARD) for each in (cost, overlapped(cost))
    )
    assert exposed.sum() > 0
    assert rest == pytest.approx(exposed * (1 - hidden))
    assert overlaps(cost) == (hidden > 0)


def test_compare_says_which_stock_is_and_gives_a_verdict(tmp_path, capsys) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, [4000, 2000, 1000, 500] * 4)))
    words = ["compare", "--lengths", str(path), "--model", "llama3-8b", "--device", "h100-80g"]
    words += ["--pp", "2", "--tp", "4", "--context", "16384", "--effort", "0"]
    words += ["--planner", "epp", "packing", BEST, "stock"]
    assert main([*words, "--json"]) == 0
    rows = {row["planner"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["packing"]["packing_tokens"] == 16384 > rows[BEST]["packing_tokens"] >= 4000
    stock = rows["stock"]["stock"]
    assert rows["stock"]["packing_tokens"] == stock["batches"][0]["tokens"]
    assert rows["stock"]["seconds"] == pytest.approx(stock["static"]["seconds"])
    assert rows["stock"]["seconds"] <= rows[BEST]["seconds"] < rows["packing"]["seconds"]
    assert "packing_tokens" not in rows["epp"] and "stock" not in rows["epp"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    ratio = rows["stock"]["seconds"] / rows["epp"]["seconds"]
    kind = (
        "use --epp, " if ratio > 1.01 else "either; " if ratio > 1 / 1.01 else "leave --epp out, "
    )
    assert said.startswith(f"Verdict: {kind}")
    named = f"{stock['placement']}, packed to {stock['batches'][0]['tokens']} tokens, no recompute"
    assert said.count(named.replace("even", "one stage a rank")) == 2
    assert main([*words[:-4], "epp", "packing"]) == 0
    assert "Verdict" not in capsys.readouterr().out  # without stock there is none
