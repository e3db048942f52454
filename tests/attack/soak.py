"""Many iterations of a small job: within its budget, no faster growing than what it keeps."""

import re
from pathlib import Path

from tests.attack.jobs import Job, flags
from tests.attack.training import TOKENS
from tests.mcore.runs import write_corpus

GIB = 1 << 30
ITERATIONS = 100
BUDGET_GIB = 2e-4  # about a third of what whole batches would hold
TOLERANCE = 1.01
GROWTH = 1.10  # of a rank's memory, from a quarter of the iterations to their end
SECONDS_AN_ITERATION = 5.0  # on a busy host


def test_soak(tmp_path: Path) -> None:
    """Never 1% over the budget, no growth."""
    corpus = write_corpus(tmp_path / "documents", TOKENS)
    record = tmp_path / "record"
    words = flags(
        corpus,
        train_iters=ITERATIONS,
        epp_memory_budget_gib=BUDGET_GIB,
        epp_cost_model=None,
        epp_record=record,
    )
    with Job(tmp_path, words) as job:
        early = {}
        quarter = max(2, ITERATIONS // 4)
        limit = 240 + SECONDS_AN_ITERATION * ITERATIONS
        job.wait_for_iteration(quarter, limit)
        early = {rank: _resident_bytes(job.rank(rank)) for rank in (0, 1)}
        late = dict(early)

        def measure() -> bool:
            for rank in (0, 1):
                if job.processes[rank].poll() is None:
                    late[rank] = _resident_bytes(job.rank(rank)) or late[rank]
            return ITERATIONS in job.logged()

        job.wait_for(measure, f"iteration {ITERATIONS}", limit)
        job.require_trained(ITERATIONS)
        job.require_nothing_left()
    peaks = _peaks(record)
    assert len(peaks) == ITERATIONS, f"{len(peaks)} of {ITERATIONS} iterations recorded"
    worst = max(peaks, key=lambda number: peaks[number])
    over = peaks[worst] / (BUDGET_GIB * GIB)
    assert over <= TOLERANCE, f"iteration {worst} held {over:.3f} of the budget"
    growth = max(late[rank] / early[rank] for rank in early)
    assert growth <= GROWTH, f"memory of a rank grew {growth:.2f} times"


def _peaks(record: Path) -> dict[int, int]:
    """The most bytes that a stage held for chunks, by iteration."""
    found = {}
    for path in record.glob("iteration-*.replica-0.timed"):
        rows = [line.split() for line in path.read_text().splitlines() if line[:1].isdigit()]
        number = re.search(r"iteration-(\d+)", path.name)
        found[int(number[1])] = max(int(row[4]) for row in rows)
    return found


def _resident_bytes(process: int) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0
