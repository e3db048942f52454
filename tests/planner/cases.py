"""Batches and machines for the planners' tests."""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from megatron_epp.cost.cost import Cost, named_cost
from megatron_epp.cost.profile import Seconds
from megatron_epp.ir import Kind

GIB = 2**30
# Long enough to be cut, short enough to be packed; some equal, some of a single token.
LENGTHS = st.lists(
    st.one_of(st.integers(1, 300), st.integers(300, 5_000), st.integers(5_000, 40_000)),
    min_size=1,
    max_size=24,
)
# Beside the model states. The tightest make recompute necessary, the loosest never.
ROOMS_GIB = (1.5, 3.0, 8.0, 60.0)


@st.composite
def machines(draw: st.DrawFn) -> Cost:
    cost = named_cost(
        "gpt-7b",
        "a100-80g",
        pp=draw(st.integers(1, 5)),
        cp=8,
        link_seconds=draw(st.booleans()),
        head_seconds=draw(st.booleans()),
    )
    return with_room(cost, draw(st.sampled_from(ROOMS_GIB)))


def machine(pp: int = 4, room_gib: float = 60.0, **how: Any) -> Cost:
    """GPT-7B on ``pp`` stages of 8 devices, with ``room_gib`` for all but the model states."""
    return with_room(named_cost("gpt-7b", "a100-80g", pp=pp, cp=8, **how), room_gib)


def with_room(cost: Cost, room_gib: float) -> Cost:
    budget = tuple(states + room_gib * GIB for states in cost.states_bytes)
    return dataclasses.replace(cost, budget_bytes=budget)


def priced(cost: Cost, price: float) -> Cost:
    """``cost`` where I and W of a layer together take ``price`` more than B, as a share of it."""
    seconds = dict(cost.profile.layer_seconds)
    whole, half = seconds[Kind.BACKWARD], seconds[Kind.INPUT]
    seconds[Kind.INPUT] = Seconds(
        half.per_token + price * whole.per_token,
        half.per_pair + price * whole.per_pair,
        half.per_chunk + price * whole.per_chunk,
    )
    profile = dataclasses.replace(cost.profile, layer_seconds=seconds)
    return dataclasses.replace(cost, profile=profile)
