"""Recompute by the chunk's own choice, layer by layer."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_epp.layers.chunk_state import ChunkState
from megatron_epp.layers.recompute.outputs import DroppedOutputs
from megatron_epp.layers.recompute.wrap import wrap_layer
from megatron_epp.runtime.kv_store import Store


def state(recompute: str, training: bool = True) -> ChunkState:
    return ChunkState(0, (), 0, recompute, Store({}), training)


class Layer:
    """Counts its forwards; a bias comes as a keyword, as Megatron's arguments do."""

    def __init__(self) -> None:
        self.runs = 0
        self.weight = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> tuple[torch.Tensor, None]:
        self.runs += 1
        return (hidden_states @ self.weight).tanh() + others["bias"], None


def checkpoint(function, tensor):
    return torch_checkpoint(function, tensor, use_reentrant=True)


def run(choice: str, index: int, training: bool = True) -> tuple[Layer, torch.Tensor]:
    """Layer ``index`` on a chunk whose letters are ``choice``, and its input's gradient."""
    torch.manual_seed(0)
    layer = Layer()
    wrapped = wrap_layer(
        layer.forward, index, lambda others: others.get("state"), checkpoint, DroppedOutputs()
    )
    hidden = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    out, _ = wrapped(hidden_states=hidden, state=state(choice, training), bias=torch.ones(4))
    out.sum().backward()
    return layer, hidden.grad


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_layer_follows_its_own_letter(index) -> None:
    choice = "fkf"
    layer, grad = run(choice, index)
    assert layer.runs == (2 if choice[index] == "f" else 1)
    kept, kept_grad = run("kkk", index)
    assert torch.equal(grad, kept_grad)
    assert torch.equal(layer.weight.grad, kept.weight.grad)


def test_evaluation_recomputes_nothing() -> None:
    assert run("f", 0, training=False)[0].runs == 1
