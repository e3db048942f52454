"""Recompute modes, one letter for each layer of a stage, run-length encoded in text."""

import re
from functools import lru_cache
from itertools import groupby

from megatron_epp.ir.errors import PlanError, quoted

KEEP = "k"  # all activations are saved
FULL = "f"  # only the layer's input is saved; backward recomputes the layer
# Selective recompute: all is saved except for the named modules, which backward recomputes.
SELECTIVE = {
    "c": ("core_attn",),
    "m": ("mlp",),
    "n": ("layernorm",),
    "a": ("core_attn", "layernorm"),
    "b": ("mlp", "layernorm"),
    # The up-projection to Q, K and V in multi-latent attention; other layers save everything.
    "u": ("mla_up_proj",),
    # The activation function of the experts; a layer without experts saves everything.
    "e": ("moe_act",),
}
# All is saved, but in host memory between F and B. The layer's activations are copied to the host
# during F, and back during B (or I). The K and V that later slices attend to stay on the device.
OFFLOAD = "o"
IN_FLIGHT = 2  # offloaded layers on the device while an op runs: one in use, one being copied
# Modes that recompute the MLP in backward; a MoE layer then repeats its all-to-all.
MLP_RECOMPUTED = frozenset({FULL} | {mode for mode, run in SELECTIVE.items() if "mlp" in run})
MODES = KEEP + FULL + "".join(SELECTIVE) + OFFLOAD
MOST_LAYERS = 9999  # of a stage: four digits in a choice

_RUN = re.compile(rf"([1-9][0-9]{{0,3}})([{MODES}])")


def offload_among(choice: str, count: int) -> str:
    """Return the modes ``choice`` (one letter per layer) with ``count`` offloaded layers inserted.

    Offloaded layers are at even distances, from layer 0 on. The copy of an offloaded layer can
    then overlap with the computation of all layers up to the next offloaded layer.
    """
    layers, others = len(choice) + count, iter(choice)
    return "".join(
        OFFLOAD if layer * count % layers < count else next(others) for layer in range(layers)
    )


# Plans have few distinct choices and many chunks: each choice is parsed, printed and stored once.
@lru_cache(maxsize=1024)
def format_recompute(choice: str) -> str:
    """Return the text of the modes ``choice``: ``3f1k`` for ``"fffk"``, ``0k`` for no layers."""
    return "".join(f"{len(list(run))}{mode}" for mode, run in groupby(choice)) or "0k"


@lru_cache(maxsize=1024)
def parse_recompute(text: str) -> str:
    """Parse the output of :func:`format_recompute`; raise a PlanError for any other text."""
    choice = "" if text == "0k" else "".join(n_l[1] * int(n_l[0]) for n_l in _RUN.findall(text))
    if format_recompute(choice) != text:
        raise PlanError(
            f"{quoted(text)} is not a recompute choice; expected runs of a count and one of "
            f"{' '.join(MODES)}, as in 3f1k"
        )
    return choice
