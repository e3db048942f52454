"""The table of holes: more holes are never faster, and a map around them is no slower than rows."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def test_the_table_of_a_small_grid(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    holes = importlib.import_module("holes")
    monkeypatch.delitem(sys.modules, "holes")
    monkeypatch.setattr(holes, "DEGREES", [(8, 1, 2)])
    monkeypatch.setattr(holes, "NODE_DEVICES", 8)
    rows = list(holes.hole_rows((3, 4), 3, "all-to-all", "llama3-8b", 1))
    assert [int(row[1]) for row in rows] == [0, 1, 2, 3]
    best, naive = ([float(row[column]) for row in rows] for column in (4, 8))
    assert best == sorted(best) and naive == sorted(naive) and best[0] == naive[0]
    assert all(one <= other for one, other in zip(best, naive, strict=True))
    nodes = [(int(row[2]), int(row[6])) for row in rows]
    assert nodes[0] == (12, 12) and all(around >= dropped for around, dropped in nodes)
    assert nodes[-1][0] > nodes[-1][1]
    with pytest.raises(SystemExit, match="2"):
        holes.main(["--grids", "1x1", "--failed", "0"])
    assert "1 nodes are left, which no layout of llama3-70b" in capsys.readouterr().err
    networks = {row[1]: row for row in holes.network_rows((8, 8))}
    assert networks["all-to-all"][2] == "2" and networks["torus"][2] == "8"
