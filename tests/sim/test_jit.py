"""A cache of compiled code only saves time: full, read-only or damaged, it never refuses work."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numba
import pytest

from megatron_epp.sim import jit

PACKAGE = Path(__file__).parents[2] / "megatron_epp"
SOURCE = """
from megatron_epp.sim.jit import njit

@njit(inline="always")
def _one(x):
    return x + 1

@njit()
def work(x):
    return 2 * _one(x)
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Imports the module anew, as another process would, with its cache in a folder."""
    source = tmp_path / "compiled_here.py"
    source.write_text(SOURCE)

    def load(cache: str | None) -> ModuleType:
        monkeypatch.setattr(numba.config, "CACHE_DIR", cache or "")
        monkeypatch.setattr(jit, "_warned", set())
        spec = importlib.util.spec_from_file_location("compiled_here", source)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["compiled_here"] = module
        spec.loader.exec_module(module)
        return module

    yield load
    sys.modules.pop("compiled_here", None)


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.rglob(f"*{suffix}"))


def test_what_was_compiled_is_taken_from_the_cache(imported, tmp_path, caplog) -> None:
    cache = tmp_path / "cache"
    assert imported(str(cache)).work(1) == 4
    assert files(cache, ".nbi") and files(cache, ".nbc")
    again = imported(str(cache)).work
    assert again(1) == 4
    assert sum(again.stats.cache_hits.values()) == 1 and not caplog.records


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", ["empty", "cut", "garbled"])
def test_a_damaged_cache_is_made_anew(imported, tmp_path, caplog, suffix, damage) -> None:
    cache = tmp_path / "cache"
    imported(str(cache)).work(1)
    for file in files(cache, suffix):
        data = file.read_bytes()
        damaged = {"empty": b"", "cut": data[: len(data) // 2], "garbled": b"\x80\x04garbled"}
        file.write_bytes(damaged[damage])
    assert imported(str(cache)).work(1) == 4
    (line,) = {record.getMessage() for record in caplog.records}
    assert str(cache) in line and "NUMBA_CACHE_DIR" in line and "\n" not in line
    caplog.clear()
    healed = imported(str(cache)).work
    assert healed(1) == 4 and sum(healed.stats.cache_hits.values()) == 1 and not caplog.records


def test_a_full_disk_ends_no_work(imported, tmp_path, caplog, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert imported(str(tmp_path / "cache")).work(1) == 4
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()


def test_a_host_without_any_folder_ends_no_work(imported, caplog, monkeypatch) -> None:
    """Package and home are both read-only: numba finds no locator when it decorates."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    assert imported(None).work(1) == 4
    (record,) = caplog.records
    assert "no locator available" in record.getMessage()


def test_the_package_compiles_no_other_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        names = [
            name.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module == "numba"
            for name in node.names
        ]
        assert not {"njit", "jit"} & set(names), path
