"""A drawing as data: rectangles, lines and labels in pixels. Painters make it, canvases write."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str = ""
    stroke_width: float = 0.0
    title: str = ""  # shown when the pointer rests on it, where the canvas can


@dataclass(frozen=True, slots=True)
class Path:
    """A line through points; filled when ``fill`` is given."""

    points: tuple[tuple[float, float], ...]
    stroke: str = ""
    stroke_width: float = 1.0
    fill: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline is at ``y``."""

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
    """Shapes in the order they are painted; pixels from the upper left corner."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    background: str = "#ffffff"


# Mean advance of a sans-serif letter, as a share of its size: to see whether a label fits.
CHARACTER_WIDTH = 0.60


def text_width(text: str, size: float) -> float:
    return len(text) * size * CHARACTER_WIDTH
