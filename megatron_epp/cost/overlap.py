"""Communication that Megatron's own schedules overlap with computation, and ``--epp`` does not.

Stock Megatron-LM overlaps tensor-parallel gathers and scatters with products
(``--tp-comm-overlap``). It overlaps the all-to-all of experts with the computation of another
micro-batch (``--overlap-moe-expert-parallel-comm``). :func:`overlapped` returns the cost of a job
with one of these overlaps, for baselines; no executor of this project runs them.

The buffers of ``--tp-comm-overlap`` have one shape for the run, ``--seq-length`` tokens
(``megatron/training/initialize.py``), and Transformer Engine refuses other inputs
(``copy_into_buffer``). With this flag, documents are packed to this length, not to the best length
of each batch. A job with experts is assumed to overlap the all-to-all instead, which supports any
length.

The fractions come from public measurements (``scripts/bench/public_measurements.json``), relative
to the communication that the analytic model predicts:

tensor    0.8. Table ``dgxc-llama31`` has steps with TP 4 and its overlap (rows 6 to 9), and steps
          without TP (rows 1 to 5). Their times imply that 81% of the communication is overlapped.
experts   0.6. Three pairs of steps, without and with the overlap, took 41.25 and 31.31 s, 24.71 and
          20.99 s (``bridge-qwen3-30b``), and 19.7 and 17.6 s (``modelzoo-qwen3``). The overlap
          saved 63, 23 and 39% of the communication. The largest fraction is used, so that the
          baseline is not slower than it could be.
"""

from megatron_epp.cost.cost import Cost

TENSOR, EXPERTS = 0.8, 0.6
OF_TENSORS = {"tensor_bytes_per_token": TENSOR, "tensor_gathers": TENSOR}
OF_EXPERTS = {"expert_bytes_per_token": EXPERTS}


def overlaps(cost: Cost) -> bool:
    """Return whether stock Megatron would overlap some communication."""
    layout = cost.layout
    kinds = layout.profile.kinds.values()
    tensors = layout.tp > 1 and any(each.tensor_bytes_per_token > 0 for each in kinds)
    return tensors or overlaps_experts(cost)


def overlaps_experts(cost: Cost) -> bool:
    """Return whether stock Megatron would overlap the all-to-all of experts."""
    layout = cost.layout
    kinds = layout.profile.kinds.values()
    return layout.ep > 1 and any(each.expert_bytes_per_token > 0 for each in kinds)


def overlap_text(cost: Cost) -> str:
    """Return a description of the communication that stock Megatron overlaps."""
    if overlaps_experts(cost):
        return f"{EXPERTS:.0%} of experts' exchanges hidden"
    return f"{TENSOR:.0%} of tensor-parallel exchanges hidden"


def overlapped(cost: Cost) -> Cost:
    """Return the cost of stock Megatron with its overlap, modelled as fewer exchanged bytes."""
    hidden = OF_EXPERTS if overlaps_experts(cost) else OF_TENSORS
    return cost.with_coefficients_times({field: 1 - part for field, part in hidden.items()})
