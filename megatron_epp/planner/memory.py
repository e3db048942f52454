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
    """[stages]: bytes beside residents where one document runs alone, all recomputed: whole, or
    cut so finely that all of it is context of its last slice."""
    sizes = [tokens, 0.0] if cut else [tokens]
    loads = Loads(
        tokens=np.array(sizes),
        pairs=np.zeros(len(sizes)),
        cut_tokens=np.array(sizes if cut else [0.0]),
        document=np.array([0, 0] if cut else [-1]),
        earlier=np.array([-1, 0] if cut else [-1]),
        later=np.array([1, -1] if cut else [-1]),
        lengths=np.array([tokens]),
    )
    layers = np.tile(np.array(cost.layers, dtype=np.float64)[:, None], (1, len(sizes)))
    made, freed = moves(cost.table_of(loads, {FULL: layers}), loads, WHOLE).swapaxes(0, 1)
    forward, last = made[0].sum(axis=1), (made[0] - freed[0]).sum(axis=1)
    return np.maximum(forward, last + made[1][:, -1])


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
