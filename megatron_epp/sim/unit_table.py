"""Table of op times without a cost model: F takes 1 unit, B 2, I and W 1, H and G 1/4."""

import numpy as np

from megatron_epp.ir import COMPUTE, DOCUMENT_ITEMS, Item, Kind, Payload, Plan, Table

UNITS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.INPUT: 1.0,
    Kind.WEIGHT: 1.0,
    Kind.HEAD: 0.25,
    Kind.HEAD_WEIGHT: 0.25,
}


def unit_table(plan: Plan) -> Table:
    """Return a table of unit times for ``plan``, to draw its order without a cost model.

    All chunks take the same time. Messages and recompute take no time, and all bytes are 0.
    """
    shape = (plan.stages, len(plan.chunks))
    links = np.zeros((max(0, plan.stages - 1), len(plan.chunks)))
    ring = np.zeros((plan.stages, len(plan.chunks)))
    return Table(
        seconds={kind: np.full(shape, UNITS[kind]) for kind in COMPUTE},
        recompute_seconds=np.zeros(shape),
        comm_seconds={kind: np.zeros(shape) for kind in COMPUTE},
        link_seconds={p: ring if p is Payload.HEAD else links for p in Payload},
        link_latency_seconds=0.0,
        held_bytes={
            item: np.zeros((plan.stages, len(plan.documents)) if item in DOCUMENT_ITEMS else shape)
            for item in Item
            if item is not Item.WORKSPACE
        },
        workspace_bytes={kind: np.zeros(shape) for kind in COMPUTE},
        resident_bytes=(0.0,) * plan.stages,
    )
