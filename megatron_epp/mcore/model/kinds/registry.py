"""The registry of parts of Megatron's layers: nothing else of mcore knows which there are.

A new kind of layer is a class here beside one of :mod:`megatron_epp.cost.kinds.layer`; whatever of
Megatron's layers no class holds is refused.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.model.hybrid.pattern import (
    BORDER,
    FLAG,
    FURTHER,
    depth_letters,
    layers_of_stages,
    letters_of_layers,
    pattern_of,
    placed_by_time,
)
from megatron_epp.mcore.model.kinds.base import MegatronPart
from megatron_epp.mcore.model.kinds.experts import MegatronExperts
from megatron_epp.mcore.model.kinds.latents import MegatronLatents
from megatron_epp.mcore.model.kinds.mlp import MegatronMlp
from megatron_epp.mcore.model.kinds.prediction import MegatronPrediction
from megatron_epp.mcore.model.kinds.self_attention import MegatronAttention
from megatron_epp.mcore.model.kinds.sparse import MegatronSparse
from megatron_epp.mcore.model.kinds.states import MegatronDelta, MegatronKda, MegatronMamba
from megatron_epp.mcore.model.kinds.window import MegatronWindow
from megatron_epp.mcore.model.limit import Limit

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_epp.layers.attention.layer_attention import Heads

MEGATRON_PARTS: tuple[MegatronPart, ...] = (
    MegatronAttention(),
    MegatronLatents(),
    MegatronSparse(),
    MegatronMamba(),
    MegatronDelta(),
    MegatronKda(),
    MegatronMlp(),
    MegatronExperts(),
    MegatronWindow(),
    MegatronPrediction(),
)
# Flags of what attends otherwise than attention over heads, with what they are without it.
MIXER_FLAGS = {
    name: plain
    for part in MEGATRON_PARTS
    if part.PRICED is None or part.PRICED.MIXER
    for name, plain in part.FLAGS.items()
}
# Letters of a HybridModel's layers that --epp runs.
LETTERS = {part.LETTER: part.NAME for part in MEGATRON_PARTS if part.LETTER}
# Attributes of Megatron's layers that hold what computes.
_SLOTS = ("self_attention", "cross_attention", "mixer", "mlp")


# ------------------------------------------------------------------ flags


def part_sizes(args: Any, there: Collection[MegatronPart]) -> dict[str, Any]:
    """Fields of LayerShape of a layer that has the parts ``there``."""
    found: dict[str, Any] = {}
    for part in MEGATRON_PARTS:
        found |= part.sizes(args) if part in there else part.ABSENT
    return found


def model_sizes(args: Any) -> dict[str, Any]:
    """Fields of the cost model's Model that the parts know of."""
    return {name: size for part in MEGATRON_PARTS for name, size in part.model_sizes(args).items()}


def cost_sizes(args: Any) -> dict[str, Any]:
    """Fields of Cost that the parts know of."""
    return {name: size for part in MEGATRON_PARTS for name, size in part.cost_sizes(args).items()}


def replaced_by_parts() -> tuple[ReplacedFlags, ...]:
    """Megatron's flags whose job the parts do otherwise with --epp."""
    return tuple(row for part in MEGATRON_PARTS for row in part.REPLACED)


def part_defaults(wanted: Any) -> dict[str, Any]:
    """Megatron's flags that the parts imply with --epp."""
    return {name: value for part in MEGATRON_PARTS for name, value in part.defaults(wanted).items()}


def lockstep_of(args: Any) -> int:
    """Replicas whose ranks hold one layer together, and run in lockstep; 1: each has all of it."""
    return max(part.lockstep(args) for part in MEGATRON_PARTS)


def letters_of_parts(args: Any) -> str:
    """Recompute letters of the model that only layers with some part have."""
    there = (part.PRICED for part in MEGATRON_PARTS if any(part.layers(args)))
    return "".join(priced.LETTERS for priced in there if priced is not None)


def whole_documents(args: Any) -> bool:
    """Whether the model trains on whole documents only."""
    return any(part.wants_whole(args) for part in MEGATRON_PARTS)


def require_shared(holder: Any, what: str) -> None:
    """ValueError: a part of a layer needs every document whole, so that ``what`` cannot be."""
    found = ", ".join(filter(None, (part.unshared(holder) for part in MEGATRON_PARTS)))
    if found:
        raise ValueError(f"{what}: not with {found}; expected a model without")


def limits_of_parts() -> tuple[Limit, ...]:
    """Everything that layers do not run."""
    return tuple(limit for part in MEGATRON_PARTS for limit in part.LIMITS)


def require_pattern(args: Namespace) -> None:
    """Raise a ValueError unless the pattern of ``args``, flags as they are given, is one of
    Megatron's, with segments that its pipeline's stages can share."""
    pattern = pattern_of(args)
    if pattern is None:
        return
    whole = f"{FLAG} {pattern}"
    said = [f"{letter} ({name})" for letter, name in LETTERS.items()]
    expected = f"expected a letter for each layer, {', '.join(said[:-1])} or {said[-1]}, and "
    expected += f"{BORDER} between stages"
    for letter in pattern.replace(BORDER, "").replace(FURTHER, ""):
        if letter not in LETTERS:
            raise ValueError(f"{whole}: {letter!r} stands for no layer; {expected}")
    letters = letters_of_layers(pattern)
    if not letters:
        raise ValueError(f"{whole}: no layer; {expected}")
    for part in MEGATRON_PARTS:
        if (reason := part.unfit_pattern(args, letters + depth_letters(pattern))) is not None:
            raise ValueError(f"{whole}: {reason}")
    if not placed_by_time(args):
        layers_of_stages(args)


# ------------------------------------------------------------------ Megatron's modules


def heads_of(config: Any, context: int | None = None) -> Heads:
    """Heads of a rank, sharded over tensor- and context-parallel ranks; ``context``: these, if
    other than the configuration's."""
    ranks = config.context_parallel_size if context is None else context
    known = (part.heads(config, ranks) for part in reversed(MEGATRON_PARTS))
    return next(heads for heads in known if heads is not None)


def layers_see(config: Any) -> Sequence[tuple[int | None, bool]]:
    """Views of queries in the layers of a model of ``config``, of each kind one: so many inputs in
    front of each (None: all), and whether sinks."""
    return next(filter(None, (part.layers_see(config) for part in MEGATRON_PARTS)))


def layer_parts(layer: Any) -> tuple[MegatronPart, ...]:
    """The parts that a layer of Megatron's has. ValueError: one of them is of no kind here."""
    from megatron.core.transformer.identity_op import IdentityOp

    found = []
    for slot in _SLOTS:
        module = getattr(layer, slot, None)
        if module is None or isinstance(module, IdentityOp):
            continue
        part = next((p for p in MEGATRON_PARTS if slot == p.SLOT and p.holds(module)), None)
        if part is None:
            raise ValueError(
                f"layer {layer.layer_number}: its {slot} is a {type(module).__name__}, a kind that "
                f"--epp does not run; expected {', '.join(LETTERS.values())}"
            )
        found.append(part)
    return tuple(found)


def timed_modules(layer: Any) -> Mapping[str, tuple[Any, ...]]:
    """Modules of ``layer`` whose forward is timed alone, by the name that recompute has of them."""
    found: dict[str, tuple[Any, ...]] = {}
    for part in layer_parts(layer):
        for name, attribute in part.TIMED.items():
            found[name] = (*found.get(name, ()), getattr(layer, attribute))
    return found


def changed_tensors(model: Any) -> list[tuple[Tensor, Tensor]]:
    """(tensor, copy) of what an iteration changes beside weights and gradients."""
    return [(one, one.clone()) for part in MEGATRON_PARTS for one in part.changed(model)]
