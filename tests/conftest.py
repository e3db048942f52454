"""GPU tests are skipped, and counted, where there is none; properties are tested unhurried."""

import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from tests.forks import share_one_server

os.environ["TQDM_DISABLE"] = "1"  # tqdm reads it when imported: bars appear by the clock

NO_GPU = "needs a GPU"
# Files that take more than about 15 s of a core, longest first (pytest --durations=60 says which):
# those of the run with emulated kernels, then of the other, whose first mostly stands and waits.
LONGEST = (
    "engine/test_certificate.py",
    "engine/test_dry_run.py",
    "engine/test_first_dry_run.py",
    "engine/test_fp8_certificate.py",
    "gpu/test_multi_gpu.py",
    "gpu/test_kernels.py",
    "gpu/test_split.py",
    "rehearsal/test_two_hosts.py",
    "planner/test_never_slower.py",
    "mcore/test_faults.py",
    "mcore/test_certify_kinds.py",
    "mcore/test_trained_kinds.py",
    "mcore/test_experts.py",
    "planner/test_planners.py",
    "planner/test_levers_have_effect.py",
    "mcore/loops/test_certify_loops.py",
    "mcore/test_ending.py",
    "cli/test_script_starts.py",
    "cli/test_commands.py",
    "mcore/test_identical_documents.py",
    "mcore/test_placed.py",
    "mcore/test_kinds_training.py",
    "mcore/test_certify.py",
    "mcore/test_lockstep.py",
    "mcore/test_training.py",
    "mcore/test_out_of_memory.py",
    "planner/test_golden.py",
    "planner/test_offload.py",
    "mcore/test_vocabulary_parallel.py",
    "device/test_runtime.py",
    "examples/test_launch_scripts.py",
    "mcore/test_others_lines.py",
    "planner/test_judges.py",
    "mcore/test_trees.py",
    "mcore/test_ledger.py",
    "cli/test_tune.py",
    "planner/test_tuning.py",
    "planner/test_lockstep.py",
    "mcore/test_host.py",
    "mcore/test_context_parallel.py",
    "mcore/test_profile.py",
    "cli/test_tune_screens.py",
    "mcore/test_fallbacks.py",
    "mcore/loops/test_two_stages.py",
    "mcore/test_partition.py",
    "mcore/test_new_kind.py",
    "docs/test_commands.py",
    "docs/test_reference.py",
    "planner/test_tuning_parts.py",
    "examples/test_prove_it.py",
    "scripts/test_gpu_day.py",
    "mcore/test_refusals.py",
)
assert all((Path(__file__).parent / name).exists() for name in LONGEST), "a slow test has moved"

# A shared host has slow moments; a property is not a benchmark.
settings.register_profile("shared host", deadline=None)
settings.load_profile("shared host")
share_one_server()


@cache
def _has_gpu() -> bool:
    import torch  # seconds: only where a test carries the mark

    return torch.cuda.is_available() or bool(os.environ.get("EPP_ENGINE"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, bool]:
    """With several processes what takes longest comes first: LONGEST, then training runs."""
    tests = Path(__file__).parent
    name = str(item.path.relative_to(tests)) if item.path.is_relative_to(tests) else item.path.name
    place = LONGEST.index(name) if name in LONGEST else len(LONGEST)
    return place, "mcore" not in item.path.parts


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    count = sum(NO_GPU in str(report.longrepr) for report in skipped)
    terminalreporter.write_line(f"{count} tests skipped for lack of a GPU")
