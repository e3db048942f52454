"""A window: a query sees so many keys at most, so that later slices want a tail alone."""

from dataclasses import dataclass

from megatron_epp.cost.kinds.attention import AttentionSizes


@dataclass(frozen=True)
class WindowSizes(AttentionSizes):
    """window: keys that a query sees at most, itself among them; 0: all before it."""

    window: int = 0

    def require(self) -> None:
        super().require()
        if not self.attention and self.window:
            raise ValueError("attention false: window has no effect; leave it out")
