"""The line that test programs print losses in."""

import os


def write_line(iteration: int, *values: float) -> None:
    """Write floats with all their digits, in one call: a rank that writes a line and its end apart
    has other ranks' text between them."""
    words = " ".join(["exact: iteration", str(iteration), *map(repr, values)])
    os.write(1, f"\n{words}\n".encode())
