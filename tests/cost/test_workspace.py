"""What lives while an op runs: per token, per token of the context, and whatever the chunk is."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES, GIB
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.fitting.fit import line_above
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Workspace
from megatron_epp.ir import Kind, Plan
from megatron_epp.planner.feasibility import most_tokens, require_fit
from megatron_epp.sim.play import play
from tests.show.plans import EXAMPLE

PLAIN = profile(MODELS["llama3-8b"], DEVICES["h100-80g"])
# A document in two slices, the second beside a whole one, and a lone one; nothing is recomputed.
PLAN = Plan.parse(EXAMPLE.replace("3f1k 4k 2c2k", "4k 4k 4k"))
NONE = Workspace()


def cost(layer: Workspace, last: Workspace = NONE, tp: int = 1, cp: int = 1) -> Cost:
    made = dataclasses.replace(
        PLAIN,
        workspace_bytes={**PLAIN.workspace_bytes, Kind.BACKWARD: layer},
        last_workspace_bytes={
            **dict.fromkeys(PLAIN.last_workspace_bytes, NONE),
            Kind.BACKWARD: last,
        },
    )
    return Cost(StageLayout(made, (4, 4), tp=tp, cp=cp), (80 * GIB, 80 * GIB))


def workspace(of: Cost) -> list[list[float]]:
    loads = of.loads(PLAN.chunks, PLAN.documents)
    return of.memory.workspace_bytes(Kind.BACKWARD, loads).tolist()


def test_by_hand() -> None:
    layer, last = Workspace(2.0, 2.0, 3.0, 100.0), Workspace(per_op=7.0)
    everywhere = [10_000 + 100, 11_000 + 3 * 5000 + 100, 1800 + 100]
    assert workspace(cost(layer, last)) == [everywhere, [x + 7 for x in everywhere]]
    # Tensor-parallel ranks share all of it; context-parallel ones hold all of every weight.
    shared = [5_000 + 50, 5_500 + 7500 + 50, 900 + 50]
    assert workspace(cost(layer, tp=2))[0] == shared
    assert workspace(cost(layer, cp=2))[0] == [x + 50 for x in shared]


def test_it_is_charged_once_however_many_chunks_are_in_flight() -> None:
    def peak(of: Cost) -> int:
        played = play(PLAN, of.table(PLAN))
        return max(played.peak_bytes)

    constant = 5 * GIB
    assert peak(cost(Workspace(per_op=constant))) - peak(cost(Workspace())) == constant


def test_what_fits_leaves_room_for_it() -> None:
    """A long document's last slice needs its whole context's gradients at once: refused with the
    stage's name where that is too much; and the largest chunk is smaller."""
    per_token = 2.0 * 2**20  # all of the document at once does not fit, slices of it do
    light = cost(Workspace(per_token, per_token))
    heavy = cost(Workspace(per_token, per_token, per_token))
    require_fit(light, (60_000,))
    with pytest.raises(Exception, match="document 0 of 60000 tokens on stage 0 needs at least"):
        require_fit(heavy, (60_000,))
    light = cost(Workspace())
    room = 80 * GIB - np.max(light.memory.states_bytes)
    half = cost(Workspace(per_op=float(room / 2)))
    whole, less = (most_tokens(one) for one in (light, half))
    assert 0.45 * whole < less < 0.5 * whole


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1000)), min_size=1, max_size=3),
    st.lists(st.integers(1, 9000), min_size=2, max_size=6, unique=True),
)
def test_no_peak_lies_above_the_line(phases, sizes) -> None:
    """A peak is the largest of what several moments need, each a slope and a constant."""

    def peak(x: int) -> float:
        return max(slope * x + constant for slope, constant in phases)

    slope, constant = line_above([(float(x), peak(x)) for x in sizes])
    assert min(slope, constant) >= 0
    for x in range(min(sizes), max(sizes), 97):
        assert peak(x) <= (slope * x + constant) * (1 + 1e-12) + 1e-9
    assert slope <= max(s for s, _ in phases) * (1 + 1e-9) + 1e-9


def test_a_constant_hides_no_slope() -> None:
    """Up to 8192 tokens a weight's gradient of 900 is more than what 0.1 per token come to."""
    points = [(x, max(900.0, 0.1 * x)) for x in (256.0, 2048.0, 8192.0)]
    assert line_above(points) == (0.0, 900.0)
    slope, constant = line_above(points, goes_on=True)
    for x in (256.0, 8192.0, 65536.0):
        assert slope * x + constant >= max(900.0, 0.1 * x)


def test_lines_of_few_points() -> None:
    assert line_above([]) == (0.0, 0.0)
    assert line_above([(5.0, 9.0)]) == (0.0, 9.0)
    assert line_above([(5.0, -9.0), (6.0, -8.5)]) == (0.5, 0.0)
    assert line_above([(2.0, 30.0), (2.0, 40.0), (4.0, 41.0)]) == (0.5, 39.0)
