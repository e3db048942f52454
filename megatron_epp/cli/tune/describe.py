"""Description of a model: sizes, parameters, and the Megatron flags that build the model."""

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Sequence

from megatron_epp.cost.analytic import STATES
from megatron_epp.cost.catalogue.hub_file import HubConfig
from megatron_epp.cost.catalogue.megatron_flags import model_flags
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.ir.errors import printable
from megatron_epp.show.table import COLUMNS
from megatron_epp.show.units import GIB

NOT_PLANNED = (
    "smaller states of adapters (LoRA), an optimizer on the host, fp8 weights, ZeRO 3 and FSDP"
)
_INDENT = 12


def states_bytes(model: Model) -> float:
    """Return the bytes of one copy of weights, gradients and optimizer states of the model."""
    return (STATES.zero1_resident + STATES.zero1_sharded) * model.parameters


def labelled(label: str, text: str) -> str:
    """Return ``label`` and ``text``, wrapped to ``COLUMNS`` with the text indented."""
    return textwrap.fill(
        printable(text),
        COLUMNS,
        initial_indent=label.ljust(_INDENT),
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
    )


def print_model(model: Model, config: HubConfig | None, arguments: argparse.Namespace) -> int:
    """Print a description of the model and the Megatron flags that build it; return 0.

    Raises:
        ValueError: the flags would build another model, and no --like says which to assume. The
            description is printed, the flags are not.
    """
    of_model = model_flags(model, config)
    others = of_model.unsaid if arguments.like is None else ()
    words = [] if others else [word for group in of_model.groups for word in group]
    notes = [printable(note) for note in (config.notes if config is not None else ())]
    if arguments.json:
        facts = {
            "model": model.name,
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
            "states_bytes": states_bytes(model),
            "flags": words,
            "entry": of_model.entry,
            "unsaid": list(of_model.unsaid),
            "assumed": list(of_model.assumed),
            "notes": notes,
        }
        print(json.dumps(facts, indent=1))
        return _require_sayable(others)
    print(model_summary(model))
    print(labelled("sizes", sizes_text(model)))
    if kinds := kinds_text(model):
        print(labelled("layers", kinds))
    for note in notes:
        print(labelled("note", note))
    if of_model.assumed:
        print(labelled("assumed", f"not said, so taken: {', '.join(of_model.assumed)}"))
    resident, sharded = STATES.zero1_resident, STATES.zero1_sharded
    print(
        labelled(
            "states",
            f"{resident + sharded:g} bytes a parameter, {states_bytes(model) / GIB:.1f} GiB in "
            f"all: {resident:g} on every device that holds the weight, {sharded:g} shared over "
            "cp x dp",
        )
    )
    print(labelled("not planned", NOT_PLANNED))
    named = (
        arguments.model if arguments.like is None else f"{arguments.model} --like {arguments.like}"
    )
    if of_model.unsaid:
        print(
            labelled(
                "trains",
                f"not by Megatron's flags alone, which cannot say: {'; '.join(of_model.unsaid)}. "
                "It is planned all the same",
            )
        )
    else:
        print(
            labelled(
                "trains",
                f"with --epp as -m {of_model.entry}; proof on CPUs: python -m megatron_epp certify "
                f"--pp 2 --model {named}",
            )
        )
    if words:
        print("flags")
        print(flags_text(words))
    return _require_sayable(others)


def _require_sayable(unsaid: Sequence[str]) -> int:
    """Return 0; raise a ValueError if the model has properties that Megatron's flags cannot say."""
    if unsaid:
        raise ValueError(
            f"--model: no flags are printed, because Megatron's cannot say: {'; '.join(unsaid)}; "
            "--like MODEL_TYPE prints those of the nearest model of a config.json"
        )
    return 0


def model_summary(model: Model) -> str:
    """Return one line with the model's name and its total and active parameters."""
    billion, active = model.parameters / 1e9, model.active_parameters / 1e9
    return f"{model.name}: {billion:.4g} billion parameters, {active:.4g} active for a token"


def sizes_text(model: Model) -> str:
    """Return the sizes that all layers have in common."""
    grouped = f" in {model.kv_heads} groups" if model.kv_heads != model.heads else ""
    return (
        f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads{grouped} of "
        f"{model.head_size}, MLP {model.ffn_hidden}{', gated' * model.gated}, vocabulary "
        f"{model.vocabulary}, {'' if model.tied else 'not '}tied"
    )


def kinds_text(model: Model) -> str:
    """Return the layer kinds with their number and special sizes, separated by semicolons."""
    parts = []
    for kind, count in Counter(model.layer_kinds).items():
        shape = model.kinds[kind]
        default = type(shape)()
        sizes = [
            f"{name.replace('_', ' ')} {value}"
            for name, value in vars(shape).items()
            if value != getattr(default, name)
        ]
        parts.append(f"{count} {kind} ({', '.join(sizes) or 'plain'})")
    return "; ".join(parts)


def flags_text(words: list[str]) -> str:
    """Return flags quoted for a shell, several per line."""
    import shlex

    # A flag and its values stay on one line.
    groups: list[str] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append(word)
        else:
            groups[-1] += f" {shlex.quote(word)}"
    lines = [""]
    for group in groups:
        if lines[-1] and len(lines[-1]) + len(group) + 7 > COLUMNS:
            lines.append("")
        lines[-1] += f"{' ' * bool(lines[-1])}{group}"
    return " \\\n".join(f"    {line}" for line in lines)
