"""CONTRIBUTING's numbers of files are those that tests count; good first tasks are refused."""

import re

from megatron_epp.mcore.capabilities.table import TABLE
from scripts.kind_files import kind_files
from tests.ir.test_costly_kind import LATE
from tests.programs import ROOT

PACKAGE = ROOT / "megatron_epp"


def files_of_a_planner() -> tuple[int, int]:
    """A published schedule is a row of a table: no other file has its name."""
    named = [path for path in PACKAGE.rglob("*.py") if '"adaptis"' in path.read_text()]
    assert [path.name for path in named] == ["schedules.py"]
    return 0, len(named)


def files_of_a_framework() -> tuple[int, int]:
    """Of one with an adapter."""
    folder = PACKAGE / "frameworks" / "nemo_rl"
    own = [str(path.relative_to(PACKAGE)) for path in folder.glob("*.py")]
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bnemo_rl\b", path.read_text().split('"""', 2)[-1])
    }
    return len(own), len(named - {*own})


def test_contributing_counts_the_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    dsa = kind_files("dsa")
    rows = re.findall(r"^\| ((?:an?) [\w ]+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert {name: (int(new), int(changed)) for name, new, changed in rows} == {
        "an op": (0, len(LATE) + 1),
        "a layer kind": (len(dsa.files), len(dsa.lines)),
        "a planner": files_of_a_planner(),
        "a framework": files_of_a_framework(),
        "a training flag": (0, 1),  # tests/docs/test_reference.py: a field is a flag and a row
    }


def test_good_first_tasks_are_refused_by_name() -> None:
    text = (ROOT / "docs" / "contributing" / "index.md").read_text()
    flags = re.findall(r"^\| [^|]+ \| `(--[\w-]+)` \|", text, re.M)
    refused = " ".join(row.what for row in TABLE)
    done = [flag for flag in flags if not re.search(rf"{flag}(?![\w-])", refused)]
    assert len(flags) >= 10 and done == [], "these run: take them off the page"
