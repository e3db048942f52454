"""The curves of the quickstart's report, and what it reads in a log."""

import math
import runpy
from pathlib import Path as FilePath

import pytest

from megatron_epp.show.shapes import Label, Path

pytestmark = pytest.mark.everything

SCRIPT = FilePath(__file__).parents[2] / "examples" / "quickstart_curve.py"
draw_curves = runpy.run_path(str(SCRIPT))["draw_curves"]


def test_an_iterations_own_time_is_read_from_megatrons_log(monkeypatch):
    """Iterations of 8, 13.5, 7 and 6 s, as Megatron says them."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    iterations = runpy.run_path(str(SCRIPT.with_name("quickstart_report.py")))["iterations"]
    said = "iteration {}/ 4 | elapsed time per iteration (ms): {} | lm loss: 9.0E+00 |\n"
    log = "".join(said.format(at + 1, ms) for at, ms in enumerate((8000, 10750, 7000, 6000)))
    assert [ms for _, _, ms, _ in iterations(log)] == [8000, 13500, 7000, 6000]


def test_curves_go_where_their_values_are():
    drawing = draw_curves([("stock", [4.0, 3.0, 2.0]), ("epp", [4.0, math.nan, 2.0])], "Loss")
    lines = [s for s in drawing.shapes if isinstance(s, Path) and s.stroke_width == 1.8]
    whole, *parts = lines
    xs, ys = zip(*whole.points, strict=True)
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1])
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1]) and ys[0] < ys[2]  # y grows downwards
    assert len(parts) == 2 and all(part.dashed for part in parts)  # a gap in the second
    names = {shape.text for shape in drawing.shapes if isinstance(shape, Label)}
    assert {"Loss", "stock", "epp", "iteration", "loss"} <= names
    with pytest.raises(ValueError, match="no finite value to draw"):
        draw_curves([("x", [math.nan])])
