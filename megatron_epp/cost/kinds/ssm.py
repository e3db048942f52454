"""Layers with a recurrent state: Mamba-2 and the gated delta net.

Such layers have no query-key pairs. A slice of any length passes a state and a few rows to the next
slice. The constant time per chunk is assumed to be twice that of a dense layer, because of the
launches of a convolution and a blocked scan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.kinds.base import CarryOver, Part, RecomputedModule, Sizes

TAPS = 4  # width of the convolution before the scan; TAPS - 1 rows cross a boundary
# Rows of a scan's block, within which rows interact as in attention.
BLOCK = 128


@dataclass(frozen=True)
class SSMSizes(Sizes):
    """Sizes of layers with a recurrent state.

    Attributes:
        mamba_heads: heads of a Mamba layer; 0: the layer is not a Mamba layer.
        delta_heads: value heads of a gated delta net; 0: the layer is not a gated delta net.
        state_groups: groups of heads that share keys: B and C of Mamba, Q and K of a gated delta
            net.
        state_keys: channels of a key, the first dimension of a head's state.
        state_values: channels of a head, the second dimension of its state.
    """

    mamba_heads: int = 0
    delta_heads: int = 0
    state_groups: int = 0
    state_keys: int = 0
    state_values: int = 0

    @property
    def state_heads(self) -> int:
        """Number of heads with a state."""
        return self.mamba_heads or self.delta_heads

    def require(self) -> None:
        """Raise a ValueError if the sizes are inconsistent."""
        super().require()
        others = ("state_groups", "state_keys", "state_values")
        for name in others:
            size = getattr(self, name)
            if bool(size) != bool(self.state_heads):
                wanted = "at least 1" if self.state_heads else "mamba_heads or delta_heads with it"
                raise ValueError(f"{name} {size}: expected {wanted}")
        if self.mamba_heads and self.delta_heads:
            raise ValueError(f"delta_heads {self.delta_heads}: expected 0 with mamba_heads")
        if self.state_heads and self.state_heads % self.state_groups:
            raise ValueError(
                f"state_groups {self.state_groups}: expected a divisor of the heads, "
                f"{self.state_heads}"
            )


class _SSMPart(Part):
    """Input projection, convolution, scan, and output projection."""

    MIXER, LAUNCHES = True, 2

    @property
    def keys(self) -> int:
        """Channels of all groups of B or of C (Mamba), or of Q or of K (gated delta net)."""
        return self.shape.state_groups * self.shape.state_keys

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.shape.state_heads * self.shape.state_values

    @property
    def per_head(self) -> int:
        """Numbers per head and token that control the decay and the update of the state."""
        raise NotImplementedError

    @property
    def projected(self) -> int:
        """Channels of the input projection: values, gates, keys and the numbers ``per_head``."""
        return 2 * self.inner + 2 * self.keys + self.per_head * self.shape.state_heads

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.keys

    @property
    def parameters(self) -> int:
        """Parameters of projections, convolution and norms."""
        products = self.model.hidden * (self.projected + self.inner)
        return products + TAPS * self.convolved + self.inner + self.model.hidden

    @property
    def carried(self) -> CarryOver:
        """Last rows of the convolution's input, and the state."""
        return CarryOver(
            heads=self.shape.state_heads,
            tail=(TAPS - 1) * self.convolved,
            state=self.inner * self.shape.state_keys,
        )

    @property
    def weight_inputs(self) -> int:
        """Channels saved from I to W."""
        return 2 * self.model.hidden + self.projected + self.inner

    @property
    def recomputed(self) -> Mapping[str, RecomputedModule]:
        """Norm of the sublayer's input, and norm before its output projection."""
        return {"layernorm": RecomputedModule(self.model.hidden + self.inner, light=True)}

    @property
    def exchanged(self) -> int:
        """Channels exchanged within a CP group in a forward."""
        return self.projected + self.inner

    @property
    def gathers(self) -> bool:
        """Whether the hidden state is gathered within a TP group."""
        return True


class MambaPart(_SSMPart):
    """Mamba-2; the kernel saves its input and its ungated output, and recomputes other tensors."""

    WORD, ALONE = "mamba", "mamba"

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` is a Mamba layer."""
        return shape.mamba_heads > 0

    @property
    def per_head(self) -> int:
        """One number per head and token: a time step."""
        return 1

    @property
    def saved(self) -> int:
        """Channels saved from F to B."""
        return 2 * self.model.hidden + self.projected + 3 * self.inner

    @property
    def scan_flops(self) -> float:
        """Forward flops per token of the scan.

        They cover products with keys and values within a block (half of its pairs), outputs from
        the state, and updates of the state.
        """
        within = BLOCK * (self.keys + self.inner)
        return within + 4.0 * self.inner * self.shape.state_keys


class GatedDeltaNetPart(_SSMPart):
    """Gated delta net; a triangular system first makes the rows of a block independent."""

    WORD, ALONE = "delta", "delta"

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` is a gated delta net."""
        return shape.delta_heads > 0

    @property
    def per_head(self) -> int:
        """Two numbers per head and token: decay and update rate."""
        return 2

    @property
    def saved(self) -> int:
        """Channels saved from F to B.

        They cover the projections, the convolution's output, normalised Q and K of every head, and
        outputs before and after norm and gate.
        """
        of_heads = 2 * self.shape.delta_heads * self.shape.state_keys
        return 2 * self.model.hidden + self.projected + self.convolved + of_heads + 3 * self.inner

    @property
    def scan_flops(self) -> float:
        """Forward flops per token of the scan.

        They cover the terms of Mamba (here with keys for each head), the triangular system, and the
        computation of the values that the update subtracts from the state.
        """
        block, keys = BLOCK // 2, self.shape.delta_heads * self.shape.state_keys
        return 2.0 * block * (2 * keys + self.inner) + 6.0 * self.inner * self.shape.state_keys
