"""Registry of the layer kinds; the rest of mcore does not depend on specific kinds.

A new layer kind needs an object in ``LAYER_KINDS``. If the kind has a cost, modules or a
certificate, it also needs a class in :mod:`megatron_epp.cost.kinds`, :mod:`.modules` or
:mod:`.certificates`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.hybrid.pattern import (
    BOUNDARY,
    FLAG,
    MTP_SEPARATOR,
    layers_of_stages,
    mtp_symbols,
    pattern_of,
    placed_by_time,
    symbols_of_layers,
)
from megatron_epp.mcore.kinds.attention.kind import AttentionKind
from megatron_epp.mcore.kinds.base import LayerKind
from megatron_epp.mcore.kinds.dsa.kind import DSAKind
from megatron_epp.mcore.kinds.limit import Limit
from megatron_epp.mcore.kinds.mla.kind import MLAKind
from megatron_epp.mcore.kinds.mlp.kind import MLPKind
from megatron_epp.mcore.kinds.moe.kind import MoEKind
from megatron_epp.mcore.kinds.mtp.kind import MTPKind
from megatron_epp.mcore.kinds.ssm.kind import GatedDeltaNetKind, MambaKind
from megatron_epp.mcore.kinds.window.kind import WindowKind

if TYPE_CHECKING:
    from megatron_epp.layers.attention.layer_attention import Heads

LAYER_KINDS: tuple[LayerKind, ...] = (
    AttentionKind(),
    MLAKind(),
    DSAKind(),
    MambaKind(),
    GatedDeltaNetKind(),
    MLPKind(),
    MoEKind(),
    WindowKind(),
    MTPKind(),
)
# Layer symbols of a HybridModel that --epp supports.
SYMBOLS = {part.SYMBOL: part.NAME for part in LAYER_KINDS if part.SYMBOL}


# ------------------------------------------------------------------ flags


def kind_sizes(args: Any, there: Collection[LayerKind]) -> dict[str, Any]:
    """Return the fields of LayerShape for a layer that consists of the kinds ``there``."""
    sizes: dict[str, Any] = {}
    for part in LAYER_KINDS:
        sizes |= part.sizes(args) if part in there else part.ABSENT
    return sizes


def model_sizes(args: Any) -> dict[str, Any]:
    """Return the fields of the cost model's Model that depend on the layer kinds, by name."""
    return {name: size for part in LAYER_KINDS for name, size in part.model_sizes(args).items()}


def expert_ranks_of(args: Any) -> int:
    """Return the number of ranks over which a layer's experts are sharded; 1 without sharding."""
    return max(kind.expert_ranks(args) for kind in LAYER_KINDS)


def groups_products(args: Any) -> bool:
    """Return whether one kernel of Transformer Engine runs the products of several experts."""
    return args.moe_grouped_gemm or args.hybrid_layer_pattern is not None


def draws_by_default_generator(args: Any) -> bool:
    """Return whether Megatron draws first weights (routers, sinks) by torch's default generator."""
    return bool(args.num_experts) or args.softmax_type == "learnable"


def stacks_experts(args: Any) -> bool:
    """Return whether grouped experts of a rank are one product per linear (moe/stacked.py)."""
    return (
        groups_products(args)
        and args.transformer_impl != "local"
        and args.moe_token_dispatcher_type in ("alltoall", "allgather")
        and args.expert_tensor_parallel_size == 1
        and not (args.add_bias_linear or args.fp8)
    )


def priced_flags(args: Any) -> dict[str, Any]:
    """Return the flags of layer kinds that ``cost.analytic.profile`` takes: argument -> value."""
    return {name: getattr(args, name) for kind in LAYER_KINDS for name in kind.PRICED_FLAGS}


def replaced_by_kinds() -> tuple[ReplacedFlags, ...]:
    """Return the flags of Megatron that --epp replaces because of a layer kind."""
    return tuple(row for part in LAYER_KINDS for row in part.REPLACED)


def kind_defaults(wanted: Any) -> dict[str, Any]:
    """Return the values of args, by name, that --epp sets for the layer kinds of ``wanted``."""
    return {name: value for part in LAYER_KINDS for name, value in part.defaults(wanted).items()}


def lockstep_of(args: Any) -> int:
    """Return the number of neighbouring replicas that share experts and therefore run in lockstep.

    Megatron assigns experts to the ranks of a stage in rank order. The result is 1 if every replica
    has all experts.
    """
    if (ranks := expert_ranks_of(args)) == 1:
        return 1
    return max(1, ranks // (args.tensor_model_parallel_size * args.context_parallel_size))


def modes_of_kinds(args: Any) -> str:
    """Return the letters of the recompute modes that the model's layer kinds add to the others."""
    there = (part.PRICED for part in LAYER_KINDS if any(part.layers(args)))
    return "".join(priced.MODES for priced in there if priced is not None)


def require_shared(holder: Any, what: str, ahead: bool = False) -> None:
    """Raise a ValueError if a layer kind does not support shared prefixes.

    Args:
        holder: Megatron's args or configuration.
        what: Name of the feature that shares prefixes; the message begins with it.
        ahead: Whether documents with the same prefix also have the same tokens directly after it,
            as far as MTP layers predict these tokens from rows of the prefix.
    """
    refused = ", ".join(filter(None, (part.unshared(holder, ahead) for part in LAYER_KINDS)))
    if refused:
        raise ValueError(f"{what}: not with {refused}; expected a model without")


def limits_of_kinds() -> tuple[Limit, ...]:
    """Return the limits of all layer kinds."""
    return tuple(limit for part in LAYER_KINDS for limit in part.LIMITS)


def require_pattern(args: Namespace) -> None:
    """Raise a ValueError if the layer pattern is invalid or does not fit the pipeline.

    Args:
        args: Flags as given on the command line. Without a pattern, this function does nothing.
    """
    pattern = pattern_of(args)
    if pattern is None:
        return
    flag_text = f"{FLAG} {pattern}"
    *some, last = (f"{symbol} ({name})" for symbol, name in SYMBOLS.items())
    expected = (
        f"expected a letter for each layer, {', '.join(some)} or {last}, and {BOUNDARY} between "
        f"stages"
    )
    for symbol in pattern.replace(BOUNDARY, "").replace(MTP_SEPARATOR, ""):
        if symbol not in SYMBOLS:
            raise ValueError(f"{flag_text}: {symbol!r} is not a layer symbol; {expected}")
    symbols = symbols_of_layers(pattern)
    if not symbols:
        raise ValueError(f"{flag_text}: no layer; {expected}")
    for part in LAYER_KINDS:
        if (reason := part.unfit_pattern(args, symbols + mtp_symbols(pattern))) is not None:
            raise ValueError(f"{flag_text}: {reason}")
    if not placed_by_time(args):
        layers_of_stages(args)


# ------------------------------------------------------------------ Megatron's modules


def heads_of(config: Any, context: int | None = None) -> Heads:
    """Return the attention heads of one rank, after sharding over TP and CP ranks.

    Args:
        config: Megatron's configuration.
        context: Number of context-parallel ranks; None selects ``config.context_parallel_size``.
    """
    ranks = config.context_parallel_size if context is None else context
    known = (part.heads(config, ranks) for part in reversed(LAYER_KINDS))
    return next(heads for heads in known if heads is not None)


def layers_see(config: Any) -> Sequence[tuple[int | None, bool]]:
    """Return the distinct pairs (window in tokens or None, has sinks) of attention layers."""
    return next(filter(None, (part.layers_see(config) for part in LAYER_KINDS)))
