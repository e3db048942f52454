"""What the cost model promises a chunk holds is what running it holds, for both kinds of store."""

import pytest

from tests.mcore.runs import trained

pytestmark = pytest.mark.everything


@pytest.mark.parametrize("attention", ["parts", "varlen"])
def test_a_stage_holds_what_was_promised(attention: str) -> None:
    done = trained([attention], processes=1, program=("-m", "tests.mcore.ledger"))
    (slices, recomputed, beside, hybrid, *offloaded) = (
        tuple(map(float, line.split())) for line in done.output.splitlines()[-8:]
    )
    for promised, measured, *on_host in (slices, beside, hybrid):
        assert promised == pytest.approx(measured, rel=0.001)
        assert on_host == [0, 0]
    for promised, measured, there, found in offloaded:
        assert promised == pytest.approx(measured, rel=0.05)
        assert there == pytest.approx(found, rel=0.05) and there > 0
    # The layer that lives again is charged as if its slice's K and V were made again, too.
    assert recomputed[1] <= recomputed[0] <= 1.05 * recomputed[1]


@pytest.mark.parametrize("keeps", ["latents", "expanded"])
def test_a_stage_with_latent_attention_holds_what_was_promised(keeps: str) -> None:
    done = trained([keeps], processes=1, program=("-m", "tests.mcore.ledger"))
    slices, recomputed, *others = (
        tuple(map(float, line.split())) for line in done.output.splitlines()[-6:]
    )
    for promised, measured, *on_host in (slices, *others):
        assert promised == pytest.approx(measured, rel=0.002)
        assert on_host == [0, 0]
    assert recomputed[1] <= recomputed[0] <= 1.1 * recomputed[1]
    # Beside the slices' own rows latents are little; with the up-projection made again all is less.
    assert others[2][1] < slices[1]
