#!/usr/bin/env python3
"""Draws the pictures of docs/how/: attention of slices, lockstep, and vocabulary parallelism.

    python docs/draw_how.py    attention_slices.svg, lockstep.svg, vocabulary_parallelism.svg

A test makes them again and compares.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_epp.show.shapes import Drawing, Label, Rect, Shape
from megatron_epp.show.shapes import Path as Line
from megatron_epp.show.svg import to_svg

FOLDER = Path(__file__).parent
INK, QUIET, LINE = "#1f2937", "#4b5563", "#9ca3af"
COLOURS = ("#bfdbfe", "#bbf7d0", "#fde68a")  # of chunks 0, 1, 2
# Tokens of document 0, cut into slices, and of document 1, whole in the chunk of the last one.
SLICES, DOCUMENT = (7, 5, 4), 4
CELL, LEFT, TOP = 22.0, 110.0, 48.0
# Ops of one chunk: colour and width in units of time.
OPS = {"F": ("#bfdbfe", 1.0), "H": ("#fecaca", 0.7), "B": ("#bbf7d0", 2.0), "G": ("#fde68a", 0.7)}
STAGES, UNIT, ROW, BAR = 4, 68.0, 52.0, 34.0
# Forwards of two replicas in lockstep on one stage: contents of each chunk, and its own time.
LOCKSTEP = (
    (("slice of A", 2.0), ("slice of A", 2.1), ("slice of A", 2.0), ("pack", 1.6)),
    (("pack", 1.8), ("slice of B", 2.2), ("slice of B", 2.0), ("empty", 0.2)),
)


def attention_slices() -> str:
    """Return the SVG of a causal mask cut into slices, above the K/V store of a layer."""
    length = sum(SLICES)
    shapes: list[Shape] = [
        Label(LEFT + length * CELL / 2, 24, "keys of document 0", 13, QUIET, "middle"),
        Label(LEFT + (length + 1 + DOCUMENT / 2) * CELL, 24, "document 1", 13, QUIET, "middle"),
    ]
    start = 0
    for chunk, tokens in enumerate(SLICES):
        y, middle = TOP + start * CELL, TOP + (start + tokens / 2) * CELL + 4
        if start:
            text = "from the K/V store"
            shapes.append(Rect(LEFT, y, start * CELL, tokens * CELL, COLOURS[chunk], QUIET, 1))
            shapes.append(Label(LEFT + start * CELL / 2, middle, text, 11, INK, "middle"))
        shapes.append(_causal(LEFT + start * CELL, y, tokens, COLOURS[chunk]))
        shapes.append(Label(LEFT - 12, middle, f"slice {chunk}", 13, INK, "end", True))
        start += tokens
    x, y = LEFT + (length + 1) * CELL, TOP + length * CELL
    shapes.append(_causal(x, y, DOCUMENT, COLOURS[-1]))
    shapes.append(Label(LEFT - 12, y + DOCUMENT * CELL / 2 + 4, "document 1", 13, INK, "end", True))
    bottom = TOP + (length + DOCUMENT) * CELL + 28
    shapes += _store(bottom)
    texts = ("chunk 0: slice 0", "chunk 1: slice 1", "chunk 2: slice 2, document 1")
    for chunk, text in enumerate(texts):
        shapes.append(Rect(x + 40, TOP + 26 * chunk, 16, 14, COLOURS[chunk], QUIET, 1))
        shapes.append(Label(x + 64, TOP + 26 * chunk + 12, text, 12, INK))
    return to_svg(Drawing(x + 270, bottom + 136, tuple(shapes)))


def _causal(x: float, y: float, tokens: int, colour: str) -> Line:
    """Steps of a causal mask: query i attends to keys 0 to i."""
    points = [(x, y)]
    for step in range(tokens):
        right = x + (step + 1) * CELL
        points += [(right, y + step * CELL), (right, y + (step + 1) * CELL)]
    return Line((*points, (x, y + tokens * CELL), (x, y)), QUIET, 1, colour)


def _store(y: float) -> list[Shape]:
    """The buffer of one layer: what each slice's F and B do with it."""
    shapes: list[Shape] = [Label(LEFT - 12, y + 26, "K/V store", 13, INK, "end", True)]
    x = LEFT
    for chunk, tokens in enumerate(SLICES):
        shapes.append(Rect(x, y, tokens * CELL, 40, COLOURS[chunk], QUIET, 1))
        shapes.append(Label(x + tokens * CELL / 2, y + 25, f"F{chunk} writes", 12, INK, "middle"))
        x += tokens * CELL
    for later in range(1, len(SLICES)):
        low, right = y + 36 + 22 * later, LEFT + sum(SLICES[:later]) * CELL
        shapes.append(Line(((LEFT, low), (right, low)), LINE, 2))
        text = f"F{later} reads, B{later} adds gradients of K and V"
        shapes.append(Label(right + 8, low + 4, text, 12, QUIET))
    return [*shapes, Label(LEFT, y + 116, "B0 runs last and frees the buffer", 12, QUIET)]


def vocabulary_parallelism() -> str:
    """Return the SVG of the way of one chunk through four stages, from F to G."""
    shapes: list[Shape] = []

    def bar(op: str, stage: int, begin: float) -> float:
        colour, width = OPS[op]
        x, y = LEFT + begin * UNIT, TOP + stage * ROW
        shapes.append(Rect(x, y, width * UNIT, BAR, colour, QUIET, 1))
        shapes.append(Label(x + width * UNIT / 2, y + 22, f"{op}0", 13, INK, "middle"))
        return begin + width

    def hand_over(end: float, source: int, begin: float, target: int, dashed: bool = False) -> None:
        start = (LEFT + end * UNIT, TOP + source * ROW + BAR / 2)
        stop = (LEFT + begin * UNIT, TOP + target * ROW + BAR / 2)
        shapes.append(Line((start, stop), QUIET, 1.5, dashed=dashed))

    for stage in range(STAGES):
        y = TOP + stage * ROW
        shapes.append(Label(LEFT - 12, y + 22, f"stage {stage}", 13, INK, "end", True))
    gap, at = 0.3, 0.0
    for stage in range(STAGES):
        end = bar("F", stage, at)
        if stage < STAGES - 1:
            hand_over(end, stage, end + gap, stage + 1)
        at = end + gap
    at += 0.3
    hand_over(end, STAGES - 1, at, 0, dashed=True)
    texts = [(end - 1.0, "hidden states")]
    for stage in range(STAGES):
        end = bar("H", stage, at)
        if stage < STAGES - 1:
            hand_over(end, stage, end + gap, stage + 1)
        at = end + gap
    texts.append((end - 2.2, "statistics of the logits"))
    begin = end + 0.1
    for stage in reversed(range(STAGES)):
        end = bar("B", stage, begin)
        bar("G", stage, end + 0.1)
        if stage:
            hand_over(end, stage, end + gap, stage - 1)
        begin = end + gap
    texts.append((end - 3.6, "gradient, log-sum-exp"))
    for place, text in texts:
        shapes.append(Label(LEFT + place * UNIT, TOP - 16, text, 12, QUIET, "middle"))
    width = LEFT + (end + 1.1) * UNIT
    note = "Other chunks run in the gaps; G may wait. H computes a stage's rows of the LM head."
    shapes.append(Label(LEFT, TOP + STAGES * ROW + 10, note, 12, QUIET))
    return to_svg(Drawing(width, TOP + STAGES * ROW + 28, tuple(shapes)))


def lockstep() -> str:
    """Return the SVG of two replicas that run the same ops at the same time."""
    shapes: list[Shape] = []
    for replica in range(len(LOCKSTEP)):
        y = TOP + replica * ROW + 22
        shapes.append(Label(LEFT - 12, y, f"replica {replica}", 13, INK, "end", True))
    begin, bottom = 0.0, TOP + len(LOCKSTEP) * ROW
    for chunk, pair in enumerate(zip(*LOCKSTEP, strict=True)):
        x, most = LEFT + begin * UNIT, max(seconds for _, seconds in pair)
        shapes.append(Label(x + most * UNIT / 2, TOP - 14, f"F{chunk}", 13, INK, "middle", True))
        for replica, (text, seconds) in enumerate(pair):
            y = TOP + replica * ROW
            colour = COLOURS[0] if text.startswith("slice") else COLOURS[2]
            shapes.append(Rect(x, y, most * UNIT, BAR, "#f3f4f6"))
            shapes.append(Rect(x, y, seconds * UNIT, BAR, colour, QUIET, 1))
            place = x + max(seconds, 1.0) * UNIT / 2
            shapes.append(Label(place, y + 22, text, 12, INK, "middle"))
        begin += most
        line = LEFT + begin * UNIT
        shapes.append(Line(((line, TOP - 24), (line, bottom)), LINE, 1.5, dashed=True))
    note = (
        "The replicas meet in every layer with experts, so an op takes as long as the slower one."
    )
    shapes.append(Label(LEFT, bottom + 16, note, 12, QUIET))
    return to_svg(Drawing(LEFT + begin * UNIT + 20, bottom + 34, tuple(shapes)))


def pictures() -> dict[Path, str]:
    """Return the SVG of each file."""
    return {
        FOLDER / "attention_slices.svg": attention_slices(),
        FOLDER / "lockstep.svg": lockstep(),
        FOLDER / "vocabulary_parallelism.svg": vocabulary_parallelism(),
    }


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
        print(f"wrote {path}")
