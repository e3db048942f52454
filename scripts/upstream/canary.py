#!/usr/bin/env python3
# ruff: noqa: E402  (run from anywhere: this checkout is put on the path first)
"""Changes in the newest wheels of Megatron and of frameworks, in code that this project uses.

    python scripts/upstream/canary.py
    python scripts/upstream/canary.py --checkout slime=slime
    python scripts/upstream/canary.py --accept verl

The script downloads each wheel without its dependencies, and imports nothing from it. The project
relies on Megatron's functions at patch points, every name of Megatron that the package uses, its
flags and the fields of its configuration (which show new features), and the functions of
frameworks that fingerprints.json names. The script compares each of them, without comments and
docstrings, with its fingerprint in the last version that was read (fingerprints.json; null for a
name that is new there). For changed code, it also downloads the wheel of that version, to show
what changed. A framework without wheels is compared only if --checkout names a checkout.

After a person has read the changes, and has adapted the adapter or refused the feature, --accept
NAME stores the new fingerprints.

Exit status: 0 if nothing changed; 1 if something changed; 2 if a wheel or checkout is not
available.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "upstream")]

from checkout import Checkout, Sources, used_names

from megatron_epp.mcore.patching.patch_points import ALL_PATCH_POINTS

READ = Path(__file__).with_name("fingerprints.json")
MEGATRON = "Megatron"
WHEELS = {
    MEGATRON: "megatron-core", "verl": "verl", "ms-swift": "ms-swift",
    "Megatron-Bridge": "megatron-bridge",
}  # fmt: skip
# Frameworks with an adapter, and their packages.
FRAMEWORKS = {
    "verl": "verl", "slime": "slime", "ms-swift": "swift", "Megatron-Bridge": "megatron.bridge",
    "NeMo-RL": "nemo_rl",
}  # fmt: skip
NAMES = (MEGATRON, *FRAMEWORKS)
# Classes of Megatron whose new fields may be features that the table of features does not name.
SETTINGS = (
    "megatron.core.model_parallel_config.ModelParallelConfig",
    "megatron.core.transformer.transformer_config.MLATransformerConfig",
    "megatron.core.transformer.transformer_config.TransformerConfig",
)
DEFINED, GONE = "defined", "gone"  # of what is neither function nor class; of what is not there


@dataclass(frozen=True)
class Looked:
    """Sources of a package; ``version`` is that of the wheel, or the checkout's commit."""

    sources: Sources
    version: str


# ------------------------------------------------------------------ what is relied on


def relied_on_of_megatron(sources: Sources) -> list[str]:
    """Return the dotted names of Megatron on which this project relies."""
    points = [name for one in ALL_PATCH_POINTS for name in (one.target, *one.relies_on)]
    flags = sources.functions("megatron.training.arguments", "_add_")
    return sorted({*points, *SETTINGS, *flags, *used_names(ROOT / "megatron_epp", sources)})


def fingerprint(sources: Sources, dotted: str) -> str:
    """Return a hexadecimal digest of the code of ``dotted``, or DEFINED or GONE."""
    node = sources.node(dotted)
    if node is None:
        return DEFINED if sources.defines(dotted) else GONE
    return hashlib.sha256(code(node).encode()).hexdigest()[:16]


def code(node: ast.stmt) -> str:
    """Return the code of ``node`` in a normal layout, without comments and docstrings."""
    bare = ast.parse(ast.unparse(node))
    for inner in ast.walk(bare):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner.body = [one for one in inner.body if not _is_text(one)] or [ast.Pass()]
    return ast.unparse(bare)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def differences(before: ast.stmt, after: ast.stmt) -> str:
    """Return text on the changes between two definitions of a name."""
    old, new = _members(before), _members(after)
    words = {
        "new": sorted(new.keys() - old.keys()),
        "gone": sorted(old.keys() - new.keys()),
        "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
    }
    return "; ".join(f"{word}: {', '.join(names)}" for word, names in words.items() if names)


def _members(node: ast.stmt) -> dict[str, str]:
    """Return the members of a definition, with their code.

    The members of a class are its fields and methods; those of a function are its arguments, the
    flags that it names, and its body.
    """
    if not isinstance(node, ast.ClassDef):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        arguments = node.args
        each = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        each += filter(None, (arguments.vararg, arguments.kwarg))
        texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
        flags = [one for one in texts if isinstance(one, str) and re.fullmatch(r"--[\w-]+", one)]
        told = [*(f"argument {one.arg}" for one in each), *(f"flag {flag}" for flag in flags)]
        return {"its body": code(node)} | dict.fromkeys(told, "")
    members = {"its bases": ", ".join(map(ast.unparse, (*node.decorator_list, *node.bases)))}
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            members[inner.name] = code(inner)
        elif isinstance(inner, ast.AnnAssign):
            members[ast.unparse(inner.target)] = ast.unparse(inner)
        elif isinstance(inner, ast.Assign):
            members |= {ast.unparse(target): ast.unparse(inner.value) for target in inner.targets}
    return members


# ------------------------------------------------------------------ wheels and checkouts


def wheel_of(package: str, version: str | None, folder: Path) -> Path:
    """Download a wheel of ``package`` (``version``, or the newest) to ``folder``; return its path.

    Raises:
        ValueError: if there is no wheel, or the index cannot be reached.
    """
    wanted = package if version is None else f"{package}=={version}"
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    ended = subprocess.run(
        [sys.executable, "-m", "pip", *words, wanted], capture_output=True, text=True
    )
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["pip said nothing"]
        raise ValueError(f"{wanted}: not downloaded: {lines[-1]}")
    return found_in(folder, package, version)


def found_in(folder: Path, package: str, version: str | None) -> Path:
    """Return a wheel of ``package`` in ``folder``: of ``version``, or the newest by its number.

    Raises:
        ValueError: if there is none.
    """
    stem = f"{package.replace('-', '_')}-{version or '*'}"
    wheels = sorted(folder.glob(f"{stem}-*.whl"), key=lambda wheel: numbers(version_in(wheel)))
    if not wheels:
        raise ValueError(f"{folder}: holds no {stem}-*.whl")
    return wheels[-1]


def version_in(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers in ``version``, as a sort key."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def unpacked(wheel: Path, folder: Path) -> Looked:
    """Return the Python sources of ``wheel``, unpacked into ``folder``.

    Raises:
        ValueError: if the wheel is no archive.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [one for one in archive.namelist() if one.endswith(".py")])
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel}: {error}") from error
    return Looked(Sources(folder), version_in(wheel))


def checked_out(name: str, path: Path) -> Looked:
    """Return the sources of a checkout.

    Raises:
        ValueError: if the checkout has no package of ``name``.
    """
    packages = ("megatron",) if name == MEGATRON else _packages(name)
    for root in (path, path / "src"):
        if any(root.joinpath(*package.split(".")).is_dir() for package in packages):
            if name == MEGATRON:
                return Looked(Sources(root), Checkout(root).version)
            words = ["git", "-C", str(path), "log", "-1", "--format=%h (%cs)", "--abbrev=8"]
            said = subprocess.run(words, capture_output=True, text=True).stdout.strip()
            return Looked(Sources(root), said or path.name)
    raise ValueError(f"--checkout {name}={path}: holds no package {' or '.join(packages)}")


def _packages(name: str) -> tuple[str, ...]:
    return (FRAMEWORKS[name],)


# ------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Canary:
    """Comparison of packages with the versions that were read.

    ``read`` are the fingerprints by package, ``folder`` is a folder for downloads, ``wheels`` a
    folder of existing wheels (None: download), and ``checkouts`` are the checkouts by package.
    """

    read: Mapping[str, Mapping]
    folder: Path
    wheels: Path | None
    checkouts: Mapping[str, Path]

    def look(self, name: str) -> Looked | None:
        """Return the sources of package ``name``; None if it has neither a wheel nor a checkout.

        Raises:
            ValueError: if the sources are not available.
        """
        if name in self.checkouts:
            return checked_out(name, self.checkouts[name])
        if name not in WHEELS:
            return None
        place = self.folder / name
        if self.wheels is not None:
            return unpacked(found_in(self.wheels, WHEELS[name], None), place)
        return unpacked(wheel_of(WHEELS[name], None, place), place / "sources")

    def fingerprints(self, name: str, sources: Sources) -> dict[str, str]:
        """Return the fingerprints in ``sources`` of the names on which this project relies."""
        named = relied_on_of_megatron(sources) if name == MEGATRON else self.read[name]["names"]
        return {dotted: fingerprint(sources, dotted) for dotted in named}

    def moved(self, name: str, looked: Looked, found: Mapping[str, str]) -> Iterator[str]:
        """Yield a line for each name in ``found`` that differs from the version that was read."""
        read = self.read[name]["names"]
        unlike = {one: now for one, now in found.items() if now != read.get(one)}
        if (
            self.read[name]["version"] == looked.version
        ):  # what was not relied on then was read, too
            unlike = {one: now for one, now in unlike.items() if one in read}
        before = self._as_read(name) if unlike else None
        for dotted, now in unlike.items():
            was = read.get(dotted) or (before and fingerprint(before, dotted))
            if was == now:
                continue
            yield f"{dotted}: {_said(dotted, was, now, before, looked.sources)}"

    def _as_read(self, name: str) -> Sources | None:
        """Return the sources of the wheel that was read; None if it is not available."""
        version, place = self.read[name]["version"], self.folder / f"{name} as read"
        if name not in WHEELS:
            return None
        try:
            if self.wheels is None:
                wheel = wheel_of(WHEELS[name], version, place)
            else:
                wheel = found_in(self.wheels, WHEELS[name], version)
            return unpacked(wheel, place / "sources").sources
        except ValueError:  # it was read in a checkout, or was withdrawn
            return None


def _said(dotted: str, was: str | None, now: str, before: Sources | None, after: Sources) -> str:
    """Return text on the change of a name; ``before`` are the sources that were read, or None."""
    if was is None or GONE in (was, now):
        return "not read yet" if was is None else GONE if now == GONE else "new"
    old, new = before and before.node(dotted), after.node(dotted)
    return "changed" if old is None or new is None else differences(old, new) or "changed"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these packages")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels; nothing is downloaded")
    parser.add_argument(
        "--checkout", action="append", default=[], metavar="NAME=PATH",
        help="sources of a package in the place of its newest wheel",
    )  # fmt: skip
    parser.add_argument("--accept", nargs="+", choices=NAMES, default=(), help="these were read")
    parser.add_argument("--read", type=Path, default=READ, help="the file of fingerprints")
    options = parser.parse_args(words)
    checkouts = dict(one.partition("=")[::2] for one in options.checkout)
    if strange := [name for name, path in checkouts.items() if name not in NAMES or not path]:
        parser.error(f"--checkout {strange[0]}: expected NAME=PATH with one of {', '.join(NAMES)}")
    read = json.loads(options.read.read_text())
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        places = {name: Path(path).resolve() for name, path in checkouts.items()}
        canary = Canary(read, Path(folder), options.wheels, places)
        for name in options.only:
            status = max(status, _row(canary, name, read if name in options.accept else None))
    if options.accept:
        options.read.write_text(json.dumps(read, indent=1, sort_keys=True) + "\n")
    return status


def _row(canary: Canary, name: str, accepted: dict | None) -> int:
    """Print a package's rows; put its fingerprints into ``accepted``; return the exit status."""
    row = f"{name:16} read: {canary.read[name]['version']:22} "
    try:
        looked = canary.look(name)
        if looked is None:
            print(f"{row} no wheel: clone it for --checkout {name}=PATH")
            return 0
        now = canary.fingerprints(name, looked.sources)
        lines = list(canary.moved(name, looked, now))
    except (ValueError, OSError) as error:
        print(f"{row} {error}")
        return 2
    print(f"{row} newest: {looked.version:12} {len(lines)} of {len(now)} moved")
    for line in lines:
        print(f"    {line}")
    if accepted is None:
        return 1 if lines else 0
    accepted[name] = {"version": looked.version, "names": now}
    return 0


if __name__ == "__main__":
    sys.exit(main())
