#!/usr/bin/env python3
"""List of ruff's docstring rules that files of the package do not yet follow.

    python scripts/docstring_baseline.py            compares; exit status 1 if the list is wrong
    python scripts/docstring_baseline.py --write    writes the list; refuses to make it longer

``.ruff_baseline.toml``, which pyproject.toml extends, exempts a file from the rules (D, google
convention, with D401, without D105 and D107) that it broke when they were introduced. A file that
now follows a rule must leave the list, and no file may enter the list.
"""

import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / ".ruff_baseline.toml"
HEAD = """\
# Docstring rules that a file does not keep yet (scripts/docstring_baseline.py): it only shrinks.
[lint.per-file-ignores]
"""


def broken_rules() -> dict[str, list[str]]:
    """Return the docstring rules that each file of the package breaks, without the baseline."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated"]
    for setting in ("convention = 'google'", "ignore-decorators = ['typing.override']"):
        command += ["--config", f"lint.pydocstyle.{setting}"]
    command += ["--select", "D,D401", "--ignore", "D105,D107"]
    command += ["--output-format", "json", "megatron_epp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    rules = defaultdict(set)
    for violation in json.loads(done.stdout):
        name = str(Path(violation["filename"]).relative_to(ROOT))
        rules[name].add(violation["code"])
    return {name: sorted(codes) for name, codes in sorted(rules.items())}


def listed_rules() -> dict[str, list[str]]:
    """Return the baseline: exempted rules by file."""
    if not BASELINE.exists():
        return {}
    return tomllib.loads(BASELINE.read_text())["lint"]["per-file-ignores"]


def entries(rules: dict[str, list[str]]) -> set[tuple[str, str]]:
    return {(name, code) for name, codes in rules.items() for code in codes}


def text(rules: dict[str, list[str]]) -> str:
    return HEAD + "".join(f'"{name}" = {json.dumps(codes)}\n' for name, codes in rules.items())


def main() -> int:
    now, listed = broken_rules(), listed_rules()
    if "--write" in sys.argv[1:]:
        if listed and len(entries(now)) > len(entries(listed)):
            count = len(entries(now)) - len(entries(listed))
            print(f"docstring_baseline: {count} entries more than before; fix those docstrings")
            return 1
        BASELINE.write_text(text(now))
        return 0
    kept, new = entries(listed) - entries(now), entries(now) - entries(listed)
    for name, code in sorted(kept):
        print(f"{name}: keeps {code}: run python scripts/docstring_baseline.py --write")
    for name, code in sorted(new):
        print(f"{name}: breaks {code}: ruff check --select {code} says where")
    return int(bool(kept or new))


if __name__ == "__main__":
    sys.exit(main())
