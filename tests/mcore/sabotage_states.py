"""Breaks layers with a state on purpose, another way in every batch: certificates must notice.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from megatron_epp.layers.ssm import carried
from megatron_epp.layers.ssm.carried import CarriedStates
from megatron_epp.mcore.kinds.ssm import mamba
from megatron_epp.mcore.patching import cpu_kernels


def forget_the_rows_in_front() -> AbstractContextManager:
    plain = CarriedStates.front

    def front(self: CarriedStates, *args: Any):
        found = plain(self, *args)
        return None if found is None else torch.zeros_like(found)

    return patch.object(CarriedStates, "front", front)


def forget_the_state() -> AbstractContextManager:
    plain = CarriedStates.initial

    def initial(self: CarriedStates, *args: Any):
        found = plain(self, *args)
        return None if found is None else torch.zeros_like(found)

    return patch.object(CarriedStates, "initial", initial)


def _losing_gradient(at: int) -> AbstractContextManager:
    plain = carried._Leave.backward

    def backward(ctx: Any, gradient: Any):
        found = list(plain(ctx, gradient))
        found[at] = torch.zeros_like(found[at])
        return tuple(found)

    return patch.object(carried._Leave, "backward", staticmethod(backward))


def lose_the_states_gradient() -> AbstractContextManager:
    return _losing_gradient(1)


def lose_the_rows_gradient() -> AbstractContextManager:
    return _losing_gradient(2)


def let_time_pass_in_front() -> AbstractContextManager:
    return patch.object(mamba, "NO_TIME", 0.0)


def begin_in_the_middle_of_a_call() -> AbstractContextManager:
    """A slice's state is the call's first sequence's, whichever that is."""
    plain = carried._calls

    def calls(*args: Any) -> Iterator[carried.Call]:
        made = list(plain(*args))
        lengths = tuple(length for call in made for length in call.lengths)
        behind = next((call for call in made if call.before is not None), made[0])
        after = next((call.after for call in made if call.after is not None), None)
        document = max(call.document for call in made)
        yield replace(
            made[0],
            stop=made[-1].stop,
            lengths=lengths,
            document=document,
            before=behind.before,
            of=behind.of,
            after=after,
        )

    return patch.object(carried, "_calls", calls)


def run_over_documents() -> AbstractContextManager:
    """A document begins with the state of the one in front of it."""
    return patch.object(CarriedStates, "sequences", lambda *args: None)


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


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    nullcontext,
    forget_the_rows_in_front,
    forget_the_state,
    lose_the_states_gradient,
    lose_the_rows_gradient,
    let_time_pass_in_front,
    begin_in_the_middle_of_a_call,
    run_over_documents,
    take_few_elements_a_call,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
