"""Faults of sliding windows and sinks."""

import torch

from megatron_epp.layers import window
from megatron_epp.layers.attention import cpu
from megatron_epp.layers.attention.tails import Tails
from megatron_epp.runtime.kv_store import Store
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def see_only_the_slice_before(seen, tails: Tails, start: int, most: int | None = None):
    first, end = seen(tails, start, most)
    if tails.boundaries is None:
        return first, end
    index = tails.boundaries.index(start)
    before = tails.boundaries[index - 1] if index else 0
    return max(first, end - (start - before)), end


def drop_gradients_of_tails(
    add_window_gradient, store: Store, layer, document, start, key_grad, value_grad
) -> None:
    kept = store._kept[layer, document]
    if kept.key_grad_CGD is None:
        kept.key_grad_CGD = torch.zeros_like(kept.key_CGD)
        kept.value_grad_CGD = torch.zeros_like(kept.value_CGD)
        store._grew(2 * kept.key_grad_CGD.nbytes)


def forget_the_sinks(call, attention: cpu.PartsAttention, *arguments):
    without = cpu.PartsAttention.of_layer(attention, attention.before, lambda: None)
    return call(without, *arguments)


FAULTS: Faults = {
    "nothing": nothing,
    # W keys and not W + 1: the window counts the query's own.
    "see one less": fault(
        window,
        "_mask",
        lambda mask, queries, keys, before, dtype: mask(queries, keys, before - 1, dtype),
    ),
    # What lies behind two boundaries is forgotten, where the slice between is shorter than W.
    "see only the slice before": fault(Tails, "seen", see_only_the_slice_before),
    # What later slices leave for a tail never arrives.
    "drop gradients of tails": fault(Store, "add_window_gradient", drop_gradients_of_tails),
    # Softmax over the keys alone.
    "forget the sinks": fault(cpu.PartsAttention, "__call__", forget_the_sinks),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
