"""Recompute choices, one letter for each layer of a stage, run-length in text."""

import re
from functools import lru_cache
from itertools import groupby

from megatron_epp.ir.errors import PlanError, quoted

KEEP = "k"  # everything saved in forward
FULL = "f"  # only the layer's input saved, the layer run again in backward
# Named selective sets: saved but for the named modules, which run again in backward.
SELECTIVE = {
    "c": ("core_attn",),
    "m": ("mlp",),
    "n": ("layernorm",),
    "a": ("core_attn", "layernorm"),
    "b": ("mlp", "layernorm"),
    # What makes Q, K and V of latents; a layer whose attention has none keeps everything.
    "u": ("mla_up_proj",),
    # Between the two products of an expert; a layer without experts keeps everything.
    "e": ("moe_act",),
}
# Everything saved, but in the host's memory between F and B: copied out while F runs, back while
# B (or I) runs. The K and V that later slices attend to stay on the device.
OFFLOAD = "o"
IN_FLIGHT = 2  # offloaded layers on the device while an op runs: one in use, one under way
# Whose layers run their MLP again in backward: a layer of experts then exchanges rows once more.
MLP_RECOMPUTED = frozenset({FULL} | {mode for mode, run in SELECTIVE.items() if "mlp" in run})
MODES = KEEP + FULL + "".join(SELECTIVE) + OFFLOAD
MOST_LAYERS = 9999  # of a stage: four digits in a choice

_RUN = re.compile(rf"([1-9][0-9]{{0,3}})([{MODES}])")


def offload_among(choice: str, count: int) -> str:
    """``choice`` with ``count`` offloaded layers dealt evenly among its own, the first one first:
    each copy then has the layers up to the next one to hide behind."""
    layers, others = len(choice) + count, iter(choice)
    return "".join(
        OFFLOAD if layer * count % layers < count else next(others) for layer in range(layers)
    )


# A plan has few choices and many chunks: each is read and printed once, and stored once.
@lru_cache(maxsize=1024)
def format_recompute(choice: str) -> str:
    """``"fffk"`` as ``3f1k``; a stage without layers as ``0k``."""
    return "".join(f"{len(list(run))}{mode}" for mode, run in groupby(choice)) or "0k"


@lru_cache(maxsize=1024)
def parse_recompute(text: str) -> str:
    """The inverse of :func:`format_recompute`; refuses what it would not print."""
    choice = "" if text == "0k" else "".join(n_l[1] * int(n_l[0]) for n_l in _RUN.findall(text))
    if format_recompute(choice) != text:
        raise PlanError(
            f"{quoted(text)} is no recompute choice; expected runs of a count and one of "
            f"{' '.join(MODES)}, as in 3f1k"
        )
    return choice
