"""A layer kind of Megatron's models: what its flags say, and how its modules compute chunks.

``LayerKind`` reads flags and configurations, before Megatron is imported: it imports Megatron
inside of methods at most. ``KindModule`` acts on Megatron's modules. A kind overrides what it has:
by default a hook has nothing to say. What a kind costs is a class of
:mod:`megatron_epp.cost.kinds`; what a certificate needs of it, :mod:`.certificate_base`.
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
    """A layer kind, by Megatron's parsed ``args``.

    PRICED    its class in cost/kinds; None: it changes what another kind costs
    NAME      of layers that it is all of
    SYMBOL    symbol of such layers in a HybridModel's pattern; none: there are none
    SYMBOLS   symbols of all layers there that have it, if of others, too
    VARIANTS  values of --experimental-attention-variant that ask for it; none: there are none
    SLICED    whether slices of external training loops compute it
    ABSENT    fields of LayerShape of a layer without it
    NUMBERED  whether an MTP layer has it as the decoder's layer of its number, not as the last
    SLOT      attribute of Megatron's layer that holds its module; none: it has none of its own
    TIMED     attributes of Megatron's layer that hold modules of it which selective recompute runs
              again, by the name that recompute has of them
    STACK     field of Megatron's HybridStackSubmodules that describes such layers
    FLAGS     fields of args that ask for it, with what they are where it is not asked for
    LIMITS    what it does not run
    REPLACED  flags whose job is done otherwise
    """

    PRICED: type[Part] | None = None
    NAME: str = ""
    SYMBOL: str = ""
    SYMBOLS: str = ""
    VARIANTS: tuple[str, ...] = ()
    SLICED: bool = True
    ABSENT: ClassVar[dict[str, Any]] = {}
    NUMBERED: bool = False
    SLOT: str = ""
    TIMED: ClassVar[dict[str, str]] = {}
    STACK: str = ""
    FLAGS: ClassVar[dict[str, Any]] = {}
    LIMITS: tuple[Limit, ...] = ()
    REPLACED: tuple[ReplacedFlags, ...] = ()

    # -------------------------------------------------------------- the model

    def layers(self, args: Any) -> tuple[bool, ...]:
        """Return the mask of the layers that have it: those of its letters; all of a GPTModel."""
        return layers_with(args, self.SYMBOLS or self.SYMBOL)

    def sizes(self, args: Any) -> dict[str, Any]:
        """Return the fields of LayerShape of a layer that has it."""
        return {}

    def model_sizes(self, args: Any) -> dict[str, Any]:
        """Return the fields of the cost model's Model that it knows of."""
        return {}

    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        """Return values by destination with which the layers of ``mask`` have it, and no others."""
        return {}

    def words(self, args: Any) -> list[str]:
        """Return words that tell a profile of such a model from others'."""
        return []

    def active(self, config: Any) -> int:
        """Return how many such modules of a layer a token goes through."""
        return 1

    def heads(self, config: Any, context: int) -> Heads | None:
        """Return the heads that a rank attends with, one of ``context``; None: it does not say."""
        return None

    def layers_see(self, config: Any) -> Sequence[tuple[int | None, bool]]:
        """Return the views of queries in layers of a model of ``config``, one of each kind: how
        many tokens before each (None: all), and whether sinks. None of them: it has no say."""
        return ()

    # -------------------------------------------------------------- flags

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """Return Megatron's flags that --epp implies where a model of ``wanted`` has it."""
        return {}

    def require(self, args: Any, tp: int) -> None:
        """Raise a ValueError where flags as they are given make no sense over ``tp`` ranks."""

    def refuse(self, args: Any) -> None:
        """Raise a ValueError where --epp cannot run what LIMITS do not name."""

    def unfit_pattern(self, args: Any, symbols: str) -> str | None:
        """Return why layers of these ``symbols`` are no model of ``args``; None: they may be."""
        return None

    def needs_full_documents(self, args: Any) -> bool:
        """Return whether training must not cut documents: it compares all tokens of one."""
        return False

    def unshared(self, holder: Any) -> str:
        """Return the name of what cannot be computed once for documents that begin alike, as it
        follows from a whole document; "": nothing. ``holder``: flags, or a model's configuration.
        """
        return ""

    def replays(self, config: Any) -> bool:
        """Return whether what it records in forwards is replayed by others in their order."""
        return False

    # -------------------------------------------------------------- ranks

    def expert_ranks(self, args: Any) -> int:
        """Return the ranks that hold one layer together beside the tensor-parallel ones; 1: there
        are none. Where they are more than a replica's, replicas run in lockstep."""
        return 1

    def layer_groups(self, holder: Any) -> list[ProcessGroup]:
        """Return this rank's groups that its layers communicate in, beside the tensor- and
        context-parallel ones; ``holder``: flags or configuration of the model."""
        return []

    def trainer_groups(self, args: Any) -> list[ProcessGroup]:
        """Return this rank's groups that an iteration of Megatron's trainer communicates in for its
        sake."""
        return []


class OpenChoice(Protocol):
    """A flag of a kind that may be left open (AUTO) until the model is built.

    flag     field of args
    values   what it can be
    """

    flag: str
    values: tuple[str, ...]

    def excluded(self, model: Any, attention: Attention) -> dict[str, str]:
        """Return the values that this rank's ``model`` cannot have, each with the reason."""

    def measured_with(self, coefficients: Iterable[LayerCoefficients]) -> str:
        """Return the value that kinds of layers were measured with."""

    def settle(self, attention: Attention, value: str) -> None:
        """Tell ``attention`` the value."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a kind is installed: Megatron's ``layer``, number ``index`` of its stage.

    context     the most tokens of a document
    attention   that the job computes with
    dropped     what the layer drops, to be recomputed in backward
    in_loop     whether the model also computes for an external training loop what is no chunk
    """

    layer: Any
    index: int
    context: int
    attention: Attention
    dropped: DroppedOutputs
    in_loop: bool = False


class KindModule:
    """A layer kind in Megatron's modules.

    KIND     its flags
    CHOICES  flags of it that may be left open
    """

    KIND: LayerKind
    CHOICES: tuple[OpenChoice, ...] = ()

    def holds(self, module: Any) -> bool:
        """Return whether ``module``, in its slot, is of this kind."""
        return False

    def prepare(self, config: Any) -> None:
        """Prepare, on every stage, what Megatron logs of a model of ``config``."""

    def install(self, place: LayerPlace) -> None:
        """Make it compute chunks."""
        raise NotImplementedError

    def kept_shapes(self, layer: Any, context: int) -> KeptShapes:
        """Return what earlier slices, of ``context`` tokens, leave in the store, on this rank.
        Asked of a layer that computes chunks."""
        return KeptShapes()

    def changed(self, model: Any) -> list[Tensor]:
        """Return the tensors that an iteration changes beside weights and gradients."""
        return []

    # -------------------------------------------------------------- on CPU-only hosts

    def local_layer(self, config: Any) -> Any:
        """Return the spec of such a layer of a HybridModel, of Megatron's local modules."""
        raise NotImplementedError

    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        """Return the spec of a stage's layers of a GPTModel, of Megatron's local modules; None: it
        has its own."""
        return None

    def fix_local(self, layer: Any, config: Any) -> None:
        """Give ``layer``, the submodules that describe one of Megatron's, what local ones lack."""


@dataclass(frozen=True, slots=True)
class KeptShapes:
    """Shapes of what slices leave in the store: two tensors, or none. ``last``: whether last slices
    leave them, too."""

    shapes: tuple[tuple[int, ...], ...] = ()
    last: bool = False


def layers_with(args: Any, symbols: str) -> tuple[bool, ...]:
    """Return the mask of the layers with these ``symbols``; of a GPTModel all."""
    pattern = getattr(args, "hybrid_layer_pattern", None)
    by_symbol = tuple(symbol in symbols for symbol in symbols_of_layers(pattern or ""))
    return by_symbol or (True,) * args.num_layers


def mask_of_layers(flag: str, values: Sequence[int], layers: int) -> tuple[bool, ...]:
    """Return the mask of all layers as ``flag`` gives it. ValueError: it names more or fewer."""
    if len(values) != layers:
        raise ValueError(f"{flag}: {len(values)} layers; expected --num-layers, {layers}")
    return tuple(map(bool, values))
