"""MEGATRON_EPP=1 and nothing else: torchrun, an installed package, a loop that knows nothing."""

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts" / "upstream"))

import fresh_environments  # noqa: E402

pytestmark = pytest.mark.everything


def installed(folder: Path) -> Path:
    """A folder whose entry points are those of pyproject.toml, as pip writes them down."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    facts = folder / "megatron_epp-0.0.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-epp\nVersion: 0.0.0\n")
    text = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in groups.items()
    ]
    (facts / "entry_points.txt").write_text("\n".join(text))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[list[Mapping], list[str]]:
    folder = tmp_path_factory.mktemp("one variable")
    path = f"{ROOT}:{ROOT / 'examples'}:{installed(folder)}"
    return fresh_environments.run(
        *(sys.executable, fresh_environments.LOOP.parent, fresh_environments.TORCHRUN),
        {"PYTHONPATH": path, "MEGATRON_EPP": "1"},
    )


@pytest.mark.parametrize("loop", ["as it says", "otherwise"])
def test_gradients_are_megatrons_own(run, loop) -> None:
    for answer in run[0]:
        assert answer[loop]["worst"] < 1e-12
        assert answer[loop]["losses equal"]


def test_calls_are_planned_once_two_have_shown_the_shapes(run) -> None:
    """Of five calls each, all but the first two of the loop that pads as its arguments say."""
    assert [answer["calls"] for answer in run[0]] == [3, 3]


def test_one_line_says_what_runs_and_one_what_does_not(run) -> None:
    banner, other = run[1]
    assert "level 0, megatron-core 0." in banner and banner.endswith(", slime")
    assert "Megatron's own schedule runs calls with micro-batches that slime lays out" in other
    assert "otherwise: micro-batch " in other


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        ([], False),
        ([{(8, 1, 4)}], False),
        ([{(8, 1, 4)}, {(8, 1, 4)}], False),
        ([{(8, 1, 4)}] * 3, True),
        ([{(8, 1, 4), (6, 1, 4)}], False),
        ([{(8, 1, 4), (6, 1, 4)}, {(6, 1, 4)}], True),
        ([{(8, 1, 4)}, {(6, 1, 4)}], True),
    ],
)
def test_a_reader_is_believed_after_two_calls_of_several_shapes_or_three_of_one(
    calls, shown
) -> None:
    pytest.importorskip("megatron.core")
    from megatron_epp.mcore.loops.pipelines import ModelPipeline

    pipeline = SimpleNamespace(witnessed=[frozenset(shapes) for shapes in calls])
    assert ModelPipeline.shown.fget(pipeline) is shown
