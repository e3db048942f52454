"""Public measurements: which rows are compared or held out, and how far predictions are off."""

import dataclasses

import pytest

from megatron_epp.cost.catalogue.accuracy import accuracy
from tests.programs import ROOT, loaded

SCRIPT = ROOT / "scripts" / "bench" / "public.py"


@pytest.fixture(scope="module")
def script():
    return loaded(SCRIPT)


@pytest.fixture(scope="module")
def public(script):
    return script.public


@pytest.fixture(scope="module")
def comparable(public):
    return [row for row in public.measurements() if row.comparable]


def test_rows_say_what_was_measured_and_where_and_every_third_is_held_out(public) -> None:
    rows, tables = public.measurements(), {}
    assert len({row.key for row in rows}) == len(rows)
    for row in rows:
        tables.setdefault(row.table, []).append(row.held_out)
        assert row.source and row.measured, row.key
        assert {"device", "precision", "kernels", "hidden", "what"} <= row.facts.keys(), row.key
        if row.what == "step":
            assert row.model is not None and {"tp", "seq", "sequences", "micro"} <= row.facts.keys()
    for held in tables.values():
        assert held == ([False, True, False] * len(held))[: len(held)]
    with_gb = next(row for row in rows if "gb" in row.facts)
    assert with_gb.measured["gib"] == pytest.approx(with_gb.facts["gb"] * 1e9 / 2**30, abs=0.01)


@pytest.mark.parametrize(
    "field, value",
    [
        ("precision", "fp8"),
        ("kernels", 2023),
        ("hidden", "tensor"),
        ("hidden", "not stated"),
        ("device", "h100-96g"),
    ],
)
def test_what_is_comparable(comparable, field: str, value: object) -> None:
    row = comparable[0]
    assert not dataclasses.replace(row, facts={**row.facts, field: value}).comparable


def test_errors_are_of_time(public) -> None:
    assert public.error("seconds", 2.0, 3.0) == pytest.approx(0.5)
    assert public.error("tflops", 300.0, 200.0) == pytest.approx(0.5)  # a lower rate takes longer
    assert public.median_and_worst([0.1, -0.3, 0.2]) == (0.2, 0.3)


@pytest.mark.everything
def test_scores_and_page_are_those_of_the_model(script, public) -> None:
    scores, kept = script.all_scores(), public.scores()
    assert scores.keys() == kept.keys()
    for key, found in scores.items():
        assert found == pytest.approx(kept[key], rel=1e-4), f"{key}: run {SCRIPT.name} --write"
    assert script.page(kept) == script.PAGE.read_text(), f"run {SCRIPT.name} --write"
    text = script.SUMMARY.read_text()
    assert script.with_summary(text, kept) == text, f"run {SCRIPT.name} --write"
    with pytest.raises(ValueError, match="lacks the table that begins with"):
        script.with_summary("# Accuracy", kept)


def test_what_commands_print_is_of_these_scores(script, public) -> None:
    kept = script.accuracy(public.scores())
    assert accuracy() == {
        device: {name: list(errors) for name, errors in each.items()}
        for device, each in kept.items()
    }


def test_slices_cover_their_sequences_and_stages_have_peaks(public) -> None:
    rows = [row for row in public.measurements() if row.what == "slices"]
    for row in rows:
        cuts = row.facts["slices"]
        assert sum(cuts) == row.facts["seq"] and cuts == sorted(cuts, reverse=True), row.key
        peaks = [name for name in row.measured if name.startswith("gib")]
        assert peaks == [f"gib {stage}" for stage in range(len(peaks))] and len(peaks) in (0, 4)
        assert row.kind == "slices" and not row.comparable
    memory = public.errors_of(rows, public.scores(), memory=True)
    assert len(memory) == 36 and all(-0.27 <= each <= 0.02 for each in memory)
    assert len(public.errors_of(rows, public.scores())) == len(rows) == 10


def test_slices_gain_about_as_much_as_was_measured(script, public) -> None:
    ratios = script.slice_ratios(public.scores())
    assert [(len(row.facts["slices"]), round(measured, 3)) for row, measured, _ in ratios] == [
        (2, 1.217),
        (4, 1.337),
        (8, 1.363),
    ]
    for _, measured, predicted in ratios:
        assert 1 <= predicted / measured <= 1.1


def test_moments_are_left_out_before_the_first_update(script, public) -> None:
    row = next(row for row in public.measurements() if row.what == "slices")
    whole = dataclasses.replace(row, facts={**row.facts, "moments": "there"})
    cost = script.cost_of(row, row.model)
    less = [script.predicted(whole)[f"gib {s}"] - script.predicted(row)[f"gib {s}"] for s in (0, 1)]
    moments = [8 * each / 2 / 2**30 for each in cost.memory.parameters[0][:2]]  # over 2 replicas
    assert less == pytest.approx(moments)


def test_steps_are_within_the_bounds_in_the_median_held_out_or_not(public, comparable) -> None:
    """Dense steps within 10%, MoE within 16%, memory within 5%, in the median."""
    for rows in (comparable, [row for row in comparable if row.held_out]):
        assert sum(row.what == "step" for row in rows) >= 12
        for kind, bound in (("dense", 0.1), ("MoE", 0.16)):
            found = public.errors_of([row for row in rows if row.kind == kind], public.scores())
            assert len(found) > 10 and public.median_and_worst(found)[0] <= bound, kind
        memory = public.errors_of(rows, public.scores(), memory=True)
        assert public.median_and_worst(memory)[0] <= 0.05


def test_what_is_missed_has_its_reason(script, public) -> None:
    rows = {row.key for row, _, _ in script.missed(public.scores())}
    assert rows == set(script.REASONS)
    assert all(f"| {key} |" in script.PAGE.read_text() for key in rows)


def test_names_of_recomputed_modules(script) -> None:
    modes = {"": "k", "full": "f", "core_attn": "c", "layernorm, moe_act": "e",
             "moe, layernorm": "b"}  # fmt: skip
    assert {text: script.recompute_mode(text) for text in modes} == modes
    assert script.stage_layers(94, 32) == (2, *[3] * 30, 2)
    assert script.stage_layers(48, 24) == (2,) * 24
