"""Faults of what ties documents to those that they continue."""

from torch import Tensor

from megatron_epp.ir import Plan
from megatron_epp.runtime.kv_store import Store
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def lose_a_branch(add_gradient, store: Store, layer: int, document: int, *gradients) -> None:
    if document not in store.readers or not store.has_gradient(layer, document):
        add_gradient(store, layer, document, *gradients)


def mistake_values(context, store: Store, layer: int, document: int, *where) -> tuple[Tensor, ...]:
    key, value = context(store, layer, document, *where)
    return key, value.roll(1, 0) if document in store.readers else value


FAULTS: Faults = {
    "nothing": nothing,
    # Of gradients that several leave for the K and V of a prefix the first alone arrives.
    "lose a branch": fault(Store, "add_gradient", lose_a_branch),
    # Positions of a branch begin at 0.
    "begin anew": fault(Plan, "offset", lambda offset, plan, document: 0),
    # Of documents one after the other before it a branch sees the last alone.
    "see the nearest": fault(Plan, "prefix_of", lambda prefix_of, *where: prefix_of(*where)[-1:]),
    # Inputs of a prefix have each other's values.
    "mistake values": fault(Store, "context", mistake_values),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
