"""Compilation of loops by numba, with a disk cache; a failure of the cache is only a warning."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
from numba.core.caching import FunctionCache

from megatron_epp.ir.errors import printable

logger = logging.getLogger(__name__)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like ``numba.njit(cache=True, **options)``.

    If the cache cannot be used (disk full, read-only or damaged), the function is compiled in this
    process, and a warning is logged once per process.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        try:
            dispatcher._cache = _Cache(function)
        except (RuntimeError, OSError) as error:  # no folder is writable
            _warn("", str(error))
        return dispatcher

    return compiled


class _Cache(FunctionCache):
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # reading a damaged file raises anything
            _warn(f" in {self.cache_path}", f"{type(error).__name__}: {error}")
            with suppress(OSError):
                self.flush()  # so that the files are written again
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            _warn(f" in {self.cache_path}", f"{type(error).__name__}: {error}")


_warned: set[str] = set()


def _warn(where: str, why: str) -> None:
    """Log a warning about the cache folder ``where``, once per process."""
    if _warned:
        return
    _warned.add(where)
    logger.warning(
        "the cache of compiled code%s cannot be used (%s): this process compiles anew, which takes "
        "some 20 seconds; free or clear that folder, or name another in NUMBA_CACHE_DIR",
        where, printable(why),
    )  # fmt: skip
