"""The orders of a plan as the CSV that torch.distributed.pipelining's schedule runtime reads.

One row a rank, its actions in order: ``0F0,0F1,0B0`` is stage 0, F, B, I or W, chunk. Sends and
receives are added by torch's own lowering. Torch knows nothing of slices: an order in which a
slice's K and V are missing passes there, and does not pass :func:`megatron_epp.ir.check`.
"""

from megatron_epp.ir import Plan


def to_torch_csv(plan: Plan) -> str:
    """``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` takes this text."""
    rows = (
        ",".join(f"{stage}{op.kind.value}{op.chunk}" for stage, op in order)
        for order in plan.rank_orders
    )
    return "".join(f"{row}\n" for row in rows)
