"""Bytes as the executor holds them: contexts, kept rows, a backward that frees while it makes."""

import dataclasses

from megatron_epp.cost.analytic import profile
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import Workspace
from megatron_epp.ir import Chunk, Kind

MODEL = Model("small", 4, 64, 176, 4, 2, 16, 1000, gated=True)


def cost(layers=(3, 2), **changes) -> Cost:
    made = profile(MODEL, DEVICES["cpu"])
    return Cost(StageLayout(dataclasses.replace(made, **changes), layers), (1e15,) * len(layers))


def loads(*chunks: str, documents: tuple[int, ...]):
    return cost().loads([Chunk.parse(text.split()) for text in chunks], documents)


def test_the_context_is_all_but_the_last_slice() -> None:
    load = loads("0[0:5]", "0[5:9]", "0[9:12] 1[0:4]", "2[0:7]", documents=(12, 4, 7))
    assert load.context_tokens.tolist() == [9, 0, 0]
    assert load.earlier_tokens.tolist() == [0, 5, 9, 0]
    # Lone slices with a later one need not save K and V themselves; the tail and packs do.
    assert load.cached_tokens(stores_last_slice=False).tolist() == [5, 4, 0, 0]
    assert load.cached_tokens(stores_last_slice=True).tolist() == [5, 4, 0, 0]


def test_a_slice_beside_others_saves_its_own_rows() -> None:
    load = loads("0[0:5] 1[0:4]", "0[5:9]", documents=(9, 4))
    assert load.cached_tokens(stores_last_slice=False).tolist() == [0, 0]
    assert load.cached_tokens(stores_last_slice=True).tolist() == [0, 4]


def test_room_for_the_last_slice_is_taken_with_the_first() -> None:
    kept, apart = (
        cost(kv_bytes_per_token=10.0, kv_gradient_bytes_per_token=20.0, stores_last_slice=keeps)
        for keeps in (True, False)
    )
    load = loads("0[0:5]", "0[5:9]", "1[0:6]", documents=(9, 6))
    assert apart.memory.kv_bytes(load).tolist() == [[150.0, 0.0], [100.0, 0.0]]
    assert kept.memory.kv_bytes(load).tolist() == [[270.0, 0.0], [180.0, 0.0]]
    # Nobody leaves a gradient for it there, and its chunk saves it no more.
    assert (
        kept.memory.kv_gradient_bytes(load).tolist()
        == apart.memory.kv_gradient_bytes(load).tolist()
    )
    saved = kept.layout.profile.saved_bytes["k"]
    assert kept.memory.saved_bytes((0, "k"), load).tolist() == [
        saved(5, 5),
        saved(4, 4),
        saved(6, 0),
    ]
    assert apart.memory.saved_bytes((0, "k"), load).tolist() == [
        saved(5, 5),
        saved(4, 0),
        saved(6, 0),
    ]


def test_the_last_stages_workspace_is_of_a_block_of_tokens() -> None:
    figure = {kind: Workspace(100.0, 100.0) for kind in Kind}
    none = {kind: Workspace() for kind in Kind}
    the_cost = cost(last_workspace_bytes=figure, workspace_bytes=none, last_workspace_tokens=6.0)
    load = loads("0[0:5]", "1[0:12]", documents=(5, 12))
    assert the_cost.memory.workspace_bytes(Kind.FORWARD, load)[-1].tolist() == [500.0, 600.0]
