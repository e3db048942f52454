"""Plans for evaluation: forwards only, through the same chunker."""

from collections.abc import Sequence

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import EVALUATION, KEEP, Kind, Op, Plan, PlanError, check
from megatron_epp.planner.buckets import longest_first
from megatron_epp.planner.chunking import assemble
from megatron_epp.planner.finish import Batch
from megatron_epp.planner.options import Options
from megatron_epp.planner.slicing import cut_each, ideal_chunks
from megatron_epp.planner.work import moves, rates_of


def evaluation_plan(lengths: Sequence[int], cost: Cost, options: Options | None = None) -> Plan:
    """Every chunk's F on every stage, in chunks of about equal time that fit the budget.

    Activations are not kept, so memory asks only for a chunk's own workspace and for the K and V
    of one cut document.
    """
    options = options or Options()
    batch = Batch.of(lengths)
    rates = rates_of(cost)
    total = float(rates.document_seconds(batch.lengths).sum())
    wanted = max(cost.stages, round(ideal_chunks(total, rates, cost.stages)))
    most = _most_tokens(cost)
    cuts = cut_each(batch.lengths, total / wanted, rates, most, options.multiple)
    loose = rates.seconds(cuts.tails.tokens, cuts.tails.pairs).sum()
    loose += rates.seconds(cuts.shorts.tokens, cuts.shorts.pairs).sum()
    bins = max(1, round(float(loose) * wanted / total))
    bucket, buckets = longest_first(cuts, rates, bins, most)
    chunking = assemble(cuts, bucket, buckets, rates)
    order = tuple(Op(Kind.FORWARD, chunk) for chunk in range(chunking.count))
    plan = Plan(
        documents=batch.documents,
        layers=cost.layers,
        chunks=chunking.ir_chunks(batch.names),
        recompute=tuple((KEEP * layers,) * chunking.count for layers in cost.layers),
        orders=(order,) * cost.stages,
    )
    check(plan)
    return plan


def _most_tokens(cost: Cost) -> int:
    """Tokens that a chunk may have beside the K and V of a document as long."""
    many = 1_000_000.0
    loads = Loads(
        tokens=np.array([many]),
        pairs=np.array([0.0]),
        cut_tokens=np.array([many]),
        document=np.array([0]),
        earlier=np.array([-1]),
        later=np.array([-1]),
        lengths=np.array([many]),
    )
    layers = np.array(cost.layers, dtype=np.float64)[:, None]
    table = cost.table_of(loads, {KEEP: layers})
    per_token = moves(table, loads, (Kind.FORWARD,), EVALUATION)[0, 0, :, 0] / many
    room = np.array(cost.budget_bytes) - np.array(cost.states_bytes)
    most = int((room / np.maximum(per_token, 1e-9)).min())
    if most < 1:
        raise PlanError("no chunk of even one token fits the memory budget for evaluation")
    return most
