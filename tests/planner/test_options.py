"""Levers by name, and planners by name."""

import pytest

from megatron_epp.planner.options import (
    ALL,
    ALWAYS_ON,
    GONE,
    LEVERS,
    TRAINING_LEVERS,
    Options,
    default_levers,
    parse_levers,
)
from megatron_epp.planner.registry import PLANNERS, planner_of


def test_levers_are_sets_names_and_exceptions() -> None:
    assert parse_levers("all") == ALL == set(LEVERS)
    assert parse_levers("default") == TRAINING_LEVERS
    assert parse_levers("none") == frozenset()
    assert parse_levers("wsplit,local") == {"wsplit", "local"}
    assert parse_levers("all,-wsplit") == ALL - {"wsplit"}
    assert parse_levers("-local") == TRAINING_LEVERS - {"local"}
    assert parse_levers("-local", default=ALL) == ALL - {"local"}
    assert "wsplit" in TRAINING_LEVERS
    assert "offload" in ALL - TRAINING_LEVERS
    assert default_levers("h100-80g", host_memory=True) - default_levers("h100-80g") == {"offload"}
    assert "offload" not in default_levers("h100-80g"), "nothing is known of the host's memory"
    assert "offload" not in default_levers("cpu: its processor", host_memory=True)


@pytest.mark.parametrize("text", ["default,{}", "all,-{}"])
def test_former_levers_are_refused_by_name(text: str) -> None:
    for name in ALWAYS_ON:
        with pytest.raises(ValueError, match=f"^lever {name}: always on now; leave it out$"):
            parse_levers(text.format(name))
    for name, instead in GONE.items():
        with pytest.raises(ValueError, match=f"^lever {name}: removed; {instead}$"):
            parse_levers(text.format(name))


def test_unknown_levers_are_named_with_the_nearest() -> None:
    known = f"Known: {', '.join(LEVERS)}, all, default, none"
    with pytest.raises(ValueError) as near:
        parse_levers("wsplitt")
    assert str(near.value) == f"unknown lever 'wsplitt'; did you mean wsplit? {known}"
    with pytest.raises(ValueError) as far:
        parse_levers("xyzzy")
    assert str(far.value) == f"unknown lever 'xyzzy'. {known}"
    with pytest.raises(ValueError, match="no lever named"):
        parse_levers(" ")
    with pytest.raises(ValueError, match="unknown lever 'speed'"):
        Options(levers=frozenset({"speed"}))


@pytest.mark.parametrize(
    "bad", [{"context": -1}, {"effort": -1}, {"lockstep": 0}], ids=lambda bad: next(iter(bad))
)
def test_bad_options_are_refused(bad) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        Options(**bad)


def test_planners_are_found_by_name() -> None:
    assert planner_of("epp") is not planner_of("packing")
    with pytest.raises(ValueError, match=r"unknown planner 'infinipip'; did you mean infinipipe"):
        planner_of("infinipip")
    with pytest.raises(ValueError) as far:
        planner_of("xyzzy")
    assert str(far.value) == f"unknown planner 'xyzzy'. Known: {', '.join(PLANNERS)}"
    with pytest.raises(ValueError, match="makes no pipeline plan"):
        planner_of("flexsp")
