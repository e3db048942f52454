"""Layers with a recurrent state: Mamba-2 and the gated delta net.

Such layers have no query-key pairs. A slice of any length passes a state and a few rows to the next
slice. The constant time per chunk is assumed to be twice that of a dense layer, because of the
launches of a convolution and a blocked scan.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_epp.cost.kinds.base import CarryOver, Decoder, Part, RecomputedModule, Sizes, Sublayer

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

    @property
    def state_inner(self) -> int:
        """Channels of all heads with a state."""
        return self.state_heads * self.state_values

    @property
    def convolved(self) -> int:
        """Channels of the convolution: values, and B and C (Mamba) or Q and K of all groups."""
        return self.state_inner + 2 * self.state_groups * self.state_keys

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
    PER_HEAD: ClassVar[int]  # numbers per head and token that control decay and update of the state

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities that both kinds have, without flops of the scan."""
        hidden, inner, convolved = model.hidden, shape.state_inner, shape.convolved
        # values, gates, keys and the numbers of every head
        projected = inner + convolved + cls.PER_HEAD * shape.state_heads
        return Sublayer(
            parameters=hidden * (projected + inner) + TAPS * convolved + inner + hidden,
            saved=2 * hidden + projected + 3 * inner,
            weight_inputs=2 * hidden + projected + inner,
            # the norm of the sublayer's input, and the norm before its output projection
            recomputed={"layernorm": RecomputedModule(hidden + inner, light=True)},
            # the last rows of the convolution's input, and the state
            carried=CarryOver(
                heads=shape.state_heads,
                tail=(TAPS - 1) * convolved,
                state=inner * shape.state_keys,
            ),
            exchanged=projected + inner,
            gathers=1,
        )


class MambaPart(_SSMPart):
    """Mamba-2; the kernel saves its input and its ungated output, and recomputes other tensors."""

    WORD, ALONE, PER_HEAD = "mamba", "mamba", 1  # a time step

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` is a Mamba layer."""
        return shape.mamba_heads > 0

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of Mamba-2.

        The flops of the scan cover products with keys and values within a block (half of its
        pairs), outputs from the state, and updates of the state.
        """
        inner, keys = shape.state_inner, shape.state_groups * shape.state_keys
        scan_flops = BLOCK * (keys + inner) + 4.0 * inner * shape.state_keys
        return replace(super().of(model, shape), scan_flops=scan_flops)


class GatedDeltaNetPart(_SSMPart):
    """Gated delta net; a triangular system first makes the rows of a block independent."""

    WORD, ALONE, PER_HEAD = "delta", "delta", 2  # decay and update rate

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` is a gated delta net."""
        return shape.delta_heads > 0

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of a gated delta net.

        The saved channels are those of the projections, the convolution's output, the normalised Q
        and K of every head, and the outputs before and after norm and gate. The flops of the scan
        cover the terms of Mamba-2 (here with keys for each head), the triangular system, and the
        computation of the values that the update subtracts from the state.
        """
        common, inner = super().of(model, shape), shape.state_inner
        block, keys = BLOCK // 2, shape.delta_heads * shape.state_keys
        return replace(
            common,
            saved=common.saved + shape.convolved + 2 * keys,
            scan_flops=2.0 * block * (2 * keys + inner) + 6.0 * inner * shape.state_keys,
        )
