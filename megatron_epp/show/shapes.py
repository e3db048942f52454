"""Drawing as data: rectangles, lines and labels in pixels, independent of the output format."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rect:
    """Rectangle; formats with hover text show ``title`` when the pointer is over it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""
    stroke_width: float = 0.0
    title: str = ""


@dataclass(frozen=True, slots=True)
class Path:
    """Line through points, filled if ``fill`` is given."""

    points: tuple[tuple[float, float], ...]
    stroke: str = ""
    stroke_width: float = 1.0
    fill: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """Text with its baseline at ``y``."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False


Shape = Rect | Path | Label


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes in painting order; the origin is the upper left corner."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    background: str = "#ffffff"


# Mean advance of a sans-serif character relative to the font size.
CHARACTER_WIDTH = 0.60


def text_width(text: str, size: float) -> float:
    """Return the estimated width of ``text`` in pixels."""
    return len(text) * size * CHARACTER_WIDTH
