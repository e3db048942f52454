"""I and W of a measured profile: B taken apart at the price that was measured."""

import dataclasses

import pytest

from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import device, host_seconds_of
from megatron_epp.cost.catalogue.models import model
from megatron_epp.cost.fitting.split_seconds import SMALL_TOKENS, SplitSeconds, with_split
from megatron_epp.cost.profile import Bytes, Seconds, Workspace
from megatron_epp.ir import Kind

B = Seconds(per_token=3e-6, per_pair=2e-9, per_chunk=1e-4)
HEAD = Seconds(per_token=4e-6)


def measured(price: float, per_chunk: float, weight_seconds: float = 1e-6, inputs: int = 11):
    """A profile with B measured as above, and splits of a device with this price, whose W takes so
    long for a token and reads so many bytes."""
    made = analytic_profile(model("llama3-8b"), device("cpu"))
    made = dataclasses.replace(
        made,
        layer_seconds={**made.layer_seconds, Kind.BACKWARD: B},
        last_seconds={**made.last_seconds, Kind.BACKWARD: HEAD},
        workspace_bytes={**made.workspace_bytes, Kind.BACKWARD: Workspace(per_context_token=3.0)},
    )
    splits = []
    for tokens in (128, 256):
        # Beside what is in proportion to tokens, 5 bytes that every I needs.
        bytes_ = {"input_bytes": tokens * 7 + 5, "weight_input_bytes": tokens * inputs}
        splits.append(SplitSeconds(False, tokens, **bytes_))
        splits.append(SplitSeconds(True, tokens, weight_input_bytes=tokens * 13))
    for tokens in (SMALL_TOKENS, 1000, 2000):
        whole = B(tokens, tokens * tokens / 2)
        weight = weight_seconds * tokens + per_chunk / 2
        both = whole * (1 + price * (tokens != SMALL_TOKENS)) + per_chunk
        splits.append(SplitSeconds(False, tokens, whole, both - weight, weight))
    splits.append(SplitSeconds(True, 1000, 4e-3, 1e-3, 3e-3))
    return with_split(made, splits)


@pytest.mark.parametrize("price, per_chunk", [(0.0, 0.0), (0.02, 3e-5)])
def test_i_and_w_are_b_and_the_price(price, per_chunk):
    found = measured(price, per_chunk)
    halves = [found.layer_seconds[kind] for kind in (Kind.INPUT, Kind.WEIGHT)]
    assert halves[1].per_token == pytest.approx(1e-6)
    assert halves[1].per_pair == 0
    for tokens in (500, 5000):
        pairs = tokens**2 / 2
        both = sum(half(tokens, pairs) for half in halves)
        assert both == pytest.approx(B(tokens, pairs) * (1 + price) + per_chunk, rel=1e-9)


def test_a_price_below_nothing_is_luck():
    found = measured(-0.05, -1e-5)
    both = sum(found.layer_seconds[kind](1000, 0) for kind in (Kind.INPUT, Kind.WEIGHT))
    assert both == pytest.approx(B(1000, 0), rel=1e-9)


def test_no_weight_gradient_is_free():
    """Where a busy host let W take nothing of what was measured, it has its share without that."""
    found = measured(0.0, 0.0, weight_seconds=0.0)
    unmeasured = analytic_profile(model("llama3-8b"), device("cpu")).layer_seconds[Kind.WEIGHT]
    assert found.layer_seconds[Kind.WEIGHT].per_token == unmeasured.per_token > 0


def test_where_nothing_is_left_for_w_i_is_b():
    """No linear of the layer can defer: noise of the clock is no W, and the host issues none."""
    found = measured(0.1, 1e-5, weight_seconds=1e-8, inputs=0)
    assert found.layer_seconds[Kind.INPUT] == B and found.layer_seconds[Kind.WEIGHT] == Seconds()
    assert found.weight_input_bytes == Bytes()
    on_gpu = dataclasses.replace(found, host_seconds=host_seconds_of(1.0, 2.0))
    host = with_split(on_gpu, [SplitSeconds(False, n, 1.0, 1.0) for n in (SMALL_TOKENS, 99)] + [
        SplitSeconds(False, 128)]).host_seconds  # fmt: skip
    assert host[Kind.INPUT] == host[Kind.BACKWARD] == 2.0 and host[Kind.WEIGHT] == 0


def test_the_output_layer_is_shared_out_as_measured():
    found = measured(0.0, 0.0)
    assert found.last_seconds[Kind.WEIGHT].per_token == pytest.approx(3e-6)
    assert found.last_seconds[Kind.INPUT].per_token == pytest.approx(1e-6)


def test_bytes_between_i_and_w_and_while_i_runs():
    found = measured(0.0, 0.0)
    assert found.weight_input_bytes == Bytes(11, 11)
    assert found.last_weight_input_bytes == Bytes(13, 13)
    assert found.workspace_bytes[Kind.INPUT] == Workspace(*[7 + 5 / 256] * 2, 3, 5 - 5 * 128 / 256)
