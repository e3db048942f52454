"""Skips what needs a GPU where there is none, and says how many tests that were."""

from functools import cache

import pytest

NO_GPU = "needs a GPU"


@cache
def _has_gpu() -> bool:
    import torch  # seconds: only where a test carries the mark

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(NO_GPU in str(report.longrepr) for report in skipped)
    terminalreporter.write_line(f"{count} tests skipped for lack of a GPU")
