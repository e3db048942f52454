"""Reader of the sources of a Megatron that is not imported: a checkout, or the installed wheel.

The reader finds in files what ``inspect`` finds in a running Megatron, so any checkout can be
checked on any host. It checks that each patch point's sources are those of a release that was read
(releases.py), and that every name that this package imports from Megatron exists.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_epp.mcore.patching.patch_points import (
    PatchPoint,
    fingerprint_of,
    is_patched,
    without_layout,
)
from megatron_epp.mcore.patching.releases import RELEASES, Release, release_of

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_VERSION_PARTS = ("MAJOR", "MINOR", "PATCH", "PRE_RELEASE")
_MOST_HOPS = 10  # from an import to the definition


@dataclass(frozen=True)
class Sources:
    """Packages below the folder ``root``, which are read and not imported."""

    root: Path

    def node(self, dotted: str) -> _Definition | None:
        """Return the definition of a function or class, or None. Imports are followed.

        Raises:
            ValueError: if a file on the way is not Python.
        """
        found = self._definition(dotted)
        return None if found is None else found[1]

    def is_module(self, dotted: str) -> bool:
        """Return whether ``dotted`` is a module or package."""
        path, names = self._module(dotted)
        return path is not None and not names

    def functions(self, module: str, prefix: str) -> list[str]:
        """Return the dotted names of the functions of ``module`` that begin with ``prefix``."""
        path, names = self._module(module)
        body = [] if path is None or names else _tree(path).body
        found = (node.name for node in body if isinstance(node, ast.FunctionDef))
        return [f"{module}.{name}" for name in found if name.startswith(prefix)]

    def source(self, dotted: str) -> str:
        """Return the source of a function or class, or "" if there is none. Imports are followed.

        The source is that of ``inspect.getsource``, except for its layout.
        """
        found = self._definition(dotted)
        if found is None:
            return ""
        path, node = found
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        lines = path.read_text(encoding="utf-8").splitlines()[first - 1 : node.end_lineno]
        return without_layout("\n".join(lines))

    def defines(self, dotted: str) -> bool:
        """Return whether ``dotted`` is a module, or a name that one defines, assigns or imports."""
        path, names = self._module(dotted)
        if path is None or not names:
            return path is not None
        return len(names) == 1 and names[0] in _names(_tree(path))

    def _definition(self, dotted: str, hops: int = 0) -> tuple[Path, _Definition] | None:
        path, names = self._module(dotted)
        if path is None or not names or hops > _MOST_HOPS:
            return None
        scope: ast.Module | _Definition = _tree(path)
        for depth, name in enumerate(names):
            inner = _defined(scope, name)
            if inner is None:
                if depth:
                    return None
                origin = self._imported_from(path, name)
                rest = ".".join(names[1:])
                if origin is None:
                    return None
                return self._definition(f"{origin}.{rest}" if rest else origin, hops + 1)
            scope = inner
        assert not isinstance(scope, ast.Module), "there is at least one name"
        return path, scope

    def _module(self, dotted: str) -> tuple[Path | None, list[str]]:
        """Return the file of the longest prefix of ``dotted`` that is a module, and the rest."""
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            place = self.root.joinpath(*parts[:length])
            for path in (place.with_suffix(".py"), place / "__init__.py"):
                if path.is_file():
                    return path, parts[length:]
            if place.is_dir() and length == len(parts):
                return place, []  # a package without __init__
            # helpers_cpp.*.so is made of helpers.cpp when a job first starts.
            source = place.with_name(place.name.removesuffix("_cpp")).with_suffix(".cpp")
            for path in (*place.parent.glob(f"{place.name}.*.so"), source):
                if path.is_file():
                    return path, parts[length:]
        return None, parts

    def _imported_from(self, path: Path, name: str) -> str | None:
        """Return the dotted name from which the module at ``path`` imports ``name``."""
        package = [*path.relative_to(self.root).parent.parts]
        for node in _statements(_tree(path)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        above = package[: len(package) - node.level + 1] if node.level else []
                        return ".".join([*above, *filter(None, [node.module]), alias.name])
        return None


@dataclass(frozen=True)
class Checkout(Sources):
    """Megatron-LM in a folder ``root`` that contains ``megatron``.

    Raises:
        ValueError: if there is no such folder, or its version is missing.
    """

    def __post_init__(self):
        if not (self.root / "megatron" / "core" / "package_info.py").is_file():
            raise ValueError(f"{self.root}: no megatron/core/package_info.py there")

    @property
    def version(self) -> str:
        """Value of ``megatron.core.__version__``, without a commit after ``+``."""
        parts: dict[str, object] = {}
        for node in _tree(self.root / "megatron" / "core" / "package_info.py").body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                parts.update(
                    (target.id, node.value.value)
                    for target in node.targets
                    if isinstance(target, ast.Name) and target.id in _VERSION_PARTS
                )
        if len(parts) != len(_VERSION_PARTS):
            raise ValueError(f"{self.root}/megatron/core/package_info.py: no version in it")
        major, minor, patch, after = (parts[name] for name in _VERSION_PARTS)
        return f"{major}.{minor}.{patch}{after}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result for one patch point in a checkout.

    ``release`` has the same sources; if no release has, ``difference`` has the lines of a unified
    diff to the known sources.
    """

    patch_point: PatchPoint
    fingerprint: str
    patched: bool
    release: Release | None
    difference: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.patched or self.release is not None


def look(patch_points: Sequence[PatchPoint], checkout: Checkout, known: Checkout) -> list[Finding]:
    """Return the results for all patch points in ``checkout``; differences are to ``known``."""
    findings = []
    for patch_point in patch_points:
        fingerprint = fingerprint_of(patch_point, checkout.source)
        release = _release(patch_point, fingerprint, checkout)
        patched = is_patched(patch_point, checkout.source)
        difference = () if patched or release else tuple(_difference(patch_point, checkout, known))
        findings.append(Finding(patch_point, fingerprint, patched, release, difference))
    return findings


def _release(patch_point: PatchPoint, fingerprint: str, checkout: Checkout) -> Release | None:
    """Return the release with this fingerprint, preferably the checkout's own."""
    own = release_of(checkout.version)
    if own is not None and own.fingerprints.get(patch_point.name) == fingerprint:
        return own
    matching = (one for one in RELEASES if one.fingerprints.get(patch_point.name) == fingerprint)
    return next(matching, None)


def _difference(patch_point: PatchPoint, checkout: Checkout, known: Checkout) -> Iterator[str]:
    for name in (patch_point.target, *patch_point.relies_on):
        there = checkout.source(name)
        if not there:
            yield f"{name} is gone"
            continue
        yield from difflib.unified_diff(
            known.source(name).splitlines(),
            there.splitlines(),
            f"{name} ({known.version})",
            f"{name} ({checkout.version})",
            lineterm="",
        )


def imported_names(package: Path) -> list[str]:
    """Return every dotted name that the modules below ``package`` import from Megatron."""
    names: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and _megatrons(node.module or ""):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names if _megatrons(alias.name))
    return sorted(names)


def used_names(package: Path, megatron: Sources) -> list[str]:
    """Return every function, class or value of ``megatron`` that modules below ``package`` use.

    They import it, or name it as an attribute of an imported module.
    """
    names: set[str] = set()
    for path in package.rglob("*.py"):
        imported: dict[str, str] = {}
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and _megatrons(node.module or ""):
                imported |= {
                    alias.asname or alias.name: f"{node.module}.{alias.name}"
                    for alias in node.names
                }
        names.update(imported.values())
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = imported.get(node.value.id, "")
                if owner and megatron.is_module(owner):
                    names.add(f"{owner}.{node.attr}")
    known = (name for name in names if not name.endswith("__"))
    return sorted(name for name in known if not megatron.is_module(name))


def _megatrons(module: str) -> bool:
    return module.split(".")[0] == "megatron" and not module.startswith("megatron.bridge")


@cache
def _tree(path: Path) -> ast.Module:
    if path.suffix != ".py":  # a folder, or compiled
        return ast.Module([], [])
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no Python: {error}") from error


def _statements(scope: ast.Module | _Definition) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, including those inside if, try and with."""
    waiting: list[ast.stmt] = list(reversed(scope.body))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())]
            for handler in getattr(node, "handlers", ()):
                inner += handler.body
            waiting += reversed(inner)


def _defined(scope: ast.Module | _Definition, name: str) -> _Definition | None:
    definitions = (node for node in _statements(scope) if isinstance(node, _Definition))
    return next((node for node in definitions if node.name == name), None)


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at its top level."""
    bound = set()
    for node in _statements(tree):
        if isinstance(node, _Definition):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for target in targets:
                if isinstance(target, ast.expr):
                    bound.update(one.id for one in ast.walk(target) if isinstance(one, ast.Name))
    return bound
