"""The HTML page in Chromium: it draws, answers the pointer, zooms, and holds a long plan."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_epp.show.page import to_html
from megatron_epp.show.timeline import timeline_of
from tests.show import browser
from tests.show.plans import example, one_f_one_b, played, split_example

pytestmark = pytest.mark.skipif(
    bool(browser.missing()), reason=f"no browser: {browser.missing()} not installed"
)
WIDTH, HEIGHT = 1500, 1000
# Whether a pixel of the canvas (in its own coordinates) has been painted, and how.
PIXEL = """const ratio = window.devicePixelRatio;
return [...context.getImageData(arguments[0] * ratio, arguments[1] * ratio, 1, 1).data];"""
BARS = "return bars[0].map((row) => row.map((bar) => [bar.op, bar.start, bar.stop]));"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.Browser(WIDTH, HEIGHT, str(tmp_path_factory.mktemp("profile"))) as opened:
        yield opened


def show(chromium: browser.Browser, path: Path, *runs) -> None:
    path.write_text(to_html(*runs))
    chromium.open(path.as_uri())
    settle(chromium)


def settle(chromium: browser.Browser) -> None:
    """Until what was asked for is painted: painting waits for the browser's next frame."""
    for _ in range(200):
        if chromium.run("return typeof waiting !== 'undefined' && !waiting && width > 0;"):
            return
    raise AssertionError(f"never painted: {chromium.complaints()}")


def place(chromium: browser.Browser, stage: int, op: str) -> tuple[float, float]:
    """The middle of an op's bar, in pixels of the window."""
    return chromium.run(
        """const bar = byOp[0].get(`${arguments[0]} ${arguments[1]}`);
        const box = canvas.getBoundingClientRect();
        const row = rows.find((r) => r.what === "bars" && r.rank === bar.rank);
        return [box.left + (x(bar.start) + x(bar.stop)) / 2, box.top + row.y + row.height / 2];""",
        stage,
        op,
    )


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def test_a_small_page_draws_and_answers(chromium: browser.Browser, tmp_path: Path) -> None:
    run = played(split_example())
    show(chromium, tmp_path / "small.html", timeline_of(run, "small", (2e9, 4e9)))
    assert chromium.complaints() == []
    assert chromium.run("return document.querySelector('h1').textContent;") == "small"
    legend = chromium.run("return element('legend').textContent;")
    for words in ("forward", "weight gradient", "one colour for each cut document", "budget"):
        assert words in legend
    # Every op is painted where it ran, in its colour.
    fills = chromium.run("return data.chunks.map((chunk) => chunk.fill);")
    kinds = chromium.run("return data.kinds.map((kind) => kind.letter);")
    for record in run.records:
        x, y = place(chromium, record.stage, str(record.op))
        box = chromium.run(
            "const box = canvas.getBoundingClientRect(); return [box.left, box.top];"
        )
        # Beside the label, which stands in the middle.
        red, green, blue, alpha = chromium.run(PIXEL, x - box[0], y - box[1] - 8)
        fill = fills[record.op.chunk][kinds.index(record.op.kind.value)]
        assert [red, green, blue] == pytest.approx(rgb(fill), abs=2) and alpha == 255

    # The pointer rests on an op: what it is, and what it needs.
    x, y = place(chromium, 0, "B0")
    chromium.move(x, y)
    settle(chromium)
    tip = chromium.run("return tip.hidden ? '' : tip.textContent;")
    assert tip.startswith("B0 on stage 0: backward") and "slice 1 of 2 of document 0" in tip
    assert "needs" in chromium.run("return details.textContent;")
    # A click keeps it; the pointer elsewhere no longer changes the details.
    chromium.click(x, y)
    chromium.move(*place(chromium, 1, "F2"))
    settle(chromium)
    assert chromium.run("return details.querySelector('h2').textContent;") == "B0 on stage 0"
    assert chromium.run("return tip.textContent;").startswith("F2 on stage 1")
    # Every table can be shown and sorted.
    for tab in ("Bubbles", "Critical path", "Chunks", "Stages"):
        found = chromium.run(
            """const tabs = [...element("tabs").children];
            tabs.find((tab) => tab.textContent === arguments[0]).click();
            document.querySelector("#tables th").click();
            return document.querySelectorAll("#tables tbody tr").length;""",
            tab,
        )
        assert found > 0
    assert "over" in chromium.run("return document.querySelector('#tables').innerHTML;")
    assert chromium.complaints() == []


def test_a_long_page_zooms_and_finds(chromium: browser.Browser, tmp_path: Path) -> None:
    show(chromium, tmp_path / "long.html", timeline_of(played(one_f_one_b(8, 200)), "long"))
    assert chromium.run("return bars[0].map((row) => row.length);") == [400] * 8
    assert chromium.run("return document.documentElement.scrollWidth <= window.innerWidth;")
    whole = chromium.run("return [view.start, view.stop, end];")
    assert whole[0] == 0 and whole[1] == whole[2]
    # The wheel zooms around the pointer: the time under it stays.
    x, y = place(chromium, 3, "F100")
    at = "return seconds(arguments[0] - canvas.getBoundingClientRect().left);"
    before = chromium.run(at, x)
    for _ in range(4):
        chromium.wheel(x, y, -600)
        settle(chromium)
    start, stop = chromium.run("return [view.start, view.stop];")
    assert stop - start < 0.1 * whole[2]
    assert chromium.run(at, x) == pytest.approx(before, rel=1e-3)
    chromium.move(x + 1, y)
    settle(chromium)
    tip = chromium.run("return tip.hidden ? '' : tip.textContent;")
    assert tip.split(" ")[0] in ("F100", "B97", "F101", "B96", "B98", "stage")
    # Dragging moves the time; a double click shows all again.
    chromium.pointer(
        {"type": "pointerMove", "duration": 0, "x": 800, "y": round(y)},
        {"type": "pointerDown", "button": 0},
        {"type": "pointerMove", "duration": 0, "x": 1000, "y": round(y)},
        {"type": "pointerUp", "button": 0},
    )
    settle(chromium)
    moved = chromium.run("return view.start;")
    assert moved < start
    chromium.run("element('fit').click();")
    settle(chromium)
    assert chromium.run("return [view.start, view.stop];") == whole[:2]
    # A chunk is found by its number, and shown.
    chromium.run(
        "element('find').value = '150'; element('find').dispatchEvent(new Event('input'));"
    )
    settle(chromium)
    start, stop = chromium.run("return [view.start, view.stop];")
    for row in chromium.run(BARS):
        mine = [(first, last) for op, first, last in row if op in ("F150", "B150")]
        assert len(mine) == 2 and all(start <= first and last <= stop for first, last in mine)
    assert chromium.complaints() == []


def test_two_runs_stand_above_each_other(chromium: browser.Browser, tmp_path: Path) -> None:
    runs = [timeline_of(played(example(), seed), name) for seed, name in enumerate("ab")]
    show(chromium, tmp_path / "two.html", *runs)
    kinds = chromium.run("return rows.map((row) => [row.what, row.run]);")
    assert kinds.count(["heading", 0]) == kinds.count(["heading", 1]) == 1
    assert kinds.count(["bars", 0]) == kinds.count(["bars", 1]) == 2
    assert chromium.complaints() == []
