"""Base classes of a layer kind: :class:`LayerKind` for flags, :class:`KindModule` for modules.

``LayerKind`` reads flags and configurations before Megatron is imported, so its subclasses import
Megatron only inside methods. ``KindModule`` patches Megatron's modules. By default, the methods
change nothing, or raise NotImplementedError. Two other classes belong to a kind: its cost in
:mod:`megatron_epp.cost.kinds`, and its certificate, a subclass of
:class:`.certificate_base.LayerCertificate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_epp.cost.kinds.base import Part
from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.hybrid.pattern import symbols_of_layers
from megatron_epp.mcore.kinds.limit import Limit

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from megatron_epp.cost.cost import Cost
    from megatron_epp.layers.attention.layer_attention import Attention, Heads
    from megatron_epp.layers.recompute.outputs import DroppedOutputs


# Function (stage module, index of a layer, functions that select a path, tokens) -> seconds
type PathSeconds = Callable[[Any, int, Sequence[Callable[[], None]], int], list[float]]


@dataclass(frozen=True, slots=True)
class ChosenBy:
    """Information from which layer kinds choose between several ways (paths) to compute a layer.

    Attributes:
        args: Megatron's arguments.
        cost: Function that returns the job's analytic cost model.
        seconds: Function that times a layer on each path (PathSeconds); None on CPU-only hosts.
        group: CPU group of all ranks of the job.
    """

    args: Any
    cost: Callable[[], Cost]
    seconds: PathSeconds | None
    group: ProcessGroup


class LayerKind:
    """Properties of a layer kind by Megatron's args; the default kind changes nothing."""

    PRICED: type[Part] | None = None  # class in cost/kinds; None: kind changes another kind's cost
    NAME: str = ""  # name of a layer that consists of this kind
    SYMBOL: str = ""  # layer symbol of this kind in a HybridModel's pattern; "": no symbol
    SYMBOLS: str = ""  # symbols of all layers that contain this kind; "": only SYMBOL
    VARIANTS: tuple[str, ...] = ()  # values of --experimental-attention-variant for this kind
    SLICED: bool = True  # whether slices of external training loops support this kind
    SINCE: tuple[int, int] = (0, 16)  # first release of Megatron with which slices support it
    ABSENT: ClassVar[dict[str, Any]] = {}  # fields of LayerShape for a layer without this kind
    NUMBERED: bool = False  # whether MTP layer n is as decoder layer n, not as the last layer
    SLOT: str = ""  # attribute of Megatron's layer that is this kind's module; "": no module
    TIMED: ClassVar[dict[str, str]] = {}  # {name in selective recompute: attribute of the layer}
    STACK: str = ""  # field of Megatron's HybridStackSubmodules for layers of this kind
    FLAGS: ClassVar[dict[str, Any]] = {}  # fields of args that select this kind -> neutral values
    PRICED_FLAGS: tuple[str, ...] = ()  # fields of args that cost.analytic.profile takes by name
    LIMITS: tuple[Limit, ...] = ()  # features that this kind does not support
    REPLACED: tuple[ReplacedFlags, ...] = ()  # flags that this kind replaces

    # -------------------------------------------------------------- the model

    def layers(self, args: Any) -> tuple[bool, ...]:
        """Return the mask of this kind's decoder layers: by default, those with its symbols."""
        return layers_with(args, self.SYMBOLS or self.SYMBOL)

    def sizes(self, args: Any) -> dict[str, Any]:
        """Return the fields of LayerShape for a layer of this kind."""
        return {}

    def model_sizes(self, args: Any) -> dict[str, Any]:
        """Return the fields of the cost model's Model that depend on this kind."""
        return {}

    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        """Return values of args, by name, that select this kind in the layers of ``mask`` only."""
        return {}

    def words(self, args: Any) -> list[str]:
        """Return words that describe this kind and its sizes in the key of a cost profile."""
        return []

    def active(self, config: Any) -> int:
        """Return the number of a layer's modules that process each token: top-k for MoE, else 1."""
        return 1

    def heads(self, config: Any, context: int) -> Heads | None:
        """Return a rank's heads with ``context`` context-parallel ranks; None if there are none."""
        return None

    def layers_see(self, config: Any) -> Sequence[tuple[int | None, bool]]:
        """Return the distinct pairs (window in tokens or None, has sinks) of attention layers."""
        return ()

    # -------------------------------------------------------------- flags

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """Return the values, by name, that --epp sets if the args ``wanted`` select this kind."""
        return {}

    def require(self, args: Any, tp: int) -> None:
        """Raise a ValueError if flags contradict each other, or do not fit ``tp`` TP ranks."""

    def refuse(self, args: Any) -> None:
        """Raise a ValueError for args that --epp does not support and that LIMITS does not list."""

    def unfit_pattern(self, args: Any, symbols: str) -> str | None:
        """Return the reason why layers with ``symbols`` do not fit ``args``; None if they fit."""
        return None

    def unshared(self, holder: Any, ahead: bool) -> str:
        """Return what in this kind rules out shared prefixes, or ""; see ``require_shared``."""
        return ""

    def left_out_of_loops(self, config: Any) -> str:
        """Return what slices of external loops do not do for this kind, or ""."""
        return ""

    def replays(self, config: Any) -> bool:
        """Return whether later passes replay the recorded routing; ops then keep their order."""
        return False

    # -------------------------------------------------------------- ranks

    def expert_ranks(self, args: Any) -> int:
        """Return the number of ranks over which a layer's experts are sharded; 1 without MoE."""
        return 1

    def layer_groups(self, holder: Any) -> list[ProcessGroup]:
        """Return this rank's process groups that these layers use, except TP and CP groups."""
        return []

    def trainer_groups(self, args: Any) -> list[ProcessGroup]:
        """Return this rank's process groups that Megatron's trainer uses for this kind."""
        return []


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Layer in which the modules of a kind are patched, with the arguments of the patches.

    Attributes:
        layer: Megatron's layer.
        index: Index of the layer in its stage.
        context: Maximum number of tokens of a document.
        attention: The attention implementation of the job.
        dropped: Outputs that the layer drops in the forward and recomputes in the backward.
        in_loop: Whether an external training loop also runs the model on inputs that are not
            chunks.
    """

    layer: Any
    index: int
    context: int
    attention: Attention
    dropped: DroppedOutputs
    in_loop: bool = False


class KindModule:
    """Functions that patch Megatron's modules for one layer kind.

    Attributes:
        KIND: Properties of the layer kind.
    """

    KIND: LayerKind

    def holds(self, module: Any) -> bool:
        """Return whether ``module``, the layer's attribute ``KIND.SLOT``, is of this kind."""
        return False

    def prepare(self, config: Any) -> None:
        """Create the entries in Megatron's log that this kind needs on every stage."""

    def install(self, place: LayerPlace) -> None:
        """Patch the kind's module in ``place.layer`` to compute chunks."""
        raise NotImplementedError

    def install_in_wrapped(self, models: Sequence[Any], group: ProcessGroup | None) -> None:
        """Patch this rank's stage modules, which Megatron has wrapped.

        All ranks of the job must call this method, before Megatron builds the optimizer. ``group``
        contains all ranks of the job; None means a single rank.
        """

    def choose_paths(self, models: Sequence[Any], chosen_by: ChosenBy) -> str:
        """Choose among the paths that can compute layers of this kind; return the line to log.

        All ranks of the job must call this method. ``models`` are this rank's stage modules, which
        Megatron has wrapped. The line is "" if there is no choice.
        """
        return ""

    def compile_sizes(self, module: Any, device: torch.device) -> None:
        """Compile kernels of ``module`` for numbers of rows that the layer's first run lacks."""

    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        """Return the shapes of the tensors that a rank caches for ``context`` tokens.

        ``layer`` must already be patched.
        """
        return KeptShapes()

    def changed(self, model: Any) -> list[Tensor]:
        """Return the tensors that an iteration changes in addition to weights and gradients."""
        return []

    # -------------------------------------------------------------- on CPU-only hosts

    def local_layer(self, config: Any) -> Any:
        """Return the spec of a HybridModel's layer of this kind, with Megatron's local modules."""
        raise NotImplementedError

    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        """Return the spec of a GPTModel's layers on a stage, with Megatron's local modules.

        ``vp_stage`` is the index of the stage on its rank; None without interleaving. If the result
        is None, Megatron's own spec is used.
        """
        return None

    def fix_local(self, layer: Any, config: Any) -> None:
        """Add features that Megatron lacks to ``layer``, a local layer's submodules, in place."""


@dataclass(frozen=True, slots=True)
class KeptShapes:
    """Shapes of the tensors that a slice caches in the store.

    Attributes:
        shapes: Shapes of the two cached tensors, or an empty tuple if nothing is cached.
        last: Whether the tensors of a document's last slice are also cached.
    """

    shapes: tuple[tuple[int, ...], ...] = ()
    last: bool = False


def layers_with(args: Any, symbols: str) -> tuple[bool, ...]:
    """Return the mask of the layers with one of ``symbols``; all True for a GPTModel."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    by_symbol = tuple(symbol in symbols for symbol in symbols_of_layers(pattern or ""))
    return by_symbol or (True,) * args.num_layers


def mask_of_layers(flag: str, values: Sequence[int], layers: int) -> tuple[bool, ...]:
    """Return ``values``, the 0s and 1s of a flag, as a mask: one bool per layer.

    Raises:
        ValueError: The number of values is not ``layers``; the message names ``flag``.
    """
    if len(values) != layers:
        raise ValueError(f"{flag}: {len(values)} layers; expected --num-layers, {layers}")
    return tuple(map(bool, values))


def query_groups(args: Any) -> int:
    """Return the number of key and value heads in Megatron's ``args``.

    Without --group-query-attention, Megatron ignores --num-query-groups, whose default is 1.
    """
    if not getattr(args, "group_query_attention", True):
        return args.num_attention_heads
    return args.num_query_groups or args.num_attention_heads
