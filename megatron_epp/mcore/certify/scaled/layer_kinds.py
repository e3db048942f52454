"""Which of a model's layers are kept where stages are scaled down: some of every kind."""

from argparse import Namespace
from collections.abc import Hashable, Sequence
from typing import Any

# Inputs that a query sees in front of it: drawn slices are shorter and longer.
WINDOW = 7


def small_kinds(args: Namespace, stages: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    """The values that keep layers of every kind of Megatron's parsed ``args``; ``stages`` and
    ``counts``: layers of every stage before and after. ValueError: one line."""
    experts = pattern("--moe-layer-freq", args.moe_layer_freq, args.num_layers)
    skip = args.window_attn_skip_freq
    windows = [1] * args.num_layers
    if isinstance(skip, int):
        windows = [int(number % skip != 0) for number in range(1, args.num_layers + 1)]
    elif skip is not None:
        windows = pattern("--window-attn-skip-freq", skip, args.num_layers)
    chosen = kept_layers(list(zip(experts, windows, strict=True)), stages, counts)
    changed: dict[str, Any] = {}
    if args.num_experts:
        kept = [experts[layer] for layer in chosen]
        changed["moe_layer_freq"] = 1 if all(kept) else kept
    if args.window_size and args.window_size[0] >= 1:
        changed["window_size"] = (WINDOW, *args.window_size[1:])
        if skip is not None:
            changed["window_attn_skip_freq"] = [windows[layer] for layer in chosen]
    return changed


def kept_layers(
    kinds: Sequence[Hashable], stages: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """The numbers of the kept layers; ``kinds`` of all layers, ``stages`` and ``counts``: layers of
    every stage before and after. Of every kind that a stage has at least one where that is
    possible, else of those that most of its layers are of."""
    kept: list[int] = []
    start = 0
    for layers, few in zip(stages, counts, strict=True):
        here = list(kinds[start : start + layers])
        first = {kind: here.index(kind) for kind in reversed(here)}
        common = sorted(first, key=lambda kind: (-here.count(kind), first[kind]))
        chosen = [first[kind] for kind in common[:few]]
        others = [layer for layer in range(layers) if layer not in chosen]
        kept += [start + layer for layer in sorted([*chosen, *others[: few - len(chosen)]])]
        start += layers
    return kept


def pattern(flag: str, frequency: int | Sequence[int], layers: int) -> list[int]:
    """1 for each of the model's layers that ``frequency`` means, else 0; a number means the
    first of so many layers. ValueError: one line that names ``flag``."""
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in range(layers)]
    if len(frequency) != layers:
        raise ValueError(f"{flag}: {len(frequency)} layers; expected --num-layers, {layers}")
    return list(frequency)
