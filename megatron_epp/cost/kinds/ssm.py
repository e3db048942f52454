"""Layers that carry a state from token to token: Mamba-2 and the gated delta net.

Neither knows pairs of tokens: what a slice leaves for later ones is a state at its end and a few
rows in front of it, whatever its length. Assumed: a chunk's constant is twice a dense layer's, for
the launches of a convolution and a scan in blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes

TAPS = 4  # of the convolution in front of a scan: rows in front of a border are one less
# Rows of a scan's blocks. Within one, rows meet each other as in attention.
BLOCK = 128


@dataclass(frozen=True)
class SSMSizes(Sizes):
    """The sizes of layers with a state.

    mamba_heads    of a Mamba layer; 0: it is none
    delta_heads    of V in a gated delta net; 0: it is none
    state_groups   of heads that share keys: B and C of Mamba, Q and K of a gated delta net
    state_keys     channels of a key, by which a head's state is as long
    state_values   channels of a head
    """

    mamba_heads: int = 0
    delta_heads: int = 0
    state_groups: int = 0
    state_keys: int = 0
    state_values: int = 0

    @property
    def state_heads(self) -> int:
        return self.mamba_heads or self.delta_heads

    def require(self) -> None:
        super().require()
        others = ("state_groups", "state_keys", "state_values")
        for name in others:
            size = getattr(self, name)
            if bool(size) != bool(self.state_heads):
                wanted = (
                    "at least 1" if self.state_heads else "mamba_heads or delta_heads beside it"
                )
                raise ValueError(f"{name} {size}: expected {wanted}")
        if self.mamba_heads and self.delta_heads:
            raise ValueError(f"delta_heads {self.delta_heads}: expected 0 beside mamba_heads")
        if self.state_heads and self.state_heads % self.state_groups:
            raise ValueError(
                f"state_groups {self.state_groups}: expected a divisor of the heads, "
                f"{self.state_heads}"
            )


class _SSMPart(Part):
    """A projection, a convolution, a scan, and a projection back."""

    MIXER, LAUNCHES = True, 2

    @property
    def keys(self) -> int:
        """Channels of all keys, of which there are two."""
        return self.shape.state_groups * self.shape.state_keys

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.shape.state_heads * self.shape.state_values

    @property
    def per_head(self) -> int:
        """Numbers of each head and token that say how a state decays and what joins it."""
        raise NotImplementedError

    @property
    def projected(self) -> int:
        """Channels that the first projection makes: values, their gates, keys and those numbers."""
        return 2 * self.inner + 2 * self.keys + self.per_head * self.shape.state_heads

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.keys

    @property
    def parameters(self) -> int:
        products = self.model.hidden * (self.projected + self.inner)
        return products + TAPS * self.convolved + self.inner + self.model.hidden

    @property
    def carried(self) -> CarryOver:
        return CarryOver(
            heads=self.shape.state_heads,
            tail=(TAPS - 1) * self.convolved,
            state=self.inner * self.shape.state_keys,
        )

    @property
    def weight_inputs(self) -> int:
        return 2 * self.model.hidden + self.projected + self.inner

    @property
    def recomputed(self) -> Mapping[str, RecomputedModule]:
        """Its input's norm, and the norm in front of its last product."""
        return {"layernorm": RecomputedModule(self.model.hidden + self.inner, light=True)}

    @property
    def exchanged(self) -> int:
        return self.projected + self.inner

    @property
    def gathers(self) -> bool:
        return True


class MambaPart(_SSMPart):
    """Mamba-2: the kernel keeps what it is given and what it gives before its gate, and remakes the
    rest."""

    WORD, ALONE = "mamba", "mamba"

    @classmethod
    def there(cls, shape: Any) -> bool:
        return shape.mamba_heads > 0

    @property
    def per_head(self) -> int:
        return 1  # a time step

    @property
    def saved(self) -> int:
        return 2 * self.model.hidden + self.projected + 3 * self.inner

    @property
    def scan_flops(self) -> float:
        """Keys and values within a block of rows (half of its pairs), a state's share in outputs
        and outputs' in the state."""
        within = BLOCK * (self.keys + self.inner)
        return within + 4.0 * self.inner * self.shape.state_keys


class GatedDeltaNetPart(_SSMPart):
    """The gated delta net: a block's rows are made independent of each other first, by a
    triangular system."""

    WORD, ALONE = "delta", "delta"

    @classmethod
    def there(cls, shape: Any) -> bool:
        return shape.delta_heads > 0

    @property
    def per_head(self) -> int:
        return 2  # decay and share

    @property
    def saved(self) -> int:
        """Projections, what is convolved, Q and K normed and one for each head, outputs before and
        behind their norm and gate."""
        of_heads = 2 * self.shape.delta_heads * self.shape.state_keys
        return 2 * self.model.hidden + self.projected + self.convolved + of_heads + 3 * self.inner

    @property
    def scan_flops(self) -> float:
        """As Mamba's with keys of every head, besides the system and the values that it takes away
        again."""
        block, keys = BLOCK // 2, self.shape.delta_heads * self.shape.state_keys
        return 2.0 * block * (2 * keys + self.inner) + 6.0 * self.inner * self.shape.state_keys
