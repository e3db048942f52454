"""Sliding-window attention: later slices need only the last tokens of a slice."""

from dataclasses import dataclass

from megatron_epp.cost.kinds.attention import AttentionSizes


@dataclass(frozen=True)
class WindowSizes(AttentionSizes):
    """Size of a sliding window.

    Attributes:
        window: maximum keys of a query, its own included (W + 1 of --window-size W,0); 0: the whole
            context.
    """

    window: int = 0

    def require(self) -> None:
        """Raise a ValueError if the sizes are inconsistent."""
        super().require()
        if not self.attention and self.window:
            raise ValueError("attention false: window has no effect; leave it out")
