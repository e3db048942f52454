"""The three kinds of the verdict of ``compare`` and ``tune``."""

import pytest

from megatron_epp.cli.verdict import verdict, why_stock


@pytest.mark.parametrize(
    ("epp", "stock", "said"),
    [
        (1.0, 1.142, "use --epp, 14.2% faster than stock (S)."),
        (1.0, 1.0101, "use --epp, 1.0% faster than stock (S)."),
        (1.0, 1.0099, "either; --epp and stock (S) are within 1% of each other."),
        (1.0099, 1.0, "either; --epp and stock (S) are within 1% of each other."),
        (1.03, 1.0, "leave --epp out, 3.0% slower than stock (S): W."),
        (None, 1.0, "leave --epp out; stock (S) fits the memory budget, no plan does."),
        (1.0, None, "use --epp; none of Megatron's own schedules fits the memory budget."),
        (None, None, "neither --epp nor a schedule of Megatron's own fits the memory budget."),
    ],
)
def test_the_verdict(epp: float | None, stock: float | None, said: str) -> None:
    assert verdict(epp, stock, "S", "W") == f"Verdict: {said}"


def test_why_stock_is_faster() -> None:
    assert why_stock("60% of experts' exchanges hidden", 2) == "--epp hides less communication"
    assert why_stock("", 1) == "no pipeline is needed"
    assert why_stock("", 4) == "its schedule suits these batches better"
