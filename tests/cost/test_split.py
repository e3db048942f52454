"""What I leaves for W, and what it holds at most, layer by layer: a slow sum."""

import dataclasses

import numpy as np
import pytest

from megatron_epp.cost.analytic import profile, without_states
from megatron_epp.cost.build import named_cost
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Bytes, Seconds, Workspace
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
        last_workspace_bytes=dict.fromkeys(made.last_workspace_bytes, Workspace()),
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


H100, LLAMA, QWEN = DEVICES["h100-80g"], MODELS["llama3-8b"], MODELS["qwen3-30b-a3b"]
READ = H100.memory_efficiency * H100.memory_bytes_per_second  # bytes per second


def test_the_analytic_output_layer_has_a_w_of_its_own():
    last = profile(LLAMA, H100).last_seconds
    assert last[Kind.WEIGHT].per_token > 0
    operands = 2 * (LLAMA.hidden + LLAMA.vocabulary)
    assert last[Kind.INPUT].per_token + last[Kind.WEIGHT].per_token == pytest.approx(
        last[Kind.BACKWARD].per_token + operands / READ
    )


def test_w_reads_the_operands_of_its_products_again():
    """A dense layer on one device: W has the flops of a forward, I the rest of B."""
    of = profile(LLAMA, H100).layer_seconds
    # Inputs and output gradients of QKV, projection, gate and up, down.
    gate_up, qkv = 2 * LLAMA.ffn_hidden, LLAMA.heads * 128 + 2 * LLAMA.kv_heads * 128
    channels = (4096 + qkv) + (4096 + 4096) + (4096 + gate_up) + (LLAMA.ffn_hidden + 4096)
    halves = of[Kind.INPUT].per_token + of[Kind.WEIGHT].per_token
    assert halves == pytest.approx(of[Kind.BACKWARD].per_token + 2 * channels / READ)
    flops = LLAMA.shapes["layer"].flops_per_token
    assert of[Kind.WEIGHT].per_token == pytest.approx(
        flops / H100.linear_flops + 2 * channels / READ
    )
    assert of[Kind.INPUT].per_pair == of[Kind.BACKWARD].per_pair and not of[Kind.WEIGHT].per_pair


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b", "nemotron-h-8b", "deepseek-v3"])
@pytest.mark.parametrize("kept", ["", "experts", "all"])
def test_a_split_is_never_free(name, kept):
    for each in profile(MODELS[name], H100, kept_in_input=kept).kinds.values():
        of, inputs = each.layer_seconds, each.weight_input_bytes.per_token
        for field in ("per_token", "per_pair", "per_chunk"):
            whole, *halves = (
                getattr(of[kind], field) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
            )
            more = inputs / READ if field == "per_token" else 0.0
            assert sum(halves) == pytest.approx(whole + more), (name, field)
        for seconds in (each.weight_seconds, each.expert_weight_seconds, each.host_seconds):
            if seconds:
                halves = seconds[Kind.INPUT] + seconds[Kind.WEIGHT]
                assert halves >= seconds[Kind.BACKWARD] * (1 - 1e-12)
        if kept == "all" or not inputs:
            assert of[Kind.INPUT] == of[Kind.BACKWARD] and of[Kind.WEIGHT] == Seconds()
            assert each.host_seconds[Kind.WEIGHT] == each.weight_seconds[Kind.WEIGHT] == 0


def test_grouped_experts_compute_their_weight_gradients_in_i():
    """What W computes, reads and issues is that of attention; experts of separate linears add
    theirs."""
    grouped, separate = (
        next(iter(profile(QWEN, H100, kept_in_input=kept).kinds.values()))
        for kept in ("experts", "")
    )
    (layer,) = QWEN.shapes.values()
    own = 2 * 2048 + QWEN.heads * 128 + (QWEN.heads + 2 * QWEN.kv_heads) * 128
    assert grouped.weight_input_bytes.per_token == 2 * own
    experts = layer.shape.active_experts * (2 * 2048 + 3 * layer.shape.expert_hidden)
    assert separate.weight_input_bytes.per_token == 2 * (own + experts)
    assert grouped.layer_seconds[Kind.WEIGHT].per_token == pytest.approx(
        2 * layer.parameters / H100.linear_flops + 2 * own / READ
    )
    for name in ("expert_weight_seconds", "expert_host_seconds"):
        of = getattr(grouped, name)
        assert of[Kind.INPUT] == of[Kind.BACKWARD] > 0 and of[Kind.WEIGHT] == 0
        assert getattr(separate, name)[Kind.WEIGHT] > 0


def test_tensor_parallelism_leaves_gathered_rows_and_an_uncovered_collective():
    """Per sublayer, I leaves all rows of the first product's input and of the last one's output
    gradient, and waits for one gather or scatter beside which B computes weight gradients."""
    plan = Plan.parse("plan v1\ndocuments 1024\nlayers 32\nchunk 0: 0[0:1024]\nstage 0: F0 I0 W0\n")
    how = {"zero": 1, "topology": "nodes", "memory_budget_gib": 1000, "logits_held": False}
    one, eight = (named_cost("llama3-8b", "h100-80g", pp=1, tp=tp, **how) for tp in (1, 8))
    loads = one.loads(plan.chunks, plan.documents)
    hidden, inner = 4 * 4096, LLAMA.shapes["layer"].weight_inputs - 4 * 4096
    (held,), (alone,) = (each.memory.weight_input_bytes(loads)[0] for each in (eight, one))
    assert held == 32 * 1024 * 2 * (hidden + inner / 8)
    assert alone == 32 * 1024 * 2 * (hidden + inner)
    seconds = {kind: eight.seconds.device(kind, loads)[0, 0] for kind in (Kind.INPUT, Kind.WEIGHT)}
    whole = eight.seconds.device(Kind.BACKWARD, loads)[0, 0]
    collective = 1024 * 2 * 4096 * 7 / 8 / 360e9 + H100.gather_latency_seconds[8]
    expected = whole + 32 * 2 * collective + held / READ
    assert sum(seconds.values()) == pytest.approx(expected)
