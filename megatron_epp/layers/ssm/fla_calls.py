"""Convolutions and delta rules of flash-linear-attention, call by call.

Both support several sequences per call; a delta rule has an initial state for each sequence. In
released kernels, the state of a convolution is wrong for sequences of one or two rows. The rows
before a boundary are therefore passed as additional rows, whose outputs are dropped.

Shape suffixes: T rows of a chunk, C channels, H heads of P channels of values.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_epp.layers.concatenated import concatenated
from megatron_epp.layers.ssm.carried import CarriedStates

# (rows [1, L, C], cumulative lengths or None for one sequence) -> [1, L, C]
Convolution = Callable[[Tensor, Any], Tensor]


def convolve_calls(rows_TC: Tensor, states: CarriedStates, convolution: Convolution) -> Tensor:
    """Apply ``convolution`` to the rows of each call, and return the outputs [T, C]."""
    outputs = []
    for number, rows in enumerate(states.of_calls(rows_TC)):
        front = states.front(number, rows)
        count = 0 if front is None else len(front)
        if front is not None:
            rows = torch.cat((front, rows))
        states.after(number, rows)
        output = convolution(rows[None], states.boundaries(number, count, rows.device))
        outputs.append(output[0, count:])
    return concatenated(outputs)


def apply_rule(
    rule: Callable[..., Any], inputs: Sequence[Tensor], states: CarriedStates, **options: Any
) -> Tensor:
    """Return the outputs [1, T, H, P] of ``rule(q, k, v, g, beta)`` for inputs [1, T, ...]."""
    outputs = []
    of_calls = zip(*(states.of_calls(x, 1) for x in inputs), strict=True)
    for number, (q, k, v, g, beta) in enumerate(of_calls):
        initial, wants = states.initial(number), states.wants_final(number)
        if initial is not None:
            initial = initial[None]  # a view of the store's memory if it is the only one
            # Unsliced documents follow, which begin with zeros.
            if after := len(states.calls[number].lengths) - 1:
                others = initial.new_zeros(after, *initial.shape[1:])
                initial = torch.cat((initial, others))
        y, finals = rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=initial,
            output_final_state=wants,
            cu_seqlens=states.boundaries(number, 0, q.device),
            **options,
        )
        outputs.append(states.leave(number, y, finals[-1] if wants else None))
    return concatenated(outputs, 1)
