"""Formatting of seconds, bytes, fractions and tokens as text, and ticks of an axis."""

import math

GIB = 1 << 30
MIB = 1 << 20


def seconds_text(seconds: float) -> str:
    """Return ``seconds`` as text with three or four digits: ``1.234 s``, ``12.3 ms``, ``0 s``."""
    if seconds == 0:
        return "0 s"
    factor, unit = _second_unit(abs(seconds))
    value = seconds * factor
    digits = max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits + (unit == 's')}f} {unit}"


def bytes_text(count: float) -> str:
    """Return bytes as text in GiB, or in MiB below 0.01 GiB: ``10.50 GiB``, ``3.20 MiB``."""
    if abs(count) >= GIB / 100:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.2f} MiB"


def fraction_text(fraction: float) -> str:
    """Return ``fraction`` as text in percent: 0.123 is ``12.3%``."""
    return f"{100 * fraction:.1f}%"


def tokens_text(tokens: float) -> str:
    """Return ``tokens`` as ``812``, ``9.0K`` or ``1.55M``; K is 1000 and M is 10**6."""
    if tokens < 1000:
        return f"{tokens:.0f}"
    if tokens < 1e6:
        return f"{tokens / 1e3:.1f}K"
    return f"{tokens / 1e6:.2f}M"


def ticks(stop: float, most: int) -> list[float]:
    """Return at most ``most`` + 1 evenly spaced positions with round values, from 0 to ``stop``."""
    if stop <= 0 or most < 1:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(stop / most))
    step = next(n * power for n in (1, 2, 5, 10, 20) if n * power * most >= stop * (1 - 1e-9))
    return [n * step for n in range(math.floor(stop / step * (1 + 1e-9)) + 1)]


def time_ticks(stop: float, most: int) -> list[tuple[float, str]]:
    """Return (seconds, label) of ticks from 0 to ``stop``; the first label contains the unit."""
    factor, unit = _second_unit(stop)
    places = ticks(stop * factor, most)
    step = places[1] if len(places) > 1 else 1.0
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(place / factor, f"{place:.{digits}f}" if place else f"0 {unit}") for place in places]


def _second_unit(seconds: float) -> tuple[float, str]:
    if seconds >= 1 or seconds == 0:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
