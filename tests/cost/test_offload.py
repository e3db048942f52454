"""Layers that lie in the host's memory: seconds and bytes at every op, by hand."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Bytes, Profile, Seconds, Workspace
from megatron_epp.ir import OF_LAYERS, Item, Kind, Plan
from megatron_epp.sim.play import play
from tests.cost.simple_device import SIMPLE

# Per token of a layer: bytes it saves (7 of a slice whose K and V lie in their buffer), and leaves
# for W; bytes of its K and V; and of what F and B work with besides.
SAVED, SLICED, LEFT, KV, AROUND = 10.0, 7.0, 4.0, 3.0, 1.0
# Seconds per token of a layer.
SECONDS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.25, Kind.WEIGHT: 0.75}
AGAIN = 1.5  # recomputing it in full, which keeps SAVED - 8 bytes
INPUT_BYTES, LIVES_AGAIN = 2.0, 8.0


def cost(rate: float, layers: tuple[int, ...] = (4,)) -> Cost:
    """Bytes per second to the host: ``rate``. One device, nothing but layers."""
    made = without_states(profile(MODELS["llama3-8b"], SIMPLE))
    none = {kind: Seconds() for kind in OF_LAYERS}
    around = {kind: Workspace(AROUND, AROUND) for kind in OF_LAYERS}
    made = dataclasses.replace(
        made,
        layer_seconds={kind: Seconds(seconds) for kind, seconds in SECONDS.items()},
        first_seconds=none,
        last_seconds=none,
        recompute_seconds={**made.recompute_seconds, "f": Seconds(AGAIN)},
        saved_bytes={
            **made.saved_bytes,
            "k": Bytes(SAVED, SLICED),
            "f": Bytes(INPUT_BYTES, INPUT_BYTES),
        },
        recompute_workspace_bytes={
            **made.recompute_workspace_bytes,
            "f": Bytes(LIVES_AGAIN, LIVES_AGAIN),
        },
        last_bytes=Bytes(),
        kv_bytes_per_token=KV,
        kv_gradient_bytes_per_token=2 * KV,
        weight_input_bytes=Bytes(LEFT, LEFT),
        last_weight_input_bytes=Bytes(),
        workspace_bytes=around,
        last_workspace_bytes={kind: Workspace() for kind in OF_LAYERS},
        link_seconds_per_token=0.0,
        link_latency_seconds=0.0,
        host_bytes_per_second=rate,
    )
    return Cost(StageLayout(made, layers), (1e12,) * len(layers))


def plan(*choices: str, order: str = "F0 F1 B0 B1") -> Plan:
    """Two whole documents of 100 and 60 tokens, a chunk each."""
    base = Plan.parse(
        f"plan v1\ndocuments 100 60\nlayers {len(choices[0])}\n"
        f"chunk 0: 0[0:100]\nchunk 1: 1[0:60]\nstage 0: {order}\n"
    )
    return dataclasses.replace(base, recompute=(choices,))


def seconds_and_peaks(the_cost: Cost, the_plan: Plan) -> dict[str, tuple[float, float]]:
    played = play(the_plan, the_cost.table(the_plan))
    return {str(r.op): (r.stop - r.start, r.peak_bytes) for r in played.records}


@pytest.mark.parametrize(
    ("rate", "forward", "backward"),
    [
        # 3 * 10 bytes a token to copy, against 4 and 8 seconds of work.
        (10.0, 4.0, 8.0),  # hidden in both
        (5.0, 6.0, 8.0),  # F waits
        (3.0, 10.0, 10.0),  # B waits, too
    ],
)
def test_an_op_takes_its_work_or_its_copies(rate, forward, backward) -> None:
    at = seconds_and_peaks(cost(rate), plan("okoo", "kkkk"))
    assert at["F0"][0] == pytest.approx(100 * forward)
    assert at["B0"][0] == pytest.approx(100 * backward)
    assert (at["F1"][0], at["B1"][0]) == (60 * 4, 60 * 8)  # nothing to copy


def test_recompute_gives_copies_time_to_hide_in() -> None:
    """Two layers again: 2 * 1.5 more seconds a token, in B and in I; none in F and W."""
    whole, split = (
        seconds_and_peaks(cost(2.0), plan("offo", "kkkk", order=order))
        for order in ("F0 F1 B0 B1", "F0 F1 I0 B1 W0")
    )
    assert whole["F0"][0] == split["F0"][0] == pytest.approx(100 * 10)
    assert whole["B0"][0] == pytest.approx(100 * (8 + 3))
    assert split["I0"][0] == pytest.approx(100 * 10)  # 4 * 1.25 + 3 = 8 hide less
    assert split["W0"][0] == pytest.approx(100 * 3)


def test_waits_for_copies_are_communication_and_not_recompute() -> None:
    the_plan = plan("ooof", "kkkk")
    slow, fast = (play(the_plan, cost(rate).table(the_plan)) for rate in (3.0, 1e9))
    waited = slow.seconds - fast.seconds
    assert waited == pytest.approx(100 * (10 - 4) + 100 * (10 - 8 - AGAIN))
    assert slow.comm_ratio * slow.seconds == pytest.approx(waited)
    assert slow.recompute_ratio * slow.seconds == pytest.approx(100 * AGAIN)


def test_bytes_at_every_op() -> None:
    at = seconds_and_peaks(cost(1e9), plan("okoo", "kkkk"))
    one_kept, all_kept = 100 * SAVED, 60 * 4 * SAVED
    # While an op of chunk 0 runs two of its offloaded layers are there besides.
    assert at["F0"][1] == one_kept + 100 * (2 * SAVED + AROUND)
    assert at["F1"][1] == one_kept + all_kept + 60 * AROUND
    assert at["B0"][1] == one_kept + all_kept + 100 * (2 * SAVED + AROUND)
    assert at["B1"][1] == all_kept + 60 * AROUND


def test_a_single_offloaded_layer_is_there_once() -> None:
    at = seconds_and_peaks(cost(1e9), plan("okkk", "kkkk"))
    assert at["F0"][1] == 100 * (4 * SAVED + AROUND)
    assert at["F1"][1] == 100 * 3 * SAVED + 60 * (4 * SAVED + AROUND)


def test_bytes_of_halves() -> None:
    """I leaves what W needs of all four layers, offloaded or not."""
    at = seconds_and_peaks(cost(1e9), plan("okoo", "kkkk", order="F0 I0 F1 W0 B1"))
    # Three offloaded layers leave their weight inputs before the kept one is let go.
    # The two that are there meanwhile have not left theirs yet.
    assert at["I0"][1] == 100 * (SAVED + 3 * LEFT + 2 * (SAVED - LEFT) + AROUND)
    assert at["F1"][1] == 100 * 4 * LEFT + 60 * (4 * SAVED + AROUND)
    assert at["W0"][1] == 100 * (4 * LEFT + AROUND) + 60 * 4 * SAVED


def test_keys_and_values_of_a_cut_document_stay() -> None:
    """They lie in their document's buffer: neither copied nor let go."""
    base = Plan.parse(
        "plan v1\ndocuments 160\nlayers 4\nchunk 0: 0[0:100]\nchunk 1: 0[100:160]\n"
        "stage 0: F0 F1 B1 B0\n"
    )
    the_plan = dataclasses.replace(base, recompute=(("oooo", "oooo"),))
    the_cost = cost(7.0)
    table = the_cost.table(the_plan)
    assert table.held_bytes[Item.ACTIVATIONS].tolist() == [[0.0, 0.0]]
    assert table.held_bytes[Item.KV].tolist() == [[4 * 100 * KV]]
    at = seconds_and_peaks(the_cost, the_plan)
    assert at["F0"][0] == pytest.approx(100 * 4 * SLICED / 7)
    assert at["F1"][0] == pytest.approx(60 * 4 * SAVED / 7)
    assert at["F1"][1] == 4 * 100 * KV + 60 * (2 * SAVED + AROUND)
    # Gradients of the context's K and V, of all four layers.
    assert at["B1"][1] == 4 * 100 * 3 * KV + 60 * (2 * SAVED + AROUND)
    assert at["B0"][1] == 4 * 100 * 3 * KV + 100 * (2 * SLICED + AROUND)


def test_where_offloaded_layers_stand_changes_nothing() -> None:
    tables = [
        cost(4.0, (6,)).table(plan(choice, "kkkkkk")) for choice in ("ooffkk", "fofkko", "ffkkoo")
    ]
    for other in tables[1:]:
        for name in ("seconds", "workspace_bytes", "held_bytes"):
            for key, grid in getattr(tables[0], name).items():
                assert np.array_equal(grid, getattr(other, name)[key]), (name, key)


def test_forwards_alone_copy_nothing() -> None:
    """Nothing is kept for a backward, so there is nothing to offload, whatever the rate."""
    the_plan = plan("oooo", "kkkk", order="F0 F1")
    table = cost(0.0).table(the_plan)
    kept = cost(0.0).table(plan("kkkk", "kkkk", order="F0 F1"))
    assert np.array_equal(table.seconds[Kind.FORWARD], kept.seconds[Kind.FORWARD])
    assert np.array_equal(table.workspace_bytes[Kind.FORWARD], kept.workspace_bytes[Kind.FORWARD])


def test_without_a_rate_the_plan_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        cost(0.0).table(plan("kkok", "kkkk"))
    assert str(caught.value).startswith(
        "the plan offloads layers (choice o), but the cost model of h100-80g has no rate to the "
        "host's memory (host_bytes_per_second is 0): plan without the lever offload"
    )
    assert "\n" not in str(caught.value)


def test_a_rate_below_nothing_is_refused() -> None:
    made = profile(MODELS["gpt-13b"], DEVICES["a100-40g"])
    assert made.host_bytes_per_second == 20e9
    line = f' "host_bytes_per_second": {made.host_bytes_per_second}'
    assert line in made.to_json()
    with pytest.raises(ValueError, match=r"host_bytes_per_second: -20.*at least 0"):
        Profile.from_json(made.to_json().replace(line, line.replace("20", "-20")))


def test_devices_without_a_host_link() -> None:
    assert DEVICES["cpu"].host_bytes_per_second == 0
    assert (
        DEVICES["h200-141g"].host_bytes_per_second == 2 * DEVICES["a100-80g"].host_bytes_per_second
    )
    with pytest.raises(ValueError, match="host_bytes_per_second -1: expected from 0 to"):
        dataclasses.replace(DEVICES["cpu"], host_bytes_per_second=-1)
