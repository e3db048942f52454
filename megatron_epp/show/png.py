"""Output of a drawing as a PNG file, by matplotlib's raster back end."""

import io

from megatron_epp.show.shapes import Drawing, Label, Path, Rect

_POINTS_PER_INCH = 72
# Limit of each side: viewers refuse larger pictures, matplotlib refuses sides 4 times as long
_MOST_PIXELS = 16384


def to_png(drawing: Drawing, scale: float = 2.0) -> bytes:
    """Return the PNG file, enlarged by ``scale``, or by less if the drawing is very large."""
    scale = min(scale, _MOST_PIXELS / max(drawing.width, drawing.height))
    # Imported here, because the import takes half a second and text pictures do not need it. Not
    # pyplot, which would choose a window system and keep every figure in memory.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Polygon, Rectangle

    figure = Figure(
        figsize=(drawing.width / _POINTS_PER_INCH, drawing.height / _POINTS_PER_INCH),
        facecolor=drawing.background,
    )
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)  # y grows downwards, as in SVG
    axes.set_axis_off()
    for order, shape in enumerate(drawing.shapes):
        match shape:
            case Rect():
                axes.add_patch(
                    Rectangle(
                        (shape.x, shape.y),
                        shape.width,
                        shape.height,
                        facecolor=shape.fill or "none",
                        edgecolor=shape.stroke or "none",
                        linewidth=shape.stroke_width,
                        zorder=order,
                    )
                )
            case Path():
                if shape.fill:
                    axes.add_patch(
                        Polygon(shape.points, facecolor=shape.fill, edgecolor="none", zorder=order)
                    )
                if shape.stroke:
                    axes.add_line(
                        Line2D(
                            [x for x, _ in shape.points],
                            [y for _, y in shape.points],
                            color=shape.stroke,
                            linewidth=shape.stroke_width,
                            linestyle=(0, (5, 3)) if shape.dashed else "-",
                            zorder=order,
                        )
                    )
            case Label():
                axes.text(
                    shape.x,
                    shape.y,
                    shape.text,
                    fontsize=shape.size,
                    color=shape.colour,
                    ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                    va="baseline",
                    weight="bold" if shape.bold else "normal",
                    zorder=order,
                    parse_math=False,
                )
    image = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(image, format="png", dpi=_POINTS_PER_INCH * scale)
    return image.getvalue()
