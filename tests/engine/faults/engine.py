"""Faults of what Transformer Engine's layers are given."""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from megatron_epp.layers.attention import te
from megatron_epp.layers.attention.te import TransformerEngineKernel
from megatron_epp.layers.attention.varlen import Operands
from megatron_epp.layers.saved_tensors import SavedTensorHooks
from megatron_epp.layers.wgrad.linear import DeferredWeightGrads
from megatron_epp.mcore.kinds.positions import PositionedRotary
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing
from tests.mcore.faults import executor


def of_the_module(replacement):
    """A fault of the module's calls, in whose place no recorded call may stand meanwhile."""

    @contextmanager
    def inject():
        with (
            patch.object(te, "DIRECT", False),
            fault(TransformerEngineKernel, "_run", replacement)(),
        ):
            yield

    return inject


def see_one_less(run, kernel, inputs, cu_seqlens):
    window = kernel._attend.window_size
    if window is not None and window[0] > 0 and cu_seqlens.most_keys > cu_seqlens.most_queries:
        kernel._attend.window_size = (window[0] - 1, 0)
    try:
        return run(kernel, inputs, cu_seqlens)
    finally:
        kernel._attend.window_size = window


def forget_the_sinks(run, kernel, inputs, cu_seqlens):
    if cu_seqlens.most_keys > cu_seqlens.most_queries:
        inputs = [*inputs[:3], *(sinks * 0 - 1e9 for sinks in inputs[3:])]
    return run(kernel, inputs, cu_seqlens)


def align_at_the_top_left(run, kernel, *call):
    mask = kernel._attend.attn_mask_type
    kernel._attend.attn_mask_type = te.TOP_LEFT_MASK
    try:
        return run(kernel, *call)
    finally:
        kernel._attend.attn_mask_type = mask


def turn_by_the_row(forward, rotary: PositionedRotary, length: int, **others):
    rotary._positions = torch.arange(len(rotary._positions))
    return forward(rotary, length, **others)


@contextmanager
def overwrite_gradients():
    """Every backward takes itself for an iteration's first, as Transformer Engine's linears would
    the one of the first forward: they write over what others have added up."""
    import transformer_engine_torch as tex

    def overwriting(generic_gemm, *call, **others):
        call = list(call)
        if call[4] is not None and call[3]:  # a weight's gradient, where it is added up
            call[14] = False
            others["beta"] = None
        return generic_gemm(*call, **others)

    with fault(tex, "generic_gemm", overwriting)():
        yield


def mistake_what_was_saved(unpack, hooks, packed):
    tensor = unpack(hooks, packed)
    return tensor + 1e-3 if tensor.dim() == 3 and tensor.shape[-1] == 1 else tensor


FAULTS: Faults = {
    "nothing": nothing,
    # A slice's queries see a window that counts their own key.
    "see one less behind a border": of_the_module(see_one_less),
    # Softmax over the keys alone, where there is a context.
    "forget the sinks of slices": of_the_module(forget_the_sinks),
    # A slice's queries see the beginning of its context.
    "align at the top left": of_the_module(align_at_the_top_left),
    # A slice after its context is computed as a whole document is (on squares both masks are one).
    "mask of whole documents": lambda: patch.object(Operands, "has_context", False),
    "drop returned gradients": executor.FAULTS["drop returned gradients"],
    # Rotary positions from 0 in every chunk.
    "turn by the row": fault(PositionedRotary, "forward", turn_by_the_row),
    # Weight gradients that I leaves to W are never made.
    "lose what was set aside": fault(
        DeferredWeightGrads, "accumulate_all", lambda accumulate_all, grads: None
    ),
    "overwrite gradients": overwrite_gradients,
    # The attention's log-sum-exp comes back from the hooks a little off.
    "mistake what was saved": fault(SavedTensorHooks, "unpack", mistake_what_was_saved),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
