"""The orders of a plan as the CSV that torch.distributed.pipelining's schedule runtime reads.

One row a rank, its actions in order: ``0F0,0F1,0B0`` is stage 0, F, B, I or W, micro-batch. Sends
and receives are added by torch's own lowering. Torch counts losses in the order in which its last
stage makes them, so micro-batches are numbered in that order: :func:`micro_batches` says which
chunk each is. What the file has no words for is refused: slices, recompute, parts of the
vocabulary.
"""

from megatron_epp.ir import KEEP, Kind, Plan, PlanError, slices_of


def micro_batches(plan: Plan) -> tuple[int, ...]:
    """Return the chunk of every micro-batch, in the order of the last stage's forwards."""
    return tuple(op.chunk for op in plan.orders[-1] if op.kind is Kind.FORWARD)


def to_torch_csv(plan: Plan) -> str:
    """Return what ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` takes.

    PlanError: the plan has what torch's runtime does not do.
    """
    _require_words(plan)
    number = {chunk: index for index, chunk in enumerate(micro_batches(plan))}
    rows = (
        ",".join(f"{stage}{op.kind.value}{number[op.chunk]}" for stage, op in order)
        for order in plan.rank_orders
    )
    return "".join(f"{row}\n" for row in rows)


def _require_words(plan: Plan) -> None:
    """Raise a PlanError where the orders alone do not say what the plan computes."""
    slices = slices_of(plan)
    choices = {choice for choices in plan.recompute for choice in choices}
    has = {
        "ops H and G": (plan.vocabulary_parallel, "a plan made with --vocab-parallel off"),
        "slices of documents": (bool(slices.kept), "whole documents, as of --planner packing"),
        "recompute or offload choices": (
            any(set(choice) - {KEEP} for choice in choices),
            "a plan with memory to keep everything",
        ),
        "chunks without a document": (any(not c.spans for c in plan.chunks), "no lockstep"),
    }
    for what, (there, expected) in has.items():
        if there:
            raise PlanError(
                f"the plan has {what}, which torch's schedules do not know; expected {expected}, "
                "or another ending"
            )
