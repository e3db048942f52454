"""Python calls of a layer: what a host does for a chunk, however fast it is."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megatron_epp.mcore.patching import emulated_engine

pytestmark = [
    pytest.mark.gpu,
    # A GPU's host runs compiled fusions besides, which make calls of their own.
    pytest.mark.skipif(
        not emulated_engine.is_wanted(), reason="counts with emulated kernels alone"
    ),
]

# Python's and C's, outside of Transformer Engine's compiled part, of a dense layer (RMSNorm,
# SwiGLU, rope, grouped keys): three quarters of what the forward took when they were first counted
# (1842), and what a backward took (584).
MOST_FORWARD, MOST_BACKWARD = 1381, 584
ENGINE = str(Path(__file__).parents[1] / "engine")
LAYERS = 2


class Calls:
    """A profiler that counts calls, but for those inside the emulated kernels."""

    def __init__(self):
        self.count = self._inside = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            code = frame.f_code
            kernel = event == "call" and ENGINE in code.co_filename
            if self._inside or (kernel and "_widen" not in code.co_qualname):
                self._inside += 1
            else:
                self.count += 1
        elif event in ("return", "c_return", "c_exception") and self._inside:
            self._inside -= 1

    @classmethod
    def of(cls, act: Callable[[], Any]) -> int:
        calls = cls()
        sys.setprofile(calls)
        try:
            act()
        finally:
            sys.setprofile(None)
        return calls.count


def counted(probe: Any, context: int) -> tuple[int, int]:
    """Return the calls of all layers, forward and backward, of a chunk whose kernels are known."""
    import torch

    from megatron_epp.mcore.calibrate.probe import Shape
    from megatron_epp.mcore.kinds.mtp.mtp_layers import layers_of

    shape, modes = Shape(64, context), "k" * LAYERS
    for _ in range(2):
        probe.layers(shape, modes)
    store, params = probe._chunk(shape, modes)
    hidden, rotary = probe._hidden(shape), probe._rotary(params)
    named = {"attention_mask": None, "rotary_pos_emb": rotary, "packed_seq_params": params}
    outputs = [hidden]

    def forward() -> None:
        for layer in layers_of(probe.model):
            outputs.append(layer(hidden_states=outputs[-1], **named)[0])

    forwards = Calls.of(forward)
    probe._answer(store)
    gradient = torch.ones_like(outputs[-1])
    return forwards, Calls.of(lambda: outputs[-1].backward(gradient))


def test_a_layer_takes_few_python_calls(alone, engine) -> None:
    from megatron_epp.mcore.calibrate.probe import undisturbed
    from scripts.bench.single_stage import build_stage, probe_alone

    model = build_stage(alone, LAYERS, False, False)
    with undisturbed(model):
        probe = probe_alone(alone, model)
        for context in (0, 128):
            forwards, backwards = counted(probe, context)
            assert 0 < forwards <= MOST_FORWARD * LAYERS
            assert 0 < backwards <= MOST_BACKWARD * LAYERS
