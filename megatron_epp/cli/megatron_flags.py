"""Check that a flag exists in Megatron or megatron_epp, before Megatron is imported.

Megatron's own parser is exact, but runs only after torch and Megatron are loaded, in every process
of the command. Every flag occurs in Megatron's source, as ``--its-name`` or as the field
``its_name`` of a configuration. A word that occurs nowhere in the source is not a flag.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_epp.cli.options import PROGRAM, UsageError
from megatron_epp.flag_fields import did_you_mean

# A flag in source text. _FIELD is a field of a class, from which Megatron makes a flag.
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*")
_PACKAGES = ("certify", "mcore")  # packages whose commands have flags of their own
_FIELD = re.compile(r"^ {4}([a-z]\w*) *:", re.MULTILINE)


def require_known(command: str, words: Sequence[str]) -> None:
    """Raise a UsageError for a ``--word`` that occurs neither in Megatron nor in megatron_epp."""
    flags = [word.split("=")[0] for word in words if word.startswith("--") and word != "--"]
    roots = _roots()
    if not flags or len(roots) <= len(_PACKAGES):
        return  # nothing to check, or no Megatron, which the command itself reports
    known = {"--help"}
    for root, pattern in roots:
        for path in root.glob(pattern):
            text = path.read_text(encoding="utf-8", errors="replace")
            known.update(_FLAG.findall(text))
            known.update("--" + name.replace("_", "-") for name in _FIELD.findall(text))
    for flag in flags:
        dashed = flag.replace("_", "-")
        denied = {dashed.replace(start, "--", 1) for start in ("--no-", "--disable-")}
        if not {flag, dashed, *denied} & known:
            hint = did_you_mean(flag, sorted(known), f"see {PROGRAM} {command} --help", cutoff=0.8)
            raise UsageError(f"{command}: unknown option {flag!r}, here and in Megatron; {hint}")


def _roots() -> list[tuple[Path, str]]:
    """Return the folders and patterns of files that define flags, in megatron_epp and Megatron."""
    patterns = [(Path(__file__).parents[1] / package, "**/*.py") for package in _PACKAGES]
    spec = find_spec("megatron")  # a top-level name, so nothing is imported
    for folder in spec.submodule_search_locations or () if spec else ():
        root = Path(folder)
        patterns += [(root / "training", "**/*.py"), (root / "core", "**/*.py")]
    return [(root, pattern) for root, pattern in patterns if root.is_dir()]
