"""Selection of the layers that a scaled-down model keeps: some layers of every kind."""

from argparse import Namespace
from collections.abc import Hashable, Sequence
from typing import Any

from megatron_epp.mcore.hybrid.pattern import mtp_part_of, symbols_of_layers, with_boundaries
from megatron_epp.mcore.kinds.base import mask_of_layers
from megatron_epp.mcore.kinds.registry import LAYER_KINDS


def small_kinds(args: Namespace, stages: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    """Return values of args with which the small model has layers of the kinds in ``args``.

    ``stages`` are the numbers of layers of every stage in the full model, and ``counts`` those in
    the small model. A stage keeps layers of all its kinds if its number in ``counts`` is at least
    the number of these kinds.

    Raises:
        ValueError: A flag with one value per layer does not have a value for every layer.
    """
    masks = {part: part.layers(args) for part in LAYER_KINDS}
    bare = _without_positions(args)
    # Masks that are equal or complementary distinguish the same layers, so they count once.
    differ = {tuple(there == mask[0] for there in mask): mask for mask in (*masks.values(), bare)}
    chosen = kept_layers(list(zip(*differ.values(), strict=True)), stages, counts)
    changed: dict[str, Any] = {}
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is not None:
        changed |= _small_pattern(pattern, chosen, counts)
    for part, mask in masks.items():
        changed |= part.in_layers(args, [mask[layer] for layer in chosen])
    if args.no_rope_freq is not None:
        changed["no_rope_freq"] = [int(bare[layer]) for layer in chosen]
    return changed


def _small_pattern(pattern: str, chosen: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    """Return values of args for a HybridModel with the ``chosen`` layers, ``counts`` per stage."""
    symbols = "".join(symbols_of_layers(pattern)[layer] for layer in chosen)
    return {
        "hybrid_layer_pattern": with_boundaries(symbols + mtp_part_of(pattern), counts),
        "hybrid_override_pattern": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
    }


def _without_positions(args: Namespace) -> tuple[bool, ...]:
    """Return for each layer whether it has no rotary embedding (--no-rope-freq)."""
    every = args.no_rope_freq
    if every is None or isinstance(every, int):
        return tuple(
            every is not None and number % every == 0 for number in range(1, args.num_layers + 1)
        )
    return mask_of_layers("--no-rope-freq", every, args.num_layers)


def kept_layers(
    kinds: Sequence[tuple[Hashable, ...]], stages: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Return the indices of the full model's layers that the small model keeps.

    If possible, a stage keeps at least one layer of every kind that it has. Otherwise, the function
    selects the stage's most frequent kind first. It then always selects the kind with the most
    property values that the selected layers of the stage lack.

    Args:
        kinds: Kind of every layer: a tuple of the properties in which layers differ.
        stages: Number of layers of every stage in the full model.
        counts: Number of layers of every stage in the small model.
    """
    kept: list[int] = []
    start = 0
    for layers, few in zip(stages, counts, strict=True):
        here = list(kinds[start : start + layers])
        first = {kind: here.index(kind) for kind in reversed(here)}
        left = sorted(first, key=lambda kind: (-here.count(kind), first[kind]))
        seen: set[tuple[int, Hashable]] = set()
        chosen: list[int] = []
        while left and len(chosen) < few:
            kind = max(left, key=lambda kind: len(set(enumerate(kind)) - seen))
            left.remove(kind)
            seen |= set(enumerate(kind))
            chosen.append(first[kind])
        others = [layer for layer in range(layers) if layer not in chosen]
        kept += [start + layer for layer in sorted([*chosen, *others[: few - len(chosen)]])]
        start += layers
    return kept
