"""Base classes of a layer kind: its meaning in Megatron's flags, and its modules on chunks.

``LayerKind`` reads flags and configurations before Megatron is imported; only methods may import
it. ``KindModule`` acts on Megatron's modules. A kind overrides the methods that concern it; the
defaults do nothing. The cost of a kind is a class of :mod:`megatron_epp.cost.kinds`, its
certificate one of :mod:`.certificate_base`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_epp.cost.kinds.base import Part
from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.hybrid.pattern import symbols_of_layers
from megatron_epp.mcore.kinds.limit import Limit

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from megatron_epp.cost.profile import LayerCoefficients
    from megatron_epp.layers.attention.layer_attention import Attention, Heads
    from megatron_epp.layers.recompute.outputs import DroppedOutputs


class LayerKind:
    """Properties of a layer kind, such as attention or MoE, as functions of Megatron's args.

    The methods' defaults suit a kind that changes nothing.
    """

    PRICED: type[Part] | None = None  # class in cost/kinds; None: it changes another kind's cost
    NAME: str = ""  # of layers that consist of it
    SYMBOL: str = ""  # of its layers in a HybridModel's pattern; "": there are none
    SYMBOLS: str = ""  # of all layers there that have it, if other layers do, too
    VARIANTS: tuple[str, ...] = ()  # values of --experimental-attention-variant that ask for it
    SLICED: bool = True  # whether slices of external training loops support it
    ABSENT: ClassVar[dict[str, Any]] = {}  # fields of LayerShape for a layer without it
    NUMBERED: bool = False  # an MTP layer has it as the decoder's layer of its number, not the last
    SLOT: str = ""  # attribute of Megatron's layer with its module; "": it has none
    TIMED: ClassVar[dict[str, str]] = {}  # {name in selective recompute: attribute of the layer}
    STACK: str = ""  # field of Megatron's HybridStackSubmodules for its layers
    FLAGS: ClassVar[dict[str, Any]] = {}  # fields of args that ask for it, with neutral values
    LIMITS: tuple[Limit, ...] = ()  # what it does not run
    REPLACED: tuple[ReplacedFlags, ...] = ()  # flags that it replaces

    # -------------------------------------------------------------- the model

    def layers(self, args: Any) -> tuple[bool, ...]:
        """Return the mask of the layers of this kind: one bool per layer of the decoder.

        The default selects the layers with the kind's symbols, and all layers of a GPTModel.
        """
        return layers_with(args, self.SYMBOLS or self.SYMBOL)

    def sizes(self, args: Any) -> dict[str, Any]:
        """Return the fields of LayerShape for a layer of this kind."""
        return {}

    def model_sizes(self, args: Any) -> dict[str, Any]:
        """Return the fields of the cost model's Model that depend on this kind."""
        return {}

    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        """Return values of args, by name, that give this kind to exactly the layers of ``mask``."""
        return {}

    def words(self, args: Any) -> list[str]:
        """Return words for a profile's key that tell models with this kind apart."""
        return []

    def active(self, config: Any) -> int:
        """Return the number of this kind's modules in a layer that process each token."""
        return 1

    def heads(self, config: Any, context: int) -> Heads | None:
        """Return the attention heads of one of ``context`` context-parallel ranks, or None."""
        return None

    def layers_see(self, config: Any) -> Sequence[tuple[int | None, bool]]:
        """Return (window, has sinks) of every attention variant in the model."""
        return ()

    # -------------------------------------------------------------- flags

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """Return the args that --epp sets if the args ``wanted`` select this kind, by name."""
        return {}

    def require(self, args: Any, tp: int) -> None:
        """Raise a ValueError if flags as typed are inconsistent on ``tp`` tensor-parallel ranks."""

    def refuse(self, args: Any) -> None:
        """Raise a ValueError for args that --epp cannot run and that LIMITS do not cover."""

    def unfit_pattern(self, args: Any, symbols: str) -> str | None:
        """Return the reason why layers of ``symbols`` do not fit ``args``; None if they do."""
        return None

    def needs_full_documents(self, args: Any) -> bool:
        """Return whether documents must not be cut, because training compares all their tokens."""
        return False

    def unshared(self, holder: Any) -> str:
        """Return the name of a feature that shared prefixes do not support, or an empty string."""
        return ""

    def replays(self, config: Any) -> bool:
        """Return whether later passes replay recorded forwards, so ops keep the call's order."""
        return False

    # -------------------------------------------------------------- ranks

    def expert_ranks(self, args: Any) -> int:
        """Return the number of ranks that share a layer's experts, over all lockstep replicas."""
        return 1

    def layer_groups(self, holder: Any) -> list[ProcessGroup]:
        """Return this rank's process groups of these layers, other than those of TP and CP."""
        return []

    def trainer_groups(self, args: Any) -> list[ProcessGroup]:
        """Return this rank's process groups that Megatron's trainer uses for this kind."""
        return []


class OpenChoice(Protocol):
    """Flag of a kind that may stay AUTO until the model is built.

    Attributes:
        flag: Field of args.
        values: Its possible values.
    """

    flag: str
    values: tuple[str, ...]

    def excluded(self, model: Any, attention: Attention) -> dict[str, str]:
        """Return value -> reason for the values that this rank's ``model`` does not support."""

    def measured_with(self, coefficients: Iterable[LayerCoefficients]) -> str:
        """Return the value that was set when ``coefficients`` were measured."""

    def settle(self, attention: Attention, value: str) -> None:
        """Set the value on ``attention``."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Layer in which the modules of a kind are patched, with what the patches need.

    Attributes:
        layer: Megatron's layer.
        index: Index of the layer in its stage.
        context: Most tokens of a document.
        attention: The attention of the job.
        dropped: Outputs that the layer drops, to be recomputed in the backward.
        in_loop: Whether the model also runs inputs of an external training loop that are not
            chunks.
    """

    layer: Any
    index: int
    context: int
    attention: Attention
    dropped: DroppedOutputs
    in_loop: bool = False


class KindModule:
    """Patches of Megatron's modules for one layer kind.

    Attributes:
        KIND: Properties of the layer kind.
        CHOICES: Flags of the kind that may stay AUTO until the model is built.
    """

    KIND: LayerKind
    CHOICES: tuple[OpenChoice, ...] = ()

    def holds(self, module: Any) -> bool:
        """Return whether ``module``, in the kind's slot, is of this kind."""
        return False

    def prepare(self, config: Any) -> None:
        """Create Megatron's log entries of this kind, equally on every stage."""

    def install(self, place: LayerPlace) -> None:
        """Patch the kind's module in ``place.layer`` to compute chunks."""
        raise NotImplementedError

    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        """Return the shapes of what ``context`` tokens of a document cache on this rank.

        ``layer`` must be patched already.
        """
        return KeptShapes()

    def changed(self, model: Any) -> list[Tensor]:
        """Return the tensors that an iteration changes, other than weights and gradients."""
        return []

    # -------------------------------------------------------------- on CPU-only hosts

    def local_layer(self, config: Any) -> Any:
        """Return the spec of a HybridModel's layer of this kind with Megatron's local modules."""
        raise NotImplementedError

    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        """Return the spec of a stage's layers of a GPTModel with Megatron's local modules.

        None selects Megatron's own spec.
        """
        return None

    def fix_local(self, layer: Any, config: Any) -> None:
        """Complete ``layer``, the submodules of one of Megatron's local layers, in place."""


@dataclass(frozen=True, slots=True)
class KeptShapes:
    """Shapes of the tensors that a slice caches in the store.

    Attributes:
        shapes: Shapes of two tensors, or an empty tuple.
        last: Whether a document's last slice is cached, too.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    last: bool = False


def layers_with(args: Any, symbols: str) -> tuple[bool, ...]:
    """Return the mask of the layers with one of ``symbols``; all layers of a GPTModel."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    by_symbol = tuple(symbol in symbols for symbol in symbols_of_layers(pattern or ""))
    return by_symbol or (True,) * args.num_layers


def mask_of_layers(flag: str, values: Sequence[int], layers: int) -> tuple[bool, ...]:
    """Return the 0s and 1s ``values`` of ``flag`` as a mask, one bool per layer.

    Raises:
        ValueError: The number of values is not ``layers``.
    """
    if len(values) != layers:
        raise ValueError(f"{flag}: {len(values)} layers; expected --num-layers, {layers}")
    return tuple(map(bool, values))
