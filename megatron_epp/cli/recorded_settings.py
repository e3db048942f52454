"""Comment line before a plan, from which other commands read the machine of the plan.

    # made for: --model llama3-8b --device h100-80g --tp 8

The text and the digest of the plan do not include the comment.
"""

import argparse
import shlex
import sys
from pathlib import Path

from megatron_epp.cli.flags import ASSUMPTIONS
from megatron_epp.cli.options import machine_flags
from megatron_epp.cost.catalogue.devices import DEVICES
from megatron_epp.cost.catalogue.hub_file import find_config
from megatron_epp.cost.catalogue.models import MODELS
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.network.topology import FLAT, TOPOLOGIES
from megatron_epp.ir.errors import for_terminal, require_line

_START = "# made for: "
_NAMES = (
    *("model", "like", "device", "cost_model", "tp", "cp", "ep", "vocab_parallel", "layer_kinds"),
    "memory_budget_gib",
    *("multiple", "zero", *ASSUMPTIONS),
)


def comment(arguments: argparse.Namespace, cost: Cost) -> str:
    """Return the comment line with the machine options, without pp, dp and layers (in the plan)."""
    cut = "on" if cost.layout.vocabulary_parallel else None
    chosen = vars(arguments) | {"cp": cost.layout.cp, "vocab_parallel": cut}
    chosen["multiple"] = cost.multiple
    words = _words({name: chosen[name] for name in _NAMES})
    line = _START + shlex.join(words) + "\n"
    return line if line[:-1].isprintable() else ""  # empty for a file name of several lines


def comment_in(text: str) -> str | None:
    """Return the options in the comment before a plan; None if there is no such comment."""
    for line in text.split("\n"):
        if line.startswith(_START):
            return line.removeprefix(_START)
        if line.strip() and not line.startswith("#"):
            return None
    return None


def fill_in(arguments: argparse.Namespace, settings_text: str | None) -> str:
    """Set missing options from the comment ``settings_text``; return the new options as text.

    A comment that cannot be parsed, or that names a missing file, is ignored with a warning.
    """
    if settings_text is None:
        return ""
    try:
        require_line("text", settings_text)  # it is printed
        values = vars(machine_flags(shlex.split(settings_text)))
        _require_files(values)
    except ValueError as error:
        reason = str(error).split("\n")[0]
        line = f"{arguments.plan}: its comment 'made for' is ignored: {reason}"
        print(for_terminal(line), file=sys.stderr)
        return ""
    taken = {
        name: values[name]
        for name in _NAMES
        if values[name] is not None and getattr(arguments, name) is None
    }
    if arguments.cost_model:
        for name in ASSUMPTIONS:  # belongs to the analytic cost model
            taken.pop(name, None)
    elif arguments.model or arguments.device:
        taken.pop("cost_model", None)  # was measured with the plan's model on its device
    if any((arguments.cost_model, arguments.device, arguments.tp, arguments.cp)):
        taken.pop("multiple", None)  # belongs to the plan's device and degrees
    vars(arguments).update(taken)
    return shlex.join(_words(taken))


def _require_files(values: dict) -> None:
    topologies = {FLAT, *TOPOLOGIES}
    for name, known in (
        ("model", MODELS),
        ("device", DEVICES),
        ("cost_model", {}),
        ("topology", topologies),
    ):
        value = values[name]
        find = find_config if name == "model" else _file
        if value is not None and value not in known and find(value) is None:
            raise ValueError(f"--{name.replace('_', '-')} {value}: no such file")


def _file(name: str) -> Path | None:
    return Path(name) if Path(name).is_file() else None


def _words(values: dict) -> list[str]:
    words: list[str] = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or (name in ("tp", "cp") and value == 1):
            continue
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *(repr(number).removesuffix(".0") for number in value)]
        else:
            words += [flag, str(value)]
    return words
