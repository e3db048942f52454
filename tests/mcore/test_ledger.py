"""What the cost model promises a chunk holds is what running it holds, for both kinds of store."""

import pytest

from tests.mcore.runs import train


@pytest.mark.parametrize("attention", ["parts", "varlen"])
def test_a_stage_holds_what_was_promised(attention: str) -> None:
    done = train([attention], processes=1, program=("-m", "tests.mcore.ledger"))
    assert done.status == 0, done.output
    (slices, recomputed, beside, hybrid) = (
        tuple(map(float, line.split())) for line in done.output.splitlines()[-4:]
    )
    for promised, measured in (slices, beside, hybrid):
        assert promised == pytest.approx(measured, rel=0.001)
    # The layer that lives again is charged as if its slice's K and V were made again, too.
    assert recomputed[1] <= recomputed[0] <= 1.05 * recomputed[1]
