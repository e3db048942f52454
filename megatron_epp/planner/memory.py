"""What fits a stage at all, and what to say where a document does not."""

import numpy as np

from megatron_epp.cost.cost import Cost
from megatron_epp.cost.devices import GIB
from megatron_epp.cost.loads import Loads
from megatron_epp.ir import FULL, PlanError
from megatron_epp.planner.work import WHOLE, moves

# Bytes are linear in tokens but for rounding up; taking them of many tokens hides the rounding.
_MANY = 1_000_000


def _alone(cost: Cost, tokens: float, cut: bool) -> np.ndarray:
    """[stages]: bytes beside residents where one chunk of ``tokens`` runs alone, all recomputed."""
    loads = Loads(
        tokens=np.array([tokens]),
        pairs=np.array([0.0]),
        cut_tokens=np.array([tokens if cut else 0.0]),
        document=np.array([0 if cut else -1]),
        earlier=np.array([-1]),
        later=np.array([-1]),
        lengths=np.array([tokens]),
    )
    layers = np.array(cost.layers, dtype=np.float64)[:, None]
    held = moves(cost.table_of(loads, {FULL: layers}), loads, WHOLE)[..., 0]
    forward = held[0, 0]
    backward = forward - held[0, 1] + held[1, 0]
    return np.maximum(forward, backward)


def most_tokens(cost: Cost) -> int:
    """The largest chunk of whole documents that every stage can hold with all recomputed."""
    room = np.array(cost.budget_bytes) - np.array(cost.states_bytes)
    per_token = _alone(cost, _MANY, cut=False) / _MANY
    return max(1, int((room / np.maximum(per_token, 1e-9)).min()))


def require_fit(cost: Cost, documents: tuple[int, ...]) -> None:
    """A PlanError that names the document and the stage where one cannot be trained at all.

    Slices of a document are all alive between its last forward and its first backward, so cutting
    finer does not help: with everything recomputed each still holds its layers' inputs, K and V.
    """
    longest = max(range(len(documents)), key=lambda d: documents[d])
    tokens = documents[longest]
    needed = np.minimum(_alone(cost, tokens, cut=True), _alone(cost, tokens, cut=False))
    needed += np.array(cost.states_bytes)
    for stage, budget in enumerate(cost.budget_bytes):
        if needed[stage] > budget:
            raise PlanError(
                f"document {longest} of {tokens} tokens on stage {stage} needs at least "
                f"{needed[stage] / GIB:.4g} GiB with everything recomputed; the budget is "
                f"{budget / GIB:.4g} GiB: raise it, use more devices, or a shorter context"
            )
