"""A part of Megatron's layers: which flags ask for it, how it is made to compute chunks.

It is the doing half of a class of :mod:`megatron_epp.cost.kinds`, which says what the part takes.
By default a part has nothing to say: a class answers what it has. Megatron is imported inside of
methods: flags are read, and refused, before it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_epp.cost.kinds.base import Part
from megatron_epp.mcore.flags.replaced import ReplacedFlags
from megatron_epp.mcore.model.hybrid.pattern import letters_of_layers
from megatron_epp.mcore.model.limit import Limit

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from megatron_epp.cost.profile import LayerFigures
    from megatron_epp.layers.attention.layer_attention import Attention, Heads
    from megatron_epp.layers.recompute.outputs import DroppedOutputs


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a part is put in: Megatron's ``layer``, number ``index`` of its stage.

    context     the most inputs of a document
    attention   that the job computes with
    dropped     what the layer drops, to be made again in backward
    """

    layer: Any
    index: int
    context: int
    attention: Attention
    dropped: DroppedOutputs


class MegatronPart:
    """A part of layers, by Megatron's parsed ``args`` and in its modules.

    PRICED    its class in cost/kinds; None: it changes what another part takes
    NAME      of layers that it is all of
    LETTER    of such layers in a HybridModel's pattern; none: there are none
    LETTERS   of all layers there that have it, if of others, too
    ABSENT    fields of LayerShape of a layer without it
    SLOT      attribute of Megatron's layer that holds its module; none: it has none of its own
    TIMED     attributes of Megatron's layer that hold modules of it which selective recompute runs
              again, by the name that recompute has of them
    STACK     field of Megatron's HybridStackSubmodules that describes such layers
    FLAGS     fields of args that ask for it, with what they are where it is not asked for
    CHOICE    field of args that may be left open until the model is built (AUTO); none: there is
              none; ``VALUES``: what it can be
    LIMITS    what it does not run
    REPLACED  flags whose job is done otherwise
    """

    PRICED: type[Part] | None = None
    NAME: str = ""
    LETTER: str = ""
    LETTERS: str = ""
    ABSENT: ClassVar[dict[str, Any]] = {}
    SLOT: str = ""
    TIMED: ClassVar[dict[str, str]] = {}
    STACK: str = ""
    FLAGS: ClassVar[dict[str, Any]] = {}
    CHOICE: str = ""
    VALUES: tuple[str, ...] = ()
    LIMITS: tuple[Limit, ...] = ()
    REPLACED: tuple[ReplacedFlags, ...] = ()

    # -------------------------------------------------------------- flags

    def layers(self, args: Any) -> tuple[bool, ...]:
        """Mask of the layers that have it: those of its letters; all of a model of whole layers."""
        pattern = getattr(args, "hybrid_layer_pattern", None)
        letters = self.LETTERS or self.LETTER
        by_letter = tuple(letter in letters for letter in letters_of_layers(pattern or ""))
        return by_letter or (True,) * args.num_layers

    def in_depth(self, mask: Sequence[bool], depth: int) -> bool:
        """Whether the layer of a depth, built as the decoder's last, has it; ``mask`` of the
        decoder's."""
        return mask[-1]

    def sizes(self, args: Any) -> dict[str, Any]:
        """Fields of LayerShape of a layer that has it."""
        return {}

    def model_sizes(self, args: Any) -> dict[str, Any]:
        """Fields of the cost model's Model that it knows of."""
        return {}

    def cost_sizes(self, args: Any) -> dict[str, Any]:
        """Fields of Cost that it knows of."""
        return {}

    def defaults(self, wanted: Any) -> dict[str, Any]:
        """Megatron's flags that --epp implies where a model of ``wanted`` has it."""
        return {}

    def in_layers(self, args: Any, mask: Sequence[bool]) -> dict[str, Any]:
        """Values by destination with which the layers of ``mask`` have it, and no others."""
        return {}

    def words(self, args: Any) -> list[str]:
        """Words that tell a profile of such a model from others'."""
        return []

    def require(self, args: Any, tp: int) -> None:
        """Raise a ValueError where flags as they are given make no sense over ``tp`` ranks."""

    def refuse(self, args: Any) -> None:
        """Raise a ValueError where --epp cannot run what LIMITS do not name."""

    def wants_whole(self, args: Any) -> bool:
        """Whether training must not cut documents: it compares all tokens of one."""
        return False

    def unfit_pattern(self, args: Any, letters: str) -> str | None:
        """Why layers of these ``letters`` are no model of ``args``; None: they may be."""
        return None

    def read_pattern(self, args: Any, letters: str) -> None:
        """Set in ``args`` what Megatron takes from the pattern."""

    def active(self, config: Any) -> int:
        """How many such modules of a layer a token goes through."""
        return 1

    def replays(self, config: Any) -> bool:
        """Whether what it records in forwards is replayed by others in their order."""
        return False

    # -------------------------------------------------------------- what is left open

    def excluded(self, model: Any, attention: Attention) -> dict[str, str]:
        """Values of CHOICE that this rank's ``model`` cannot have, each with the reason."""
        return {}

    def measured_with(self, figures: Iterable[LayerFigures]) -> str:
        """The value of CHOICE that kinds of layers were measured with."""
        raise NotImplementedError

    def settle(self, attention: Attention, value: str) -> None:
        """Tell ``attention`` the value of CHOICE."""

    # -------------------------------------------------------------- ranks

    def lockstep(self, args: Any) -> int:
        """Replicas whose ranks hold one layer together, neighbours that run in lockstep; 1: each
        replica has all of it."""
        return 1

    def layer_groups(self, holder: Any) -> list[ProcessGroup]:
        """This rank's groups that its layers speak in, beside the tensor- and context-parallel
        ones; ``holder``: flags or configuration of the model."""
        return []

    def trainer_groups(self, args: Any) -> list[ProcessGroup]:
        """This rank's groups that an iteration of Megatron's trainer speaks in for its sake."""
        return []

    def meets_others(self, config: Any, replica: Sequence[int]) -> bool:
        """Whether its layers speak with ranks beside those of this ``replica``."""
        return False

    # -------------------------------------------------------------- certificates

    def small(
        self, args: Any, hidden: int, tp: int, head_size: int, step: int = 1
    ) -> dict[str, Any]:
        """Values by destination that make it small, for a certificate. ``step``: a rank's part
        of a matrix has a multiple of it of rows and columns. ValueError: one line."""
        return {}

    def without_ties(self, small: Mapping[str, Any]) -> dict[str, Any]:
        """Changes to values by destination of the ``small`` model with which no rounding decides
        what it computes."""
        return {}

    def small_words(self, args: Any) -> list[str]:
        """Words on it for who reads a certificate."""
        return []

    def splits(self, args: Any) -> bool:
        """Whether plans may split the backward of its layers."""
        return True

    def mend_plain(self, layer: Any, by_engine: bool) -> None:
        """Mend Megatron's ``layer`` where it computes wrongly, and, ``by_engine``, has other keys
        than Transformer Engine's."""

    def make_double(self, args: Any) -> None:
        """Have what Megatron casts to float32 by name compute in float64."""

    def weighs_besides(self, holder: Any) -> bool:
        """Whether its layers add losses of their own, of all that is computed together; ``holder``:
        flags, or a model's configuration."""
        return False

    def unshared(self, holder: Any) -> str:
        """Name of what cannot be computed once for documents that begin alike, as it follows from
        a document whole; "": nothing. ``holder``: flags, or a model's configuration."""
        return ""

    def weigh_losses(self, scale: Tensor) -> None:
        """Have the losses that its layers add count ``scale`` times."""

    def finish_plain(self, model: Any, config: Any) -> None:
        """Do for the plain ``model`` what finalize_model_grads does behind an iteration."""

    # -------------------------------------------------------------- Megatron's modules

    def local_layer(self, config: Any) -> Any:
        """Description of such a layer of a HybridModel, of Megatron's local modules."""
        raise NotImplementedError

    def local_block(self, config: Any, vp_stage: int | None) -> Any:
        """Description of a stage's layers of a GPTModel, of Megatron's local modules; None: it has
        its own."""
        return None

    def mend_local(self, layer: Any, config: Any) -> None:
        """Give ``layer``, the submodules that describe one of Megatron's, what local ones lack."""

    def heads(self, config: Any, context: int) -> Heads | None:
        """Heads that a rank attends with, one of ``context``; None: it does not say."""
        return None

    def layers_see(self, config: Any) -> Sequence[tuple[int | None, bool]]:
        """Views of queries in layers of a model of ``config``, one of each kind: so many inputs in
        front of each (None: all), and whether sinks. None of them: it has no say."""
        return ()

    def holds(self, module: Any) -> bool:
        """Whether ``module``, in its slot, is of this kind."""
        return False

    def prepare(self, config: Any) -> None:
        """Prepare, on every stage, what Megatron logs of a model of ``config``."""

    def install(self, place: LayerPlace) -> None:
        """Make it compute chunks."""
        raise NotImplementedError

    def keep_outside(self, model: Any) -> None:
        """Let a loop's ``model``, which computes chunks, do as Megatron's does with all else."""

    def kept_shapes(self, layer: Any, context: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of what earlier slices, of ``context`` inputs, leave in the store, on this rank:
        two tensors, or none. Asked of a layer that computes chunks."""
        return ()

    def stores_last_slice(self, layer: Any) -> bool:
        """Whether last slices leave that, too."""
        return False

    def changed(self, model: Any) -> list[Tensor]:
        """Tensors that an iteration changes beside weights and gradients."""
        return []


def mask_of_layers(flag: str, values: Sequence[int], layers: int) -> tuple[bool, ...]:
    """Mask of all layers as ``flag`` gives it. ValueError: it speaks of more or of fewer."""
    if len(values) != layers:
        raise ValueError(f"{flag}: {len(values)} layers; expected --num-layers, {layers}")
    return tuple(map(bool, values))
