"""Faults of SSM and linear-attention layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megatron_epp.layers.ssm import carried
from megatron_epp.layers.ssm.carried import CarriedStates
from megatron_epp.mcore.kinds.ssm import mamba
from megatron_epp.mcore.patching import cpu_kernels
from tests.mcore.fault_injection import Fault, Faults, fault, in_turn, nothing


def zeros(original, *call):
    found = original(*call)
    return None if found is None else torch.zeros_like(found)


def losing_gradient(at: int) -> Fault:
    def backward(original, ctx: Any, gradient: Any):
        found = list(original(ctx, gradient))
        found[at] = torch.zeros_like(found[at])
        return tuple(found)

    return fault(carried._Leave, "backward", backward)


def begin_in_the_middle_of_a_call(calls, *args: Any) -> Iterator[carried.Call]:
    made = list(calls(*args))
    after = next((call for call in made if call.before is not None), made[0])
    yield replace(
        made[0],
        stop=made[-1].stop,
        lengths=tuple(length for call in made for length in call.lengths),
        document=max(call.document for call in made),
        before=after.before,
        of=after.of,
        after=next((call.after for call in made if call.after is not None), None),
    )


@contextmanager
def take_few_elements_a_call() -> Iterator[None]:
    """Nothing is broken: the kernels get no more than they can count, whatever the documents."""
    most, scan, norm = 512, mamba.mamba_mixer.mamba_split_conv1d_scan_combined, cpu_kernels.RMSNorm
    plain, rows = norm.forward, []

    def scanned(x: torch.Tensor, **others: Any):
        taps = others["conv1d_weight"].shape[1]
        assert (x.shape[1] - (taps - 1)) * x.shape[2] <= most, x.shape  # without rows in front
        rows.append(x.shape[1])
        return scan(x, **others)

    def normed(self: Any, x: torch.Tensor):
        assert x.numel() <= most, x.shape
        return plain(self, x)

    with (
        patch.object(carried, "MOST_ELEMENTS", most),
        patch.object(carried, "BLOCK_ROWS", 1),
        patch.object(mamba.mamba_mixer, "mamba_split_conv1d_scan_combined", scanned),
        patch.object(norm, "forward", normed),
    ):
        yield
    assert rows, "no layer has scanned anything"


FAULTS: Faults = {
    "nothing": nothing,
    "forget the rows in front": fault(CarriedStates, "front", zeros),
    "forget the state": fault(CarriedStates, "initial", zeros),
    "lose the states gradient": losing_gradient(1),
    "lose the rows gradient": losing_gradient(2),
    "let time pass in front": lambda: patch.object(mamba, "NO_TIME", 0.0),
    # A slice's state is the call's first sequence's, whichever that is.
    "begin in the middle of a call": fault(carried, "_calls", begin_in_the_middle_of_a_call),
    # A document begins with the state of the one before it.
    "run over documents": fault(CarriedStates, "sequences", lambda *call: None),
    "nothing, in short calls": take_few_elements_a_call,
}
around = in_turn(FAULTS)
