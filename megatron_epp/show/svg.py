"""Output of a drawing as SVG text."""

import re
from xml.sax.saxutils import escape, quoteattr

from megatron_epp.show.shapes import Drawing, Label, Path, Rect, Shape

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


def to_svg(drawing: Drawing) -> str:
    """Return the SVG text of ``drawing``."""
    width, height = _number(drawing.width), _number(drawing.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" '
        f'width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family={quoteattr(_FONT)}>',
        f'<rect width="{width}" height="{height}" fill="{drawing.background}"/>',
        *map(_shape, drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _shape(shape: Shape) -> str:
    match shape:
        case Rect():
            head = (
                f'<rect x="{_number(shape.x)}" y="{_number(shape.y)}" '
                f'width="{_number(shape.width)}" height="{_number(shape.height)}" '
                f'fill="{shape.fill or "none"}"{_stroke(shape.stroke, shape.stroke_width)}'
            )
            if shape.title:
                return f"{head}><title>{_text(shape.title)}</title></rect>"
            return f"{head}/>"
        case Path():
            points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
            dash = ' stroke-dasharray="5 3"' if shape.dashed else ""
            return (
                f'<polyline points="{points}" fill="{shape.fill or "none"}"'
                f"{_stroke(shape.stroke, shape.stroke_width)}{dash}/>"
            )
        case Label():
            bold = ' font-weight="600"' if shape.bold else ""
            anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
            return (
                f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" '
                f'font-size="{_number(shape.size)}" fill="{shape.colour}"{anchor}{bold}>'
                f"{_text(shape.text)}</text>"
            )


# Characters that XML cannot contain, even escaped: control characters, halves of surrogate pairs.
_FOREIGN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _text(text: str) -> str:
    return escape(_FOREIGN.sub("\ufffd", text))


def _stroke(colour: str, width: float) -> str:
    return f' stroke="{colour}" stroke-width="{_number(width)}"' if colour else ""


def _number(value: float) -> str:
    """Format a number with two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
