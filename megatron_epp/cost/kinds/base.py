"""A part of a layer: a mixer, which moves something between tokens, or a feed-forward part.

Each part is a class of its own that says all that the cost model asks of it. What it says by
default is nothing: a class answers what it has. Sizes are channels of a token unless they say
otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from megatron_epp.cost.columns import Column
from megatron_epp.ir import Kind
from megatron_epp.ir.errors import quoted

ELEMENT_BYTES = 2  # bf16
STATE_BYTES = 4  # float32, as the scans of states keep them
GRADIENT_BYTES = 4  # of kept K and V: the executor adds their gradients up in float32
# A training forward against its backward: linears 1:2, attention 1:2.5 (FlashAttention's two
# passes of two products against five); W is half of the linears' backward, attention has no W.
ATTENTION_BACKWARD = 2.5
# Of a dense layer of Llama 3: two norms, rotary embeddings, a gated activation and two additions
# read and write 94,000 channels of a token where 70,000 are saved; in backward half as many more.
MOVED, MOVED_BACKWARD = 1.4, 1.5
MOST = 10**9  # of any size: beyond it, products of sizes leave what numbers can say


def require_sizes(value: Any, least: Mapping[str, int]) -> None:
    """A ValueError where a field of ``value`` that ``least`` names is no size."""
    for name, low in least.items():
        size = getattr(value, name)
        if not isinstance(size, int) or isinstance(size, bool) or size < low:
            raise ValueError(f"{name} {quoted(size)}: expected a whole number of at least {low}")
        if size > MOST:
            raise ValueError(f"{name} {quoted(size)}: expected at most {MOST}")


def require_flags(value: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(value, name), bool):
            raise ValueError(f"{name} {quoted(getattr(value, name))}: expected true or false")


class Decoder(Protocol):
    """The sizes that parts ask of their model."""

    @property
    def hidden(self) -> int: ...
    @property
    def ffn_hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def gated(self) -> bool: ...


@dataclass(frozen=True)
class Sizes:
    """The fields of a layer's shape that one part reads; their checks."""

    def require(self) -> None:
        """A ValueError where these sizes make no sense."""


@dataclass(frozen=True)
class CarryOver:
    """State that a slice leaves for later slices of its document.

    channels     of every token, such as K and V; a window cuts them to a tail
    expanded     channels that later slices make of them again; 0: they are used as they are
    heads        over which a stage's devices share it; 0: each keeps all of it, as of latents
    tail         elements of the rows in front of a border, as a convolution wants them
    state        elements of a state at a border
    """

    channels: int = 0
    expanded: int = 0
    heads: int = 0
    tail: int = 0
    state: int = 0

    def on_device(self, devices: int) -> "CarryOver":
        """The part of one of ``devices`` that share the heads."""
        if not self.heads:
            return self
        heads = max(1, self.heads // devices)
        sizes = self.channels, self.expanded, self.tail, self.state
        channels, expanded, tail, state = (size // self.heads * heads for size in sizes)
        return CarryOver(channels, expanded, heads, tail, state)

    def __add__(self, other: "CarryOver") -> "CarryOver":
        return CarryOver(
            self.channels + other.channels,
            self.expanded + other.expanded,
            self.heads or other.heads,
            self.tail + other.tail,
            self.state + other.state,
        )


@dataclass(frozen=True)
class RecomputedModule:
    """One of Megatron's modules, recomputed: what it drops, and takes again.

    channels     that are not saved
    parameters   whose products run again
    pairs        whether attention does
    light        whether it moves memory only
    """

    channels: int = 0
    parameters: int = 0
    pairs: bool = False
    light: bool = False


@dataclass(frozen=True)
class Work:
    """Forward flops for one unit of a column.

    backward    times as much in backward, where the weights' gradients wait for no W
    attention   whether attention's kernels do it, at their rate
    """

    flops: float
    backward: float
    attention: bool = False


@dataclass(frozen=True)
class ContextWorkspace:
    """Bytes beside a chunk's while an op runs: for each token of context, and once."""

    per_context_token: float = 0.0
    per_op: float = 0.0


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a part that tokens are routed to.

    parameters        of all
    active            of those that a token meets
    copies            of a token: how many it meets
    exchanged         channels of all copies to experts' devices, one way
    permuted          channels moved where tokens are sorted by a kernel of its own
    narrow_flops      forward flops that products with narrow weights take longer by
    """

    parameters: int = 0
    active: int = 0
    copies: int = 0
    exchanged: int = 0
    permuted: float = 0.0
    narrow_flops: float = 0.0


class Part:
    """A part of layers of ``shape`` in ``model``.

    MIXER     whether it moves something between tokens; else it works token by token
    DEFAULT   whether layers have it that nobody described: names of kinds leave it out
    WORD      its word in a kind's name; ``ALONE``: where it is all that the layer has
    MODES     recompute letters that only layers with it have
    LAUNCHES  how many times a dense layer's constant a chunk takes
    COLUMNS   its further columns, by which profile files that name them are read
    CP        whether it runs under context parallelism
    BEFORE_LAYER  whether it comes in front of a layer, which it does not make: recompute letters of
              the layer leave it alone
    """

    MIXER: ClassVar[bool]
    WORD: ClassVar[str]
    ALONE: ClassVar[str]
    DEFAULT: ClassVar[bool] = False
    MODES: ClassVar[str] = ""
    LAUNCHES: ClassVar[int] = 1
    COLUMNS: ClassVar[tuple[type[Column], ...]] = ()
    CP: ClassVar[bool] = True
    BEFORE_LAYER: ClassVar[bool] = False

    def __init__(self, model: Decoder, shape: Any):
        self.model, self.shape = model, shape

    @classmethod
    def there(cls, shape: Any) -> bool:
        """Whether a layer of ``shape`` has it."""
        raise NotImplementedError

    @property
    def parameters(self) -> int:
        """Its norm's included, but for experts', which are sharded differently."""
        return 0

    @property
    def routed(self) -> RoutedExperts:
        return RoutedExperts()

    @property
    def scan_flops(self) -> float:
        """Forward flops for a token beside those of products with its weights."""
        return 0.0

    @property
    def flops_per_pair(self) -> float:
        """Forward flops for one query and one key."""
        return 0.0

    @property
    def work(self) -> Mapping[Column, Work]:
        """Work of further columns, beside tokens and pairs."""
        return {}

    @property
    def workspaces(self) -> Mapping[Kind, ContextWorkspace]:
        """Workspaces while F and B run, where it needs any."""
        return {}

    @property
    def carried(self) -> CarryOver:
        return CarryOver()

    @property
    def saved(self) -> int:
        """From F to B: inputs and outputs of its norm, inputs of its products, and insides."""
        return 0

    @property
    def moved(self) -> float:
        """Channels that kernels beside products and attention read or write in a forward."""
        return MOVED * self.saved

    def stored(self, modules: tuple[str, ...]) -> int:
        """Channels among :attr:`saved` that lie in a cut document's own buffer where these
        ``modules`` are recomputed."""
        return 0

    @property
    def weight_inputs(self) -> int:
        """From I to W: inputs of its products, and the gradients of their outputs."""
        return 0

    @property
    def recomputed(self) -> Mapping[str, RecomputedModule]:
        """Modules that may run again in backward, by Megatron's names."""
        return {}

    @property
    def exchanged(self) -> int:
        """Rows for heads inside a CP group, all of a forward."""
        return 0

    @property
    def heads(self) -> int:
        """How often more the output layer runs for a layer with it."""
        return 0

    @property
    def gathers(self) -> bool:
        """Whether the hidden state is gathered around it inside a TP group."""
        return False
