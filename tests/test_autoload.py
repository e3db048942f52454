"""One variable: what a process does at Megatron's import, by a Megatron of a few lines."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MEGATRON = """
def forward_backward_pipelining_without_interleaving(*, number, forward_step_func=None):
    return "pipeline", number

def forward_backward_pipelining_with_interleaving(*, number, forward_step_func=None):
    return "parts", number

def forward_backward_no_pipelining(*, number, forward_step_func=None):
    return "alone", number

def get_forward_backward_func(stages):
    if stages == 1:
        return forward_backward_no_pipelining
    return forward_backward_pipelining_without_interleaving
"""
# torch cannot be imported: our schedule cannot run here, and whoever imports torch early is caught.
BEFORE = "import sys; sys.modules['torch'] = None\n"
LOOP = """
from megatron.core.pipeline_parallel import schedules
kept = schedules.get_forward_backward_func(2)
print([kept(number=1), kept(number=2), schedules.get_forward_backward_func(1)(number=3)])
"""
RAN = "[('pipeline', 1), ('pipeline', 2), ('alone', 3)]\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Where a Megatron of a few lines is, and a script that calls its schedules."""
    folder = write_megatron(tmp_path_factory.mktemp("megatron"), MEGATRON)
    (folder / "script.py").write_text(f"{BEFORE}{LOOP}print(sys.argv[1:])\n")
    return folder


def write_megatron(folder: Path, schedules: str) -> Path:
    package = folder / "megatron" / "core" / "pipeline_parallel"
    package.mkdir(parents=True)
    for each in (package.parents[1], package.parent, package):
        (each / "__init__.py").write_text("")
    (package / "schedules.py").write_text(schedules)
    return folder


def python(place: Path, *words: str, **variables: str) -> subprocess.CompletedProcess:
    """A Python of its own, at ``place``; a variable of the environment that is "" is not set."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_DEVICE")}
    known |= {"PYTHONPATH": f"{ROOT}:{place}", "RANK": "0", "MEGATRON_EPP": "", **variables}
    known = {key: value for key, value in known.items() if value}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=place, env=known, capture_output=True, text=True)


def lines(place: Path, code: str, **variables: str) -> list[str]:
    """What Python says of ``code``, after it has printed what Megatron's schedules return."""
    done = python(place, "-c", BEFORE + code + LOOP, **variables)
    assert (done.returncode, done.stdout) == (0, RAN), done.stderr
    return done.stderr.splitlines()


ASKED = "from megatron_epp.autoload import start; start()"
UNUSABLE = "cannot run here, Megatron's own schedule does: ModuleNotFoundError"


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_without_the_variable_nothing_happens(place, value) -> None:
    code = f"before = list(sys.meta_path)\n{ASKED}\nassert sys.meta_path == before"
    assert lines(place, code, MEGATRON_EPP=value) == []


@pytest.mark.parametrize(
    "way", [ASKED, "import megatron_epp.plugin", "import megatron_epp.adaptor"]
)
def test_a_job_goes_on_by_megatrons_schedule_where_ours_cannot_run(place, way) -> None:
    """Asked by the variable: the first call tries, says why it cannot be, and nobody asks again."""
    (said,) = lines(place, way, MEGATRON_EPP="1")
    assert UNUSABLE in said and said.startswith("megatron_epp ")
    assert lines(place, way, MEGATRON_EPP="1", RANK="3") == []


def test_no_filter_of_a_frameworks_hides_what_is_said(place) -> None:
    """Megatron-Bridge has every logger drop warnings."""
    quiet = """
import logging
drop = lambda record: record.levelno != logging.WARNING
for name in ("", "megatron_epp", "megatron_epp.autoload"):
    logging.getLogger(name).addFilter(drop)
logging.basicConfig(level=logging.ERROR)
"""
    (said,) = lines(place, quiet + ASKED, MEGATRON_EPP="1")
    assert UNUSABLE in said


def test_the_adaptor_reaches_schedules_that_are_imported_already(place) -> None:
    code = "import megatron.core.pipeline_parallel.schedules, megatron_epp.adaptor"
    assert UNUSABLE in lines(place, code)[0]


def test_a_typo_is_one_line(place) -> None:
    assert lines(place, ASKED, MEGATRON_EPP="yes please") == [
        "MEGATRON_EPP=yes please: expected 1 (level 0) or 0 (nothing); Megatron's own schedule runs"
    ]


def test_a_megatron_without_those_functions_is_one_line(tmp_path) -> None:
    renamed = MEGATRON.replace("_no_pipelining", "_without_a_pipeline")
    assert lines(write_megatron(tmp_path, renamed), ASKED, MEGATRON_EPP="1") == [
        "megatron.core.pipeline_parallel.schedules has no forward_backward_no_pipelining; "
        "Megatron's own schedule runs"
    ]


@pytest.mark.parametrize(("set_to", "becomes"), [("", "32"), ("1", "1"), ("8", "8")])
def test_queues_are_opened_where_nobody_said_how_many(place, set_to, becomes) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    code = f"{ASKED}\nimport os, atexit"
    code += f"\natexit.register(lambda: print(os.environ.get({name!r}), file=sys.stderr))"
    assert lines(place, code, MEGATRON_EPP="1", **{name: set_to})[-1] == becomes


# ------------------------------------------------------------------ python -m megatron_epp.run


def test_a_script_runs_with_its_own_words(place) -> None:
    done = python(place, "-m", "megatron_epp.run", "script.py", "--flag", "3")
    assert (done.returncode, done.stdout) == (0, RAN + "['--flag', '3']\n")
    assert UNUSABLE in done.stderr
    done = python(place, "-m", "megatron_epp.run", "-m", "script", "x", MEGATRON_EPP="0")
    assert (done.stdout, done.stderr) == (RAN + "['x']\n", "")


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        (["none.py"], {}, "no script none.py; usage: python -m megatron_epp.run SCRIPT"),
        ([], {}, "no script is named; usage: "),
        (["script.py"], {"MEGATRON_EPP": "yes please"}, "MEGATRON_EPP=yes please: expected 1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(place, words, variables, says) -> None:
    done = python(place, "-m", "megatron_epp.run", *words, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron_epp: error: " + says)


# ------------------------------------------------------------------ who calls it


def test_entry_points_name_what_is_there() -> None:
    """torch calls what it loads; verl only loads it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (called,) = groups["torch.backends"].values()
    (loaded,) = groups["verl.plugins"].values()
    from megatron_epp import autoload

    assert EntryPoint("", called, "torch.backends").load() is autoload.start
    assert EntryPoint("", loaded, "verl.plugins").load().__name__ == "megatron_epp.plugin"
