"""Breaks what Transformer Engine's layers are given on purpose, another way in every batch.

Run inside a rank (``Trial.interfere``), as tests/mcore/sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

import torch

from megatron_epp.layers.attention.te import TransformerEngineKernel
from megatron_epp.layers.saved_tensors import SavedTensorHooks
from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
from megatron_epp.mcore.model.positions import PositionedRotary
from megatron_epp.runtime.kv_store import Store


def see_one_less_behind_a_border() -> AbstractContextManager:
    """A slice's queries see a window that counts their own key."""
    plain = TransformerEngineKernel._run

    def run(self, inputs, cu_seqlens):
        window = self._attend.window_size
        if window is not None and window[0] > 0 and cu_seqlens.most_keys > cu_seqlens.most_queries:
            self._attend.window_size = (window[0] - 1, 0)
        try:
            return plain(self, inputs, cu_seqlens)
        finally:
            self._attend.window_size = window

    return patch.object(TransformerEngineKernel, "_run", run)


def forget_the_sinks_of_slices() -> AbstractContextManager:
    """Softmax over the keys alone, where there is a context."""
    plain = TransformerEngineKernel._run

    def run(self, inputs, cu_seqlens):
        if cu_seqlens.most_keys > cu_seqlens.most_queries:
            inputs = [*inputs[:3], *(sinks * 0 - 1e9 for sinks in inputs[3:])]
        return plain(self, inputs, cu_seqlens)

    return patch.object(TransformerEngineKernel, "_run", run)


def align_at_the_top_left() -> AbstractContextManager:
    """A slice's queries see the beginning of its context."""
    plain = TransformerEngineKernel._run

    def run(self, *call):
        self._attend.attn_mask_type = "padding_causal"
        try:
            return plain(self, *call)
        finally:
            self._attend.attn_mask_type = "padding_causal_bottom_right"

    return patch.object(TransformerEngineKernel, "_run", run)


def drop_returned_gradients() -> AbstractContextManager:
    """What later slices leave for the K and V of earlier ones never arrives."""
    plain = Store.gradient

    def nothing(self: Store, *where: int) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.zeros_like, plain(self, *where)))

    return patch.object(Store, "gradient", nothing)


def turn_by_the_row() -> AbstractContextManager:
    """Rotary positions from 0 in every chunk."""
    plain = PositionedRotary.forward

    def forward(self, length: int, **others):
        self._positions = torch.arange(len(self._positions))
        return plain(self, length, **others)

    return patch.object(PositionedRotary, "forward", forward)


def lose_what_was_set_aside() -> AbstractContextManager:
    """Weight gradients that I leaves to W are never made."""
    return patch.object(DeferredWeightGrads, "accumulate_all", lambda self: None)


@contextmanager
def overwrite_gradients():
    """Every backward takes itself for an iteration's first, as Transformer Engine's linears would
    the one of the first forward: they write over what others have added up."""
    import transformer_engine_torch as tex

    plain = tex.generic_gemm

    def overwriting(*call, **others):
        call = list(call)
        if call[4] is not None and call[3]:  # a weight's gradient, where it is added up
            call[14] = False
            others["beta"] = None
        return plain(*call, **others)

    with patch.object(tex, "generic_gemm", overwriting):
        yield


def mistake_what_was_saved() -> AbstractContextManager:
    """The attention's log-sum-exp comes back from the hooks a little off."""
    plain = SavedTensorHooks.unpack

    def unpack(self, packed):
        tensor = plain(self, packed)
        return tensor + 1e-3 if tensor.dim() == 3 and tensor.shape[-1] == 1 else tensor

    return patch.object(SavedTensorHooks, "unpack", unpack)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    see_one_less_behind_a_border,
    forget_the_sinks_of_slices,
    align_at_the_top_left,
    drop_returned_gradients,
    turn_by_the_row,
    lose_what_was_set_aside,
    overwrite_gradients,
    mistake_what_was_saved,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number % len(WAYS)]()
