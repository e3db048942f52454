"""Every kind of op has a picture, in every format; pictures hold what happened."""

import json
import struct
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from megatron_epp.__main__ import main
from megatron_epp.ir import (
    COMPUTE,
    Kind,
    Message,
    Payload,
    Plan,
    PlanError,
    Timed,
    Transfer,
    rules_of,
    slices_of,
)
from megatron_epp.show.colours import FAMILIES, palette
from megatron_epp.show.page import to_html
from megatron_epp.show.paint import draw_timelines
from megatron_epp.show.png import to_png
from megatron_epp.show.shapes import Label, Rect, text_width
from megatron_epp.show.svg import to_svg
from megatron_epp.show.text import text_gantt
from megatron_epp.show.timeline import idle, timeline, timeline_of
from megatron_epp.show.trace import to_trace
from megatron_epp.show.units import bytes_text, fraction_text
from megatron_epp.sim.play import play
from megatron_epp.sim.unit_table import unit_table
from tests.show.plans import (
    EXAMPLE,
    example,
    one_f_one_b,
    played,
    split_example,
    vocabulary_example,
)

SVG = "{http://www.w3.org/2000/svg}"


def in_units(plan, title=""):
    """A run in which every op takes round numbers: forwards 1, backwards 2."""
    return timeline_of(play(plan, unit_table(plan)), title, unit="units")


def bars(drawing):
    """Every op's bar in SVG: the beginning of its title, its left and right end in pixels."""
    for rect in ElementTree.fromstring(to_svg(drawing)).iter(f"{SVG}rect"):
        title = rect.findtext(f"{SVG}title") or ""
        if " on stage " in title:
            left = float(rect.get("x"))
            yield title.split(":")[0], left, left + float(rect.get("width"))


def texts(drawing):
    return [shape.text for shape in drawing.shapes if isinstance(shape, Label)]


def events(content):
    return json.loads(to_trace(content))["traceEvents"]


def page_data(html):
    return json.loads(html.split('id="data">')[1].split("</script>")[0])


def everything():
    """A run with every kind of op and of transfer."""
    run = played(vocabulary_example())
    message = Message(Payload.ACTIVATION, 0, 0, 1)
    transfers = [
        Timed(0, Transfer(Kind.SEND, message), 1.0, 1.1),
        Timed(1, Transfer(Kind.RECEIVE, message), 0.0, 1.0),
    ]
    return timeline(run.plan, [*run.records, *transfers], "run", budget_bytes=(4e9, 4e9))


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_has_a_picture(kind):
    content = everything()
    assert kind in {record.op.kind for record in (*content.records, *content.transfers)}
    family = FAMILIES[kind]
    drawn = to_svg(draw_timelines(content))
    assert family.plain in drawn  # the legend
    assert f"{kind.value} {family.name}" in drawn
    assert family.sign in text_gantt(content, 120)
    assert family.name in to_trace(content)
    assert family.name in to_html(content)


def test_families_and_fills_are_all_different():
    assert len({family.plain for family in FAMILIES.values()}) == len(Kind)
    assert len({family.sign for family in FAMILIES.values()}) == len(Kind)


def test_a_small_plan_in_characters():
    assert text_gantt(in_units(example(), "example"), 60) == (
        "example: 2 stages, 3 chunks, 12 units, bubbles 25.0%\n"
        "         |0 units             |5                   |10\n"
        "stage 0 |F0--F1--F2--.........B1======B0*======....B2*=====|\n"
        "stage 1 |....F0--F1--B1=======B0======F2--B2=======........|\n"
        "F forward  B backward  * recomputes  . idle\n"
        "idle  0: 25.0%  1: 25.0%\n"
    )


def test_the_chart_keeps_its_width_and_shows_long_plans_in_blocks():
    plan = one_f_one_b(8, 40)
    content = in_units(plan)
    chart = text_gantt(content, 100)
    rows = [line for line in chart.splitlines() if line.startswith("stage ")]
    assert all(len(line) <= 100 for line in rows)
    assert len(rows) > 8 and len(rows) % 8 == 0
    for stage in range(8):
        ops = "".join(row[9:-1] for row in rows if row.startswith(f"stage {stage}"))
        for op in plan.orders[stage]:
            assert str(op) in ops
    with pytest.raises(ValueError, match="expected at least 40 columns"):
        text_gantt(content, 10)


def test_colour_is_asked_for():
    content = everything()
    assert "\x1b[" not in text_gantt(content, 80)
    assert "\x1b[" in text_gantt(content, 80, colour=True)


def test_svg_holds_every_op_at_its_time():
    run = played(split_example())
    drawn = bars(draw_timelines(timeline_of(run, "a & b <c>", (4e9, 4e9)), width=1400))
    left = {name: x for name, x, _ in drawn}
    assert len(left) == len(run.records)
    starts = [(r.start, left[f"{r.op} on stage {r.stage}"]) for r in run.records]
    # One scale for all: pixels are an affine function of seconds.
    (s0, x0), (s1, x1) = min(starts), max(starts)
    for second, x in starts:
        assert x == pytest.approx(x0 + (second - s0) * (x1 - x0) / (s1 - s0), abs=0.02)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 30), (8, 200), (64, 70)])
def test_long_plans_have_numbers_that_fit_if_asked_wide(stages, chunks):
    content = in_units(one_f_one_b(stages, chunks))
    numbered, bar = 0, None
    for shape in draw_timelines(content, width=12000).shapes:
        if isinstance(shape, Rect) and " on stage " in shape.title:
            bar = shape  # and then its label, if it has one
        elif bar and isinstance(shape, Label) and bar.y < shape.y < bar.y + bar.height:
            assert bar.title.split()[0].endswith(shape.text) and shape.size >= 7.99
            assert shape.x == pytest.approx(bar.x + bar.width / 2, abs=0.5)
            assert text_width(shape.text, shape.size) < bar.width
            numbered += 1
    assert numbered >= 0.8 * len(content.records)


def test_pictures_fit_a_screen_unless_asked_wider(tmp_path):
    (tmp_path / "long.plan").write_text(str(one_f_one_b(2, 60)))

    def width_of(name, *more):
        out = tmp_path / name
        assert main(["draw", str(tmp_path / "long.plan"), "-o", str(out), *more]) == 0
        if name.endswith("png"):
            return struct.unpack(">II", out.read_bytes()[16:24])[0]
        return int(ElementTree.parse(out).getroot().get("width"))

    assert width_of("x.png") == 2400
    assert width_of("x.svg") == 2400
    assert width_of("wide.svg", "--width", "6000") == 6000
    assert width_of("wide.png", "--width", "6000") == 6000


def test_a_picture_says_what_is_too_short_for_its_number():
    short = timeline_of(played(one_f_one_b(2, 300)))
    told = f"{len(short.records)} ops too short for their number: draw -o x.html"
    assert any(text.endswith(told) for text in texts(draw_timelines(short)))
    assert not any("too short" in text for text in texts(draw_timelines(short, width=40000)))


def test_a_png_is_one_and_stays_within_what_viewers_show():
    content = timeline_of(played(example()))
    for asked, expected, least in ((1400, 1400, 150), (40_000, 16384, 0)):
        data = to_png(draw_timelines(content, width=asked), scale=1.0)
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", data[16:24])
        assert width == expected and height > least


def test_slices_share_an_accent_and_darken():
    paints = palette(example())
    assert paints.accent[0] == paints.accent[1] != ""
    assert paints.accent[2] == ""
    assert paints.lightness[0] > paints.lightness[1]


def test_predicted_and_measured_share_an_axis():
    fast, slow = played(example(), 0), played(example(), 1)
    longer = max(fast.seconds, slow.seconds)
    drawing = draw_timelines(
        timeline_of(fast, "predicted"), timeline_of(slow, "measured"), width=1400
    )
    rights = [right for *_, right in bars(drawing)]
    left, right = 196.0, 1400 - 28.0
    for run in (fast, slow):
        expected = left + (right - left) * run.seconds / longer
        assert any(x == pytest.approx(expected, abs=1.0) for x in rights)


def test_the_page_stands_alone_and_holds_everything():
    run = played(split_example())
    content = timeline_of(run, "</script><script>alert(1)</script>", (4e9, 4e9))
    html = to_html(content)
    assert "http://" not in html and "https://" not in html  # no network
    assert html.count("<script") == 2 and html.count("</script>") == 2
    assert "$" not in html.split("<script>")[0]
    data = page_data(html)
    (shown,) = data["runs"]
    assert len(shown["records"]) == len(run.records)
    assert [b[3] for b in shown["bubbles"]] == [b.reason for b in content.bubbles]
    assert len(shown["critical"]) == len(run.critical_path)
    assert shown["budget"] == [4e9, 4e9]
    assert [chunk["spans"] for chunk in data["chunks"]] == list(map(str, run.plan.chunks))
    assert data["recompute"][0] == ["3f1k", "4k", "2c2k"]
    letters = [kind["letter"] for kind in data["kinds"]]
    assert letters == [kind.value for kind in COMPUTE]


def test_pictures_of_offloaded_layers_say_so_and_shade_no_recompute():
    plan = Plan.parse(EXAMPLE.replace("3f1k 4k 2c2k", "3o1k 4k 2o2k"))
    content = timeline_of(played(plan))
    assert "*" not in text_gantt(content, 120).split("* recomputes")[0]
    assert ", offloaded 18.4%" in text_gantt(content, 120).splitlines()[0]
    svg = to_svg(draw_timelines(content))
    assert "activations of 75.0% of the layers offloaded" in svg
    assert "recompute" not in svg
    html = to_html(content)
    data = page_data(html)
    assert data["recomputed"][0] == [0, 0, 0]
    assert data["offloaded"] == [[0.75, 0, 0.5], [0, 0, 0]]
    assert not any("recompute" in name for _, name in data["legend"])
    spans = [event for event in events(content) if event["name"] == "F0"]
    assert [e["args"]["offloaded_share"] for e in spans] == [0.75, 0.0]
    assert [e["args"]["recomputed_share"] for e in spans] == [0.0, 0.0]


def test_the_page_shows_two_runs_of_one_plan_only():
    run, other = timeline_of(played(example())), timeline_of(played(one_f_one_b(2, 3)))
    assert len(page_data(to_html(run, run))["runs"]) == 2
    with pytest.raises(PlanError, match="different plans"):
        to_html(run, other)


def test_the_trace_has_every_op_and_an_arrow_for_every_message():
    run = played(split_example())
    every = events(timeline_of(run))
    spans = [e for e in every if e["ph"] == "X" and "chunk" in e.get("args", ())]
    records = {(record.stage, str(record.op)): record for record in run.records}
    assert {(e["pid"], e["name"]) for e in spans} == records.keys()
    for event in spans:
        record = records[event["pid"], event["name"]]
        assert event["ts"] == pytest.approx(record.start * 1e6, abs=1e-2)
        assert event["dur"] == pytest.approx(record.seconds * 1e6, abs=1e-2)
    rules, slices = rules_of(run.plan), slices_of(run.plan)
    messages = sum(
        need.stage != 0
        and 0 <= stage + need.stage < run.plan.stages
        and bool(slices.all_related(op.chunk, need.chunk))
        for stage, order in enumerate(run.plan.orders)
        for op in order
        for need in rules[op.kind].needs
    )
    phases = [event["ph"] for event in every]
    assert phases.count("s") == phases.count("f") == messages and "C" in phases


def test_the_legend_explains_every_mark():
    """Budget, shades, the colours of cut documents, and how high the curves are."""
    run = timeline_of(played(example()), "run", (4e9, 4e9))
    shown = texts(draw_timelines(run))
    for words in (
        "memory budget",
        "pale: whole documents; darker: a later slice of a cut one",
        "upper edge: one colour for each cut document",
    ):
        assert words in shown
    scale = next(text for text in shown if text.startswith("bytes alive"))
    highest = max(*run.peak_bytes, 4e9)
    assert scale.endswith(f"each curve from 0 to {bytes_text(highest * 1.04)}")
    assert any("  |  bubbles " in text for text in shown)
    plain = texts(draw_timelines(timeline_of(played(one_f_one_b(2, 3)))))
    assert not any("budget" in text or "cut" in text for text in plain)
    legend = [name for _, name in page_data(to_html(run))["legend"]]
    assert "memory budget" in legend and any(name.startswith("pale") for name in legend)


@pytest.mark.parametrize(("stages", "chunks"), [(8, 200), (16, 60)])
def test_what_is_to_be_read_of_a_wide_plan_stands_at_the_left(stages, chunks):
    run = timeline_of(played(one_f_one_b(stages, chunks)), "wide", (40e9,) * stages)
    drawing = draw_timelines(run)
    assert drawing.width > 1500
    labels = [shape for shape in drawing.shapes if isinstance(shape, Label)]
    for stage in range(stages):
        share = fraction_text(1 - run.busy[stage] / run.seconds)
        for words in (f"stage {stage}", f"{share} idle", f" of {bytes_text(40e9)}"):
            assert any(label.text.endswith(words) and label.x < 200 for label in labels)
    numbers = {label.text[0].isdigit() for label in labels if label.text.lstrip("FB").isdigit()}
    assert len(numbers) == 1  # F12 on all bars, or 12 on all


def test_letters_without_a_number_are_explained():
    chart = text_gantt(in_units(one_f_one_b(8, 200)), 60)
    assert "large and small in turn: ops too short for their label" in chart
    assert "I backward: input gradient" not in chart  # none is there
    assert "draw -o x.html shows all of them" in text_gantt(
        timeline_of(played(one_f_one_b(8, 900))), 40
    )


def test_no_character_of_a_title_breaks_the_picture():
    run = timeline_of(played(example()), "a\x01b\udcff & <c> \U0001f600 d\x1b[31m")
    root = ElementTree.fromstring(to_svg(draw_timelines(run)))
    shown = [text.text for text in root.iter(f"{SVG}text")]
    assert "a\ufffdb\ufffd & <c> \U0001f600 d\ufffd[31m" in shown


def test_drawing_takes_time_in_proportion_to_the_ops():
    """Counted in lines of ours that run: twice the stages, or the slices, about twice as many."""

    def lines_run(plan):
        content = in_units(plan)
        count = 0

        def trace(frame, event, _):
            nonlocal count
            if "/megatron_epp/show/" not in frame.f_code.co_filename:
                return None
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            to_svg(draw_timelines(content, width=1400))
            to_html(content)
            to_trace(content)
            text_gantt(content, 100)
            idle(plan, content.records, content.seconds)
        finally:
            sys.settrace(None)
        return count

    few, many = (lines_run(one_f_one_b(stages, 2)) for stages in (40, 80))
    assert many < 2.4 * few
    few, many = (lines_run(sliced(slices)) for slices in (60, 120))
    assert many < 2.4 * few


def sliced(count):
    """One document in ``count`` slices on two stages."""
    lines = [f"chunk {c}: 0[{10 * c}:{10 * (c + 1)}]" for c in range(count)]
    order = [f"F{c}" for c in range(count)] + [f"B{c}" for c in reversed(range(count))]
    stages = [f"stage {stage}: {' '.join(order)}" for stage in range(2)]
    head = ["plan v1", f"documents {10 * count}", "layers 1 1"]
    return Plan.parse("\n".join([*head, *lines, *stages]) + "\n")
