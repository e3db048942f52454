"""Fits find what was put in, from clean rows and from noisy ones, and say how well."""

import dataclasses

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.columns import CONTEXT
from megatron_epp.cost.fitting.fit import Sample, fit_profile
from megatron_epp.cost.fitting.regression import fit, nnls
from megatron_epp.cost.profile import MEASURED, Bytes, Profile, Provenance, Seconds
from megatron_epp.ir import BACKWARDS, OF_LAYERS, Kind

TRUTH = profile(MODELS["llama3-8b"], DEVICES["h100-80g"])
TEMPLATE = profile(MODELS["gpt-7b"], DEVICES["cpu"])
WHERE = Provenance("llama3-8b", "h100-80g", "bf16", "2026-11-21", "measured: a test", MEASURED)


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 8))
def test_nnls_is_scipys(seed: int, rows: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(rows, columns)), random.normal(size=rows)
    ours, (theirs, norm) = nnls(matrix, target), scipy.optimize.nnls(matrix, target)
    assert (ours >= 0).all()
    assert np.linalg.norm(matrix @ ours - target) == pytest.approx(norm, abs=1e-9)
    if rows >= columns:  # or the solution is not unique
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_fit_is_judged_on_rows_it_has_not_seen() -> None:
    random = np.random.default_rng(0)
    features = random.uniform(1, 100, (40, 3))
    clean = features @ (2.0, 0.0, 0.5)
    result = fit(features, clean)
    assert result.coefficients == pytest.approx((2.0, 0.0, 0.5), abs=1e-9)
    assert result.quality.tested == 10
    assert result.quality.worst < 1e-9
    # A model that is wrong is found out.
    wrong = fit(features[:, :1], clean)
    assert wrong.quality.median > 0.05
    assert str(wrong.quality).endswith("on 10 held-out of 40 rows")
    # Four rows, three columns: none to spare.
    assert fit(features[:4], clean[:4]).quality.tested == 0


def test_a_measurement_that_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match=r"^seconds of F: measurement 3 of 4 is -2, its"):
        fit([[1.0]] * 4, [1.0, 1.0, -2.0, 1.0], what="seconds of F")


def test_bytes_below_zero_are_not_used(caplog) -> None:
    """What an allocator counts when earlier tensors go during a forward."""
    good = [Sample("k", False, False, tokens, 0, 0, 700.0 * tokens) for tokens in (128, 256, 512)]
    wrong = [Sample("f", False, False, tokens, 0, 0, -64.0 * tokens) for tokens in (128, 256)]
    fitted = fit_profile(TEMPLATE, WHERE, seconds={}, held_bytes=[*good, *wrong]).profile
    assert fitted.saved_bytes["k"].per_token == pytest.approx(700)
    assert fitted.saved_bytes["f"] == TEMPLATE.saved_bytes["f"]
    assert "held bytes: 2 of 5 measurements are at most 0" in caplog.text
    nothing = fit_profile(TEMPLATE, WHERE, seconds={}, held_bytes=wrong).profile
    assert nothing.saved_bytes == TEMPLATE.saved_bytes


def test_no_sort_of_rows_is_held_out_whole() -> None:
    """Every fourth row of a regular grid is one sort, of which a fit without it knows nothing."""
    sorts = np.tile(np.eye(4), (2, 1)) * np.repeat([128.0, 256.0], 4)[:, None]
    result = fit(sorts, sorts @ (1.0, 2.0, 3.0, 4.0))
    assert result.quality.tested == 1
    assert result.quality.worst < 1e-9
    # A sort of one row judges nobody, and is missed by nobody.
    lonely = fit(sorts[[0, 1, 2, 3, 4, 5, 6]], [1.0, 2.0, 3.0, 4.0, 2.0, 4.0, 6.0])
    assert lonely.quality.tested == 1
    assert lonely.quality.worst < 1e-9
    assert fit([[0.0]] * 8, [1.0] * 8).quality.median == 1.0


def test_a_fit_survives_outliers() -> None:
    random = np.random.default_rng(1)
    features = np.column_stack([random.uniform(100, 10_000, 60), np.ones(60)])
    seconds = features @ (1e-5, 2e-3) * random.normal(1, 0.01, 60)
    seconds[::12] *= 4  # a busy machine
    assert fit(features, seconds).coefficients == pytest.approx((1e-5, 2e-3), rel=0.03)


@pytest.mark.parametrize(
    ("features", "values"), [([[1.0]], [0.0]), ([[np.nan]], [1.0]), ([[1.0]], []), ([], [])]
)
def test_rows_that_cannot_be_fitted(features: list, values: list) -> None:
    with pytest.raises(ValueError, match=r"seconds: measurement 1 of 1|\d measurements of \d rows"):
        fit(features, values)


def samples(random: np.random.Generator, count: int, letters: str = "k") -> list[Sample]:
    """Stages and chunks of many shapes, without values."""
    made = []
    for _ in range(count):
        layers = int(random.integers(1, 9))
        tokens = int(random.integers(16, 16_384))
        cut = int(random.integers(0, tokens + 1)) if random.random() < 0.5 else 0
        pairs = int(tokens * random.uniform(0.5, 4.0) * tokens)
        choice = "".join(random.choice(list(letters), layers))
        first, last = random.random(2) < 0.3
        made.append(Sample(choice, bool(first), bool(last), tokens, pairs, cut, 0.0))
    return made


def seconds_of(made: Profile, kind: Kind, sample: Sample) -> float:
    load = (sample.tokens, sample.pairs)
    value = sample.layers * made.layer_seconds[kind](*load)
    value += sample.first * made.first_seconds[kind](*load)
    value += sample.last * made.last_seconds[kind](*load)
    if kind in BACKWARDS:
        value += sum(made.recompute_seconds[letter](*load) for letter in sample.choice)
    return value


def held_of(made: Profile, sample: Sample) -> float:
    load = (sample.tokens, sample.cut_tokens)
    value = sum(made.saved_bytes[letter](*load) for letter in sample.choice)
    return value + sample.first * made.first_bytes(*load) + sample.last * made.last_bytes(*load)


def valued(rows: list[Sample], values: list[float]) -> list[Sample]:
    pairs = zip(rows, values, strict=True)
    return [dataclasses.replace(row, value=value) for row, value in pairs]


def measured(noise: float) -> dict:
    random = np.random.default_rng(5)
    truth = dataclasses.replace(
        TRUTH,
        first_seconds={kind: Seconds(3e-7, 0, 1e-4) for kind in OF_LAYERS},
        first_bytes=Bytes(4000.0, 4000.0),
    )

    def with_noise(rows: list[Sample], value) -> list[Sample]:
        return valued(rows, [value(row) * random.normal(1, noise) for row in rows])

    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return {
        "truth": truth,
        "seconds": {
            kind: with_noise(
                samples(random, 240, "kfm"), lambda row, kind=kind: seconds_of(truth, kind, row)
            )
            for kind in kinds
        },
        "held_bytes": with_noise(samples(random, 240, "kfm"), lambda row: held_of(truth, row)),
        "link_seconds": [
            (t, (2e-6 * t + 3e-4) * random.normal(1, noise)) for t in range(9, 999, 9)
        ],
    }


def test_a_profile_is_found_again() -> None:
    """Everything measured is found; what was not stays the template's."""
    rows = measured(noise=0.0)
    truth = rows.pop("truth")
    fitted = fit_profile(TEMPLATE, WHERE, tp=2, cp=1, **rows)
    found = fitted.profile
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for row in rows["seconds"][kind]:
            assert seconds_of(found, kind, row) == pytest.approx(row.value, rel=1e-3)
    for row in rows["held_bytes"]:
        assert held_of(found, row) == pytest.approx(row.value, rel=1e-3)
    near = pytest.approx
    assert found.saved_bytes["f"].per_token == near(truth.saved_bytes["f"].per_token, rel=1e-2)
    assert found.recompute_seconds["f"].per_pair == near(
        truth.recompute_seconds["f"].per_pair, rel=1e-2
    )
    assert found.first_bytes.per_token == near(4000, rel=1e-2)
    assert found.link_seconds_per_token == near(2e-6)
    assert found.link_latency_seconds == near(3e-4)
    assert found.saved_bytes["c"] == TEMPLATE.saved_bytes["c"]
    assert found.kv_bytes_per_token == TEMPLATE.kv_bytes_per_token
    # I and W were not measured: they share B as the template's do.
    shares = [
        of.layer_seconds[Kind.WEIGHT].per_token / of.layer_seconds[Kind.BACKWARD].per_token
        for of in (found, TEMPLATE)
    ]
    assert shares[0] == near(shares[1]) and 0.5 < shares[1] < 0.55
    assert found.layer_seconds[Kind.WEIGHT].per_pair == 0
    # Communication is inside what was measured.
    assert (found.tp, found.tensor_bytes_per_token) == (2, 0.0)
    assert found.provenance == WHERE
    assert Profile.from_json(found.to_json()) == found


def test_a_whole_backward_follows_its_halves_where_only_they_were_measured() -> None:
    """Else a machine that is slower than its profile would seem to gain by not splitting."""
    random = np.random.default_rng(7)
    halves = {Kind.INPUT: 1.5, Kind.WEIGHT: 1.5}
    seconds = {
        kind: [
            dataclasses.replace(row, value=slower * seconds_of(TEMPLATE, kind, row))
            for row in samples(random, 240, "k")
        ]
        for kind, slower in halves.items()
    }
    found = fit_profile(TEMPLATE, WHERE, seconds=seconds).profile
    for grid, before in (
        (found.layer_seconds, TEMPLATE.layer_seconds),
        (found.last_seconds, TEMPLATE.last_seconds),
    ):
        for load in ((1_000, 0), (9_000, 4_000_000)):
            assert grid[Kind.BACKWARD](*load) == pytest.approx(
                1.5 * before[Kind.BACKWARD](*load), rel=1e-3
            )


def test_what_slices_pay_for_their_context_is_not_taken_for_their_pairs() -> None:
    """Else whole documents seem slower than they are, and short slices cheaper: with a price of 7
    us a token of context, by a tenth and more."""
    model = MODELS["gpt-7b"]
    truth = profile(model, DEVICES["cpu"], kv_read=True)
    slices = [(512, 8192), (512, 2048), (1024, 4096), (1024, 1024), (256, 4096), (256, 1024)]
    rows = [
        Sample(
            *("k", False, 0, tokens, tokens * context + tokens * tokens // 2, 0, 0.0),
            columns=((CONTEXT, context),),
        )
        for tokens, context in [*slices, (256, 0), (512, 0), (1024, 0), (2048, 0)] * 4
    ]

    def value(row: Sample) -> float:
        price = 7e-4 * row.number(
            CONTEXT
        )  # against the model's sizes what 7 us are to 256 channels
        return seconds_of(truth, Kind.BACKWARD, row) + price

    found = {
        known: fit_profile(
            profile(model, DEVICES["cpu"], kv_read=known),
            WHERE,
            seconds={Kind.BACKWARD: valued(rows, [value(row) for row in rows])},
        ).profile
        for known in (True, False)
    }
    assert found[True].column_seconds.get(CONTEXT, {})[Kind.BACKWARD] == pytest.approx(
        7e-4, rel=1e-2
    )
    assert found[True].column_seconds.get(CONTEXT, {})[Kind.WEIGHT] == 0
    whole = Sample("k", False, 0, 16_384, 16_384 * 8_192, 0, 0.0)
    right = value(whole)
    assert seconds_of(found[True], Kind.BACKWARD, whole) == pytest.approx(right, rel=1e-2)
    assert seconds_of(found[False], Kind.BACKWARD, whole) > 1.05 * right


def test_noise_is_seen_in_the_quality() -> None:
    rows = measured(noise=0.05)
    rows.pop("truth")
    fitted = fit_profile(TEMPLATE, WHERE, **rows)
    for what in ("seconds of F", "seconds of B", "held bytes"):
        quality = fitted.quality[what]
        assert quality.tested == 60
        assert 0.02 < quality.median < 0.05  # of |normal(0, 5%)| the median is 3.4%
    assert "seconds of F: error median" in str(fitted)


def test_bad_samples() -> None:
    with pytest.raises(ValueError, match="recompute choice 'kz': expected of k f c m n a b"):
        Sample("kz", True, False, 5, 5, 0, 1.0)
    with pytest.raises(ValueError, match="5 tokens, 6 of a cut document"):
        Sample("k", True, False, 5, 5, 6, 1.0)


def test_no_token_is_free() -> None:
    """Where noise leaves all the time of tiny layers in the constant, planners can still divide."""
    rows = [Sample("k", False, False, tokens, tokens, 0, 1e-3) for tokens in (16, 64, 256)]
    fitted = fit_profile(TEMPLATE, WHERE, seconds={Kind.FORWARD: rows}).profile
    figures = fitted.layer_seconds[Kind.FORWARD]
    assert 0 < figures.per_token * 256 < 0.01 * figures.per_chunk
    assert Profile.from_json(fitted.to_json()) == fitted
