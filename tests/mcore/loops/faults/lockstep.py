"""Faults of slices of replicas that share experts."""

import torch

from megatron_epp.layers.moe.router_stats import RouterStats
from megatron_epp.mcore.loops.slice_stage import SliceStage
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def count_padding(owners, stats: RouterStats, state):
    found = owners(stats, state)
    found[found == len(stats.spans)] = 0
    return found


def divide_by_the_most(loss, stage: SliceStage, number: int) -> None:
    """As if every replica had the micro-batches of the one with the most."""
    loss(stage, number)
    most = max(2 * len(stage.forests), 3)
    for gradient in stage._gradients.values():
        gradient *= len(stage.forests) / most


def leave_empty_chunks_a_gradient(gradients, stage: SliceStage, chunk: int) -> torch.Tensor:
    found = gradients(stage, chunk)
    return found if stage.plan.chunks[chunk].spans else torch.ones_like(found)


FAULTS: Faults = {
    "nothing": nothing,
    # Padding rows and the row of an empty chunk count as tokens of a micro-batch.
    "count padding": fault(RouterStats, "_owners", count_padding),
    "divide by the most": fault(SliceStage, "_loss", divide_by_the_most),
    # The outputs of an empty chunk get a gradient.
    "leave empty chunks a gradient": fault(
        SliceStage, "_loss_gradients", leave_empty_chunks_a_gradient
    ),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
