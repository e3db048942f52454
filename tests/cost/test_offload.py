"""Layers that lie in the host's memory: seconds and bytes at every op, by hand."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Bytes, Seconds, Workspace
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
