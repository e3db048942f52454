"""Sublayers: mixers, which move information between tokens, and feed-forward sublayers.

Each kind of sublayer is a subclass of :class:`Part`, which returns a :class:`Sublayer` with the
quantities that the cost model needs. Sizes are numbers of channels per token unless stated
otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from megatron_epp.cost.columns import Column
from megatron_epp.ir import Kind
from megatron_epp.ir.errors import quoted

BF16, ELEMENT_BYTES = "bf16", 2
_WIDER = {"float32": 4, "float64": 8}
STATE_BYTES = 4  # float32, as scans store their states
GRADIENT_BYTES = 4  # of cached K and V: the executor accumulates their gradients in float32
# Ratio of backward to forward flops: 2 for linear layers, 2.5 for attention, as FlashAttention has
# two matrix products in forward and five in backward. W is half of the linear layers' backward;
# attention has no W.
ATTENTION_BACKWARD = 2.5
# For a dense layer of Llama 3: two norms, rotary embeddings, a gated activation and two additions
# read and write 94,000 channels of a token, of which 70,000 are saved; backward moves 1.5 times as
# many.
MOVED, MOVED_BACKWARD = 1.4, 1.5
MOST = 10**9  # of any size; products of larger sizes would overflow


def element_bytes(dtype: str) -> int:
    """Return the bytes of an element of ``dtype``; 2 for names other than float32 and float64."""
    return _WIDER.get(dtype, ELEMENT_BYTES)


def summed_bytes(dtype: str) -> int:
    """Return the bytes of an element of sums and softmaxes: float32, or ``dtype`` if wider."""
    return max(GRADIENT_BYTES, element_bytes(dtype))


def require_sizes(value: Any, least: Mapping[str, int]) -> None:
    """Raise a ValueError unless each field in ``least`` is an integer >= ``least[name]``."""
    for name, low in least.items():
        size = getattr(value, name)
        if not isinstance(size, int) or isinstance(size, bool) or size < low:
            raise ValueError(f"{name} {quoted(size)}: expected a whole number of at least {low}")
        if size > MOST:
            raise ValueError(f"{name} {quoted(size)}: expected at most {MOST}")


def require_flags(value: Any, names: tuple[str, ...]) -> None:
    """Raise a ValueError unless the fields ``names`` of ``value`` are booleans."""
    for name in names:
        if not isinstance(getattr(value, name), bool):
            raise ValueError(f"{name} {quoted(getattr(value, name))}: expected true or false")


class Decoder(Protocol):
    """Sizes of the model that sublayers need."""

    @property
    def hidden(self) -> int:
        """Hidden size."""

    @property
    def ffn_hidden(self) -> int:
        """Hidden size of the dense MLP."""

    @property
    def heads(self) -> int:
        """Number of attention heads."""

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""

    @property
    def head_size(self) -> int:
        """Channels of an attention head."""

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""


@dataclass(frozen=True)
class Sizes:
    """Base class for one sublayer's sizes, which are fields of a layer's shape; it checks them."""

    def require(self) -> None:
        """Raise a ValueError if the sizes are inconsistent."""


@dataclass(frozen=True)
class CarryOver:
    """State that a slice leaves for later slices of its document.

    Attributes:
        channels: channels per token, such as those of K and V; with a sliding window, only the last
            tokens of a slice count.
        heads: number of heads over which a stage's devices shard the state; 0: each device has the
            full state, as with latents.
        tail: number of elements of the last rows of a slice, which a convolution needs.
        state: number of elements of a state at the boundary of two slices.
    """

    channels: int = 0
    heads: int = 0
    tail: int = 0
    state: int = 0

    def on_device(self, devices: int) -> "CarryOver":
        """Return the state on one device if ``devices`` devices shard the heads."""
        if not self.heads:
            return self
        heads = max(1, self.heads // devices)
        sizes = self.channels, self.tail, self.state
        channels, tail, state = (size // self.heads * heads for size in sizes)
        return CarryOver(channels, heads, tail, state)

    def __add__(self, other: "CarryOver") -> "CarryOver":
        return CarryOver(
            self.channels + other.channels,
            self.heads or other.heads,
            self.tail + other.tail,
            self.state + other.state,
        )


@dataclass(frozen=True)
class RecomputedModule:
    """Savings and cost of recomputing one of Megatron's modules.

    Attributes:
        channels: channels that are not saved.
        parameters: parameters of the matrix products that run again.
        pairs: whether attention runs again.
        light: whether the module only moves memory, such as a norm or an activation function.
    """

    channels: int = 0
    parameters: int = 0
    pairs: bool = False
    light: bool = False

    def __add__(self, other: "RecomputedModule") -> "RecomputedModule":
        return RecomputedModule(
            self.channels + other.channels,
            self.parameters + other.parameters,
            self.pairs or other.pairs,
            self.light or other.light,
        )


@dataclass(frozen=True)
class Work:
    """Forward flops per unit of a column.

    Attributes:
        flops: forward flops per unit.
        backward: ratio of backward to forward flops; op I does the whole backward.
        attention: whether the work runs in attention kernels, at their rate.
    """

    flops: float
    backward: float
    attention: bool = False


@dataclass(frozen=True)
class ContextWorkspace:
    """Additional bytes while an op runs.

    Attributes:
        per_context_token: bytes for each token of the context.
        per_op: bytes that do not depend on the chunk.
    """

    per_context_token: float = 0.0
    per_op: float = 0.0


@dataclass(frozen=True)
class RoutedExperts:
    """Experts of a sublayer to which tokens are routed.

    Attributes:
        parameters: parameters of all experts.
        active: parameters of the experts to which one token is routed.
        copies: number of experts to which one token is routed.
        weight_inputs: channels saved from I to W if W computes the experts' weight gradients.
        exchanged: channels of all copies of a token that are sent to experts' devices (one way).
        permuted: channels that a separate kernel moves to sort tokens by expert.
        narrow_flops: additional forward flops per token for slow products of narrow experts.
        issue: host time to issue the products of all experts, relative to that of a dense layer.
    """

    parameters: int = 0
    active: int = 0
    copies: int = 0
    weight_inputs: int = 0
    exchanged: int = 0
    permuted: float = 0.0
    narrow_flops: float = 0.0
    issue: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """Quantities of one sublayer, or of all sublayers of a layer.

    Attributes:
        parameters: number of parameters, with those of the norm, but without those of routed
            experts, which are sharded differently.
        saved: channels saved from F to B, such as inputs and outputs of norms, inputs of products.
        weight_inputs: channels saved from I to W: inputs of matrix products, and gradients of their
            outputs.
        recomputed: modules that backward can recompute, by Megatron's names.
        carried: state that a slice leaves for later slices.
        stored: ``saved`` channels that the K/V buffer of a cut document holds.
        stored_unless: name of a module; if B recomputes it, the buffer does not hold the
            ``stored`` channels. Empty: there is no such module.
        unmoved: ``saved`` channels that no element-wise kernel reads or writes.
        flops_per_pair: forward flops per query-key pair.
        scan_flops: forward flops per token in addition to products with the sublayer's weights.
        work: work per unit of columns other than tokens and pairs; no two sublayers of a layer have
            the same column.
        workspaces: workspaces while F and B run; at most one sublayer of a layer has workspaces.
        routed: experts to which tokens are routed; at most one sublayer of a layer has experts.
        exchanged: channels exchanged within a CP group in a forward.
        heads: number of additional runs of the LM head for a layer with this sublayer.
        gathers: number of sublayers around which the hidden state is gathered within a TP group.
    """

    parameters: int
    saved: int
    weight_inputs: int
    recomputed: Mapping[str, RecomputedModule]
    carried: CarryOver = CarryOver()
    stored: int = 0
    stored_unless: str = ""
    unmoved: int = 0
    flops_per_pair: float = 0.0
    scan_flops: float = 0.0
    work: Mapping[Column, Work] = field(default_factory=dict)
    workspaces: Mapping[Kind, ContextWorkspace] = field(default_factory=dict)
    routed: RoutedExperts = RoutedExperts()
    exchanged: int = 0
    heads: int = 0
    gathers: int = 0

    @property
    def moved(self) -> float:
        """Channels that kernels other than products and attention read or write in a forward."""
        return MOVED * (self.saved - self.unmoved)

    def __add__(self, other: "Sublayer") -> "Sublayer":
        modules = dict(self.recomputed)
        for name, module in other.recomputed.items():
            modules[name] = modules[name] + module if name in modules else module
        return Sublayer(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            recomputed=modules,
            stored_unless=self.stored_unless or other.stored_unless,
            work={**self.work, **other.work},
            workspaces={**self.workspaces, **other.workspaces},
            routed=self.routed if self.routed.copies else other.routed,
        )


_SUMS = (
    *("parameters", "saved", "weight_inputs", "carried", "stored", "unmoved", "flops_per_pair"),
    *("scan_flops", "exchanged", "heads", "gathers"),
)


class Part:
    """Base class of the kinds of sublayers."""

    MIXER: ClassVar[bool]  # whether it moves information between tokens
    WORD: ClassVar[str]  # its word in the name of a kind
    ALONE: ClassVar[str]  # its word if the layer has no other sublayer
    DEFAULT: ClassVar[bool] = False  # whether default layers have it; names of kinds omit it
    MODES: ClassVar[str] = ""  # recompute modes that only layers with it have
    LAUNCHES: ClassVar[int] = 1  # constant time per chunk, in units of a dense layer's
    COLUMNS: ClassVar[tuple[type[Column], ...]] = ()  # additional columns that profiles may name
    CP: ClassVar[bool] = True  # whether it supports context parallelism
    BEFORE_LAYER: ClassVar[bool] = False  # whether it precedes the layer and its recompute modes

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Return whether a layer of ``shape`` has this sublayer."""
        raise NotImplementedError

    @classmethod
    def of(cls, model: Decoder, shape: Any) -> Sublayer:
        """Return the quantities of this sublayer in a layer with ``shape`` of ``model``."""
        raise NotImplementedError
