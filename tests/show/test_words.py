"""Units, axes and tables."""

import math

import pytest

from megatron_epp.show.table import text_table
from megatron_epp.show.units import (
    bytes_text,
    fraction_text,
    seconds_text,
    ticks,
    time_ticks,
    tokens_text,
)


@pytest.mark.parametrize(
    ("text_of", "number", "text"),
    [
        (seconds_text, 0, "0 s"),
        (seconds_text, 1.2344, "1.234 s"),
        (seconds_text, 12.344, "12.34 s"),
        (seconds_text, 255.8, "255.8 s"),
        (seconds_text, 0.4942, "494 ms"),
        (seconds_text, 0.0123, "12.3 ms"),
        (seconds_text, 4.2e-5, "42.0 us"),
        (bytes_text, 10.5 * 2**30, "10.50 GiB"),
        (bytes_text, 3.25 * 2**20, "3.25 MiB"),
        (fraction_text, 0.1234, "12.3%"),
        (tokens_text, 12, "12"),
        (tokens_text, 9000, "9.0K"),
        (tokens_text, 1_550_000, "1.55M"),
    ],
)
def test_numbers_and_their_units(text_of, number, text):
    assert text_of(number) == text


@pytest.mark.parametrize("stop", [1e-7, 0.3, 1.0, 7.77, 12, 255.8, 1e6])
@pytest.mark.parametrize("most", [1, 3, 10])
def test_ticks_are_round_few_and_inside(stop, most):
    places = ticks(stop, most)
    assert places[0] == 0 and places[-1] <= stop * (1 + 1e-9)
    assert len(places) <= most + 1
    if len(places) > 1:
        step = places[1]
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
        assert any(mantissa == pytest.approx(n) for n in (1, 2, 5))


def test_time_ticks_name_their_unit_once():
    assert time_ticks(0.25, 5) == [
        (0.0, "0 ms"),
        *((n / 1000, f"{n}") for n in (50, 100, 150, 200, 250)),
    ]


def test_a_plain_table():
    assert text_table(["planner", "seconds"], [["epp", "1.5"], ["infinipipe", "12.25"]]) == (
        "planner     seconds\n----------  -------\nepp             1.5\ninfinipipe    12.25\n"
    )
    with pytest.raises(ValueError, match="a row of 1 cells; expected 2"):
        text_table(["a", "b"], [["1"]])
