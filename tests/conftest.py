"""GPU tests are skipped, and counted, where there is none; properties are tested unhurried."""

from functools import cache

import pytest
from hypothesis import settings

NO_GPU = "needs a GPU"

# A shared host has slow moments; a property is not a benchmark.
settings.register_profile("shared host", deadline=None)
settings.load_profile("shared host")


@cache
def _has_gpu() -> bool:
    import torch  # seconds: only where a test carries the mark

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
    # Training runs take longest: with several processes they come first.
    items.sort(key=lambda item: "mcore" not in item.path.parts)


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(NO_GPU in str(report.longrepr) for report in skipped)
    terminalreporter.write_line(f"{count} tests skipped for lack of a GPU")
