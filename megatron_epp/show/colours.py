"""Colours of ops in pictures.

Every op kind has a family of colours, with a shade for each chunk. The slices of a cut document
darken from the first slice to the last. Packs alternate between two pale shades, so that adjacent
chunks differ. Every cut document also has an accent colour.
"""

import colorsys
from dataclasses import dataclass

from megatron_epp.ir import Kind, Plan, slices_of
from megatron_epp.show.timeline import slice_places


@dataclass(frozen=True, slots=True)
class Family:
    """Appearance of one kind of op in all pictures.

    Attributes:
        name: name of the op kind in legends.
        hue: hue in degrees.
        saturation: saturation of slices, from 0 to 1; packs are paler.
        sign: character that follows the label in text charts.
        ansi: ANSI colour code for terminals.
        trace: name of a colour of the Chrome trace format; "" if ops of the kind have none.
    """

    name: str
    hue: float
    saturation: float
    sign: str
    ansi: str
    trace: str = ""

    def shade(self, lightness: float, saturation: float | None = None) -> str:
        """Return the family's colour with ``lightness`` (0 to 1), as ``#rrggbb``."""
        chosen = self.saturation if saturation is None else saturation
        red, green, blue = colorsys.hls_to_rgb(self.hue / 360, lightness, chosen)
        return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"

    @property
    def plain(self) -> str:
        """Colour of the family in legends."""
        return self.shade(0.60)


FAMILIES: dict[Kind, Family] = {
    Kind.FORWARD: Family("forward", 213, 0.68, "-", "34", "thread_state_running"),
    Kind.BACKWARD: Family("backward", 152, 0.52, "=", "32", "thread_state_runnable"),
    Kind.INPUT: Family("backward: input gradient", 176, 0.55, "~", "36", "rail_animation"),
    Kind.WEIGHT: Family("backward: weight gradient", 40, 0.80, ":", "33", "rail_load"),
    Kind.HEAD: Family("vocabulary", 4, 0.62, "^", "31", "rail_response"),
    Kind.HEAD_WEIGHT: Family("vocabulary: weight gradient", 24, 0.45, "'", "91", "cq_build_passed"),
    Kind.SEND: Family("send", 285, 0.40, ">", "35"),
    Kind.RECEIVE: Family("receive (wait)", 320, 0.45, "<", "35"),
}

INK = "#1f2933"
QUIET_INK = "#66727f"
PAPER = "#ffffff"
IDLE = "#eef0f3"
GRID = "#d5dae0"
RECOMPUTE = "#c0392b"
BUDGET = "#c0392b"
CRITICAL = "#111111"
MEMORY = "#8592a6"
MEMORY_FILL = "#dfe5ee"

# Colours for cut documents, in turn; dark enough to be visible on every family.
ACCENTS = ("#7b1fa2", "#d84315", "#00695c", "#1a237e", "#ad1457", "#827717", "#4e342e", "#01579b")


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of the chunks of one plan.

    Attributes:
        lightness: lightness of each chunk from 0 to 1, for all op kinds.
        saturation: for each chunk, factor on the saturation of the op kind's family.
        accent: accent colour of each chunk's cut document, or "" for packs.
    """

    lightness: tuple[float, ...]
    saturation: tuple[float, ...]
    accent: tuple[str, ...]

    def fill(self, kind: Kind, chunk: int) -> str:
        """Return the fill colour of an op of ``kind`` on ``chunk``."""
        family = FAMILIES[kind]
        return family.shade(self.lightness[chunk], family.saturation * self.saturation[chunk])

    def ink(self, chunk: int) -> str:
        """Return the colour of a label on the ops of ``chunk``."""
        return PAPER if self.lightness[chunk] < 0.52 else INK


def palette(plan: Plan) -> Palette:
    """Return the colours of the chunks of ``plan``."""
    slices = slices_of(plan)
    lightness, saturation, accent = [], [], []
    cut = {document: None for document in slices.document if document >= 0}
    place = {document: number for number, document in enumerate(sorted(cut))}
    packs = 0
    for document, (before, count) in zip(slices.document, slice_places(slices), strict=True):
        if document < 0:
            lightness.append(0.80 if packs % 2 else 0.73)
            saturation.append(0.75)
            accent.append("")
            packs += 1
            continue
        lightness.append(0.66 - 0.24 * before / max(1, count - 1))
        saturation.append(1.0)
        accent.append(ACCENTS[place[document] % len(ACCENTS)])
    return Palette(tuple(lightness), tuple(saturation), tuple(accent))


# Legend texts of the shades and accents.
SHADES = "pale: whole documents; darker: a later slice of a cut one"
ACCENTED = "upper edge: one colour for each cut document"
_MOST_SWATCHES = 4


def shades(paints: Palette) -> tuple[str, ...]:
    """Return three sample colours for the legend, or () if no document is cut.

    The colours are those of a whole document, of the first slice of a cut document, and of its last
    slice.
    """
    if not any(paints.accent):
        return ()
    full, first, last = (0.73, 0.75), (0.66, 1.0), (0.42, 1.0)
    family = FAMILIES[Kind.FORWARD]
    return tuple(
        family.shade(light, family.saturation * factor) for light, factor in (full, first, last)
    )


def accents(paints: Palette) -> tuple[str, ...]:
    """Return the accent colours of up to four cut documents, for the legend."""
    return tuple(dict.fromkeys(filter(None, paints.accent)))[:_MOST_SWATCHES]
