"""Orders of a plan as the CSV of torch.distributed.pipelining's schedule runtime.

The file has one row per rank with the rank's actions in order, such as ``0F0,0F1,0B0``. An action
is a stage, an op kind (F, B, I or W) and a micro-batch. Torch's own lowering adds sends and
receives. Torch counts losses in the order in which the last stage computes them, so micro-batches
are numbered in that order (:func:`micro_batches`). Plans with slices, recompute, offloading,
vocabulary parallelism or empty chunks are refused, because the file cannot express them.
"""

from megatron_epp.ir import KEEP, Kind, Plan, PlanError, slices_of


def micro_batches(plan: Plan) -> tuple[int, ...]:
    """Return the chunks in the order of the last stage's forwards: entry i is micro-batch i."""
    return tuple(op.chunk for op in plan.orders[-1] if op.kind is Kind.FORWARD)


def to_torch_csv(plan: Plan) -> str:
    """Return the plan's orders as CSV text.

    ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")`` reads this text.

    Raises:
        PlanError: the file cannot express the plan.
    """
    _require_words(plan)
    number = {chunk: index for index, chunk in enumerate(micro_batches(plan))}
    rows = (
        ",".join(f"{stage}{op.kind.value}{number[op.chunk]}" for stage, op in order)
        for order in plan.rank_orders
    )
    return "".join(f"{row}\n" for row in rows)


def _require_words(plan: Plan) -> None:
    """Raise a PlanError if the plan has properties that orders of ops alone cannot express."""
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
