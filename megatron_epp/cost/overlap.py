"""Communication that Megatron's own schedules overlap with computation, and elastic plans do not.

Stock Megatron-LM overlaps tensor-parallel gathers and scatters with products
(``--tp-comm-overlap``). It overlaps the all-to-all of experts with the computation of another
micro-batch (``--overlap-moe-expert-parallel-comm``). :func:`overlapped` returns the cost of a job
with both, for baselines; no executor of this project runs them.

The fractions come from public measurements (``public_measurements.json``), relative to the
communication that the analytic model predicts:

tensor    0.8. The steps of ``dgxc-llama31`` with TP 4 and its overlap (rows 6 to 9) are as fast,
          relative to those of the same table without TP (rows 1 to 5), as if 81% of the
          communication were overlapped.
experts   0.6. Three pairs of steps, without and with the overlap: 41.25 and 31.31 s, 24.71 and
          20.99 s (``bridge-qwen3-30b``), 19.7 and 17.6 s (``modelzoo-qwen3``) saved 63, 23 and 39%.
          The largest counts, so that a baseline is not made slower than it may be.
"""

from megatron_epp.cost.cost import Cost

TENSOR, EXPERTS = 0.8, 0.6
HIDDEN = {
    "tensor_bytes_per_token": TENSOR,
    "tensor_gathers": TENSOR,
    "expert_bytes_per_token": EXPERTS,
}


def overlaps(cost: Cost) -> bool:
    """Return whether there is communication that stock Megatron would overlap in part."""
    layout = cost.layout
    return any(
        (layout.tp > 1 and each.tensor_bytes_per_token > 0)
        or (layout.ep > 1 and each.expert_bytes_per_token > 0)
        for each in layout.profile.kinds.values()
    )


def overlapped(cost: Cost) -> Cost:
    """Return the cost of stock Megatron with its overlaps: every op communicates fewer bytes."""
    return cost.with_coefficients_times({field: 1 - hidden for field, hidden in HIDDEN.items()})
