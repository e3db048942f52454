"""Registry of the classes that patch Megatron's modules: at most one class per layer kind.

A model is refused if one of its layers has a module that no layer kind supports.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_epp.mcore.kinds.attention.module import AttentionModule
from megatron_epp.mcore.kinds.base import KindModule
from megatron_epp.mcore.kinds.mla.module import MLAModule
from megatron_epp.mcore.kinds.mlp.module import MLPModule
from megatron_epp.mcore.kinds.moe.module import MoEModule
from megatron_epp.mcore.kinds.registry import LAYER_KINDS
from megatron_epp.mcore.patching.releases import ALL_KINDS, installed_version, numbers_of

VERSION = installed_version()
RELEASE = numbers_of(VERSION)


def _recent_kinds() -> tuple[KindModule, ...]:
    """Return the kinds that need modules of Megatron 0.19; () for earlier releases."""
    if RELEASE < ALL_KINDS:
        return ()
    from megatron_epp.mcore.kinds.dsa.module import DSAModule
    from megatron_epp.mcore.kinds.ssm.module import GatedDeltaNetModule, MambaModule

    return (  # a line each, as in KIND_MODULES
        GatedDeltaNetModule(),
        MambaModule(),
        DSAModule(),
    )


# Most specific kinds first: of several kinds that support a module, the first is used.
KIND_MODULES: tuple[KindModule, ...] = (
    MLPModule(),
    MoEModule(),
    *_recent_kinds(),
    MLAModule(),
    AttentionModule(),
)
# Attributes of Megatron's layers that are modules of a layer kind.
_SLOTS = ("self_attention", "cross_attention", "mixer", "mlp")


def kinds_of_layer(layer: Any) -> tuple[KindModule, ...]:
    """Return the kinds of the modules in one of Megatron's layers.

    Raises:
        ValueError: The layer has a module that no kind supports.
    """
    kinds = []
    for slot in _SLOTS:
        module = getattr(layer, slot, None)
        if module is None or isinstance(module, IdentityOp):
            continue
        kind = next((k for k in KIND_MODULES if slot == k.KIND.SLOT and k.holds(module)), None)
        if kind is None or kind.KIND.SINCE > RELEASE:
            known = (one for one in LAYER_KINDS if one.SYMBOL and one.SINCE <= RELEASE)
            old = "" if RELEASE >= ALL_KINDS else f" with megatron-core {VERSION}"
            raise ValueError(
                f"layer {layer.layer_number}: its {slot} is a {type(module).__name__}, a kind that "
                f"--epp does not run{old}; expected {', '.join(one.NAME for one in known)}"
            )
        kinds.append(kind)
    return tuple(kinds)


def timed_modules(layer: Any) -> Mapping[str, tuple[Any, ...]]:
    """Return name in selective recompute -> modules of ``layer``, for the modules to time."""
    modules: dict[str, tuple[Any, ...]] = {}
    for kind in kinds_of_layer(layer):
        for name, attribute in kind.KIND.TIMED.items():
            modules[name] = (*modules.get(name, ()), getattr(layer, attribute))
    return modules


def changed_tensors(model: Any) -> list[tuple[Tensor, Tensor]]:
    """Return pairs (tensor, copy) of the tensors that an iteration changes.

    Weights and gradients are not among them.
    """
    return [(one, one.clone()) for kind in KIND_MODULES for one in kind.changed(model)]
