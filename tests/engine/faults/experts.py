"""Faults of experts as one product (mcore/kinds/moe/stacked.py)."""

import torch

from megatron_epp.layers.moe.weight_stack import WeightStack
from megatron_epp.mcore.kinds.moe import stacked
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def end_one_expert_late(row_ends, counts):
    return row_ends(counts.roll(1))


def add_to_the_next_expert(add_gradient, stack: WeightStack, *operands):
    total = stack.gradients_ENK
    before = total.clone()
    add_gradient(stack, *operands)
    total.copy_(before + (total - before).roll(1, 0))


def add_to_the_others(add_gradient, stack: WeightStack, grad, rows, ends):
    """A gradient of rows that are one expert's alone, as those of a stack in the other order."""
    add_gradient(stack, grad, rows, ends[-1] - torch.cat((ends[:-1].flip(0), ends.new_zeros(1))))


FAULTS: Faults = {
    "nothing": nothing,
    "rows end one expert late": fault(stacked, "row_ends", end_one_expert_late),
    "the next expert's gradient": fault(WeightStack, "add_gradient", add_to_the_next_expert),
    "gradients in the other order": fault(WeightStack, "add_gradient", add_to_the_others),
    # Rows from the first expert to the last, as Megatron sorts them.
    "rows in the other order": fault(
        stacked, "reverse_experts", lambda reverse, columns, on_a_rank: columns
    ),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
