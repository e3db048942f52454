"""The picture of a grid of nodes."""

import xml.etree.ElementTree as ElementTree

from megatron_epp.show.grid import grid_drawing, grid_text, group_colour
from megatron_epp.show.svg import to_svg

CELLS = {(0, 0): (0, "0.0"), (0, 1): (1, "1.0"), (1, 0): (1, "1.10")}
FAILED = [(1, 1)]


def test_text_shows_every_node_what_failed_and_what_is_spare() -> None:
    assert grid_text(2, 3, CELLS, FAILED) == (
        "     0    1    2\n"
        "0  0.0  1.0    .\n"
        "1 1.10    x    .\n"
        "stage.replica of each node by row and column; x failed, . spare\n"
    )


def test_a_drawing_has_a_colour_for_every_group_and_crosses_holes_out() -> None:
    names = {(0, 0): "first <host>", (1, 1): "gone"}
    drawn = to_svg(grid_drawing(2, 3, CELLS, FAILED, names, "a grid"))
    root = ElementTree.fromstring(drawn)
    rects = root.findall("{*}rect")[1:]
    assert len(rects) == 6
    fills = [rect.get("fill") for rect in rects]
    assert fills[0] == group_colour(0, 2) and fills[1] == fills[3] == group_colour(1, 2)
    assert len({fills[0], fills[1], fills[2], fills[4]}) == 4 and fills[2] == fills[5]
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["first <host>", "gone"]
    assert len(root.findall("{*}polyline")) == 2
    assert len({group_colour(group, 12) for group in range(12)}) == 12
