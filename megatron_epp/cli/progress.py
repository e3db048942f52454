"""Progress on stderr: a bar on a terminal, nothing in a file or a pipe."""

import sys
from collections.abc import Iterable, Iterator


def bar[T](items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """``items`` with a bar that appears after two seconds."""
    if not sys.stderr.isatty():
        yield from items
        return
    from tqdm import tqdm

    yield from tqdm(items, total=total, desc=what, delay=2, leave=False, file=sys.stderr)
