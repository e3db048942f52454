"""What I leaves for W, and what it holds at most, layer by layer: a slow sum."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Bytes
from megatron_epp.ir import Item, Kind, Plan
from megatron_epp.sim.play import play

HEAD, LOGITS, BETWEEN = 21.0, 17.0, 8.0
SAVED = {"k": 13.0, "f": 2.0}
AGAIN = SAVED["k"] - SAVED["f"]


def cost(layers: tuple[int, ...], between: float = BETWEEN) -> Cost:
    made = without_states(profile(MODELS["llama3-8b"], DEVICES["h100-80g"]))
    made = dataclasses.replace(
        made,
        saved_bytes={**made.saved_bytes, **{k: Bytes(b, b) for k, b in SAVED.items()}},
        recompute_workspace_bytes={**made.recompute_workspace_bytes, "f": Bytes(AGAIN, AGAIN)},
        last_bytes=Bytes(LOGITS, LOGITS),
        weight_input_bytes=Bytes(between, between),
        last_weight_input_bytes=Bytes(HEAD, HEAD),
    )
    return Cost(StageLayout(made, layers), (1e12,) * len(layers))


def slow(letters: str, last: bool, between: float) -> float:
    """Per token: the most that a stage holds while the I of its only chunk runs."""
    held = sum(SAVED[letter] for letter in letters) + LOGITS * last
    most = held
    held += (HEAD - LOGITS) * last
    most = max(most, held)
    for letter in reversed(letters):
        alive = held + (AGAIN if letter == "f" else 0)
        held += between - SAVED[letter]
        most = max(most, alive, held)
    return most


@pytest.mark.parametrize("letters", ["kkk", "fff", "kff", "ffk", "kfk"])
@pytest.mark.parametrize("between", [BETWEEN, 14.0, 1.0])
def test_peak_of_an_i(letters, between):
    plan = Plan.parse(
        "plan v1\ndocuments 100\nlayers 3 3\nchunk 0: 0[0:100]\n"
        "stage 0: F0 I0 W0\nstage 1: F0 I0 W0\n"
    )
    plan = dataclasses.replace(plan, recompute=((letters,), (letters,)))
    made = cost((3, 3), between)
    played = play(plan, made.table(plan))
    at = {(r.stage, str(r.op)): r.peak_bytes for r in played.records}
    for stage in range(2):
        assert at[stage, "I0"] == 100 * slow(letters, stage == 1, between)
        assert at[stage, "W0"] == 100 * (3 * between + HEAD * stage)


def test_the_output_layer_waits_on_the_last_stage_only():
    plan = Plan.parse(
        "plan v1\ndocuments 10 20\nlayers 2 2\nchunk 0: 0[0:10]\nchunk 1: 1[0:20]\n"
        "stage 0: F0 F1 B0 B1\nstage 1: F0 F1 I0 I1 W0 W1\n"
    )
    held = cost((2, 2)).table(plan).held_bytes[Item.WEIGHT_INPUTS]
    assert np.asarray(held).tolist() == [
        [10 * 2 * BETWEEN, 20 * 2 * BETWEEN],
        [10 * (2 * BETWEEN + HEAD), 20 * (2 * BETWEEN + HEAD)],
    ]


def test_the_analytic_output_layer_has_a_w_of_its_own():
    last = profile(MODELS["llama3-8b"], DEVICES["h100-80g"]).last_seconds
    assert last[Kind.WEIGHT].per_token > 0
    assert last[Kind.INPUT].per_token + last[Kind.WEIGHT].per_token == pytest.approx(
        last[Kind.BACKWARD].per_token
    )
