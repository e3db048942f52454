"""The picture of a grid of nodes."""

from megatron_epp.show.grid import grid_text

LABELS = {(0, 0): "0.0", (0, 1): "1.0", (1, 0): "1.10"}
FAILED = [(1, 1)]


def test_text_shows_every_node_what_failed_and_what_is_spare() -> None:
    assert grid_text(2, 3, LABELS, FAILED) == (
        "     0    1    2\n"
        "0  0.0  1.0    .\n"
        "1 1.10    x    .\n"
        "stage.replica of each node by row and column; x failed, . spare\n"
    )
