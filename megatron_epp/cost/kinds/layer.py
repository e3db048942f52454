"""Layer: the shape that defines its kind, and the sums of its sublayers.

:data:`PARTS` is the registry of sublayers. A new layer kind needs a class in this registry, and a
class of its sizes from which :class:`LayerShape` inherits. Outside this package, only the catalogue
of models names sublayers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add
from typing import Any

from megatron_epp.cost.catalogue.named import from_json
from megatron_epp.cost.kinds.attention import AttentionPart
from megatron_epp.cost.kinds.base import Decoder, Part, Sublayer, require_flags, require_sizes
from megatron_epp.cost.kinds.dsa import DSAPart, DSASizes
from megatron_epp.cost.kinds.mla import MLAPart, MLASizes
from megatron_epp.cost.kinds.mlp import MLPPart
from megatron_epp.cost.kinds.moe import MoEPart, MoESizes
from megatron_epp.cost.kinds.mtp import MTPPart, MTPSizes
from megatron_epp.cost.kinds.ssm import GatedDeltaNetPart, MambaPart, SSMSizes
from megatron_epp.cost.kinds.window import WindowSizes
from megatron_epp.ir import SELECTIVE

PARTS: tuple[type[Part], ...] = (
    MTPPart,
    AttentionPart,
    MLAPart,
    DSAPart,
    MambaPart,
    GatedDeltaNetPart,
    MLPPart,
    MoEPart,
)


@dataclass(frozen=True)
class LayerShape(
    MTPSizes,
    SSMSizes,
    DSASizes,
    MLASizes,
    WindowSizes,
    MoESizes,
):
    """Sizes that define a layer kind; the fields are those of the base classes.

    The defaults describe a layer with attention over the whole context and a dense MLP.

    Raises:
        ValueError: a size is invalid, sizes are inconsistent, or the layer has no sublayer.
    """

    def __post_init__(self):
        flags = tuple(field.name for field in fields(self) if field.type is bool)
        require_flags(self, flags)
        require_sizes(self, {f.name: 0 for f in fields(self) if f.name not in flags})
        self.require()
        if not any(part.there(self) for part in PARTS if not part.BEFORE_LAYER):
            raise ValueError("attention false, mlp false: expected a layer that has one of them")

    @classmethod
    def of(cls, kind: str, value: Any) -> "LayerShape":
        """Return the shape that ``value``, an object of a model file, describes for ``kind``."""
        return value if isinstance(value, cls) else from_json(f"kinds: {kind}", value, cls)

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the kind's name: attention range, mixer and feed-forward sublayer.

        A layer without mixer or without feed-forward sublayer has one word.
        """
        there = [part for part in PARTS if part.there(self)]
        *names, last = self._words([part for part in there if not part.BEFORE_LAYER])
        return *names, "-".join((last, *(part.WORD for part in there if part.BEFORE_LAYER)))

    def _words(self, there: Sequence[type[Part]]) -> tuple[str, ...]:
        reach = "window" if self.window else "full"
        mixers = [part for part in there if part.MIXER]
        if len(mixers) == len(there):
            names = [reach] * (reach != "full") + [p.WORD for p in mixers if not p.DEFAULT]
            return ("-".join(names) or mixers[0].ALONE,)
        if not mixers:
            return ("-".join(part.ALONE for part in there),)
        others = [part.WORD for part in there if not part.MIXER]
        return reach, "-".join(part.WORD for part in mixers), "-".join(others)


DEFAULT_WORDS = ("full", *(part.WORD for part in PARTS if part.DEFAULT))


def kind_names(shapes: Sequence[LayerShape]) -> dict[LayerShape, str]:
    """Return a name for each kind among the ``shapes`` of a model's layers.

    The name consists of the words that distinguish the kind from the model's other kinds. If all
    layers are equal, the words distinguish them from the default layer; if they are default layers,
    the result is empty.
    """
    words = {shape: shape.words for shape in shapes}
    if len(words) == 1:
        ((shape, name_parts),) = words.items()
        name_parts = tuple(word for word in name_parts if word not in DEFAULT_WORDS)
        if not name_parts and shape != LayerShape():
            name_parts = shape.words[-1:]
        return {shape: "-".join(name_parts)} if name_parts else {}
    differ = [len(set(column)) > 1 for column in zip(*words.values(), strict=True)]
    return {
        shape: "-".join(word for word, differs in zip(name_parts, differ, strict=True) if differs)
        for shape, name_parts in words.items()
    }


@dataclass(frozen=True, kw_only=True)
class Layer(Sublayer):
    """Quantities of one layer of some kind: those of all its sublayers.

    Attributes:
        model: the model.
        shape: sizes of the layer.
        parts: the layer's sublayers, in the order of :data:`PARTS`.
    """

    model: Decoder
    shape: LayerShape
    parts: Mapping[type[Part], Sublayer]

    @classmethod
    def of(cls, model: Decoder, shape: LayerShape) -> "Layer":
        """Return the layer with ``shape`` of ``model``."""
        parts = {part: part.of(model, shape) for part in PARTS if part.there(shape)}
        return cls(**vars(reduce(add, parts.values())), model=model, shape=shape, parts=parts)

    @property
    def window(self) -> int:
        """Maximum number of keys of a query, its own included; 0: the whole context."""
        return self.shape.window

    @property
    def experts(self) -> int:
        """Number of experts."""
        return self.shape.experts

    @property
    def modes(self) -> str:
        """Recompute modes that this layer's sublayers add to those of all layers."""
        return "".join(part.MODES for part in self.parts)

    @property
    def launches(self) -> int:
        """Constant time per chunk, relative to the constant time of a dense layer."""
        return max(part.LAUNCHES for part in self.parts)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.routed.parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that process a token."""
        return self.parameters + self.routed.active

    @property
    def flops_per_token(self) -> float:
        """Forward flops per token of linear layers and scans."""
        return 2.0 * self.active_parameters + self.scan_flops

    @property
    def masks_diagonal(self) -> bool:
        """Whether query-key pairs within a slice may take longer than pairs with earlier keys."""
        return self.flops_per_pair > 0 and not self.window

    @property
    def cp(self) -> bool:
        """Whether the layer supports context parallelism."""
        return all(part.CP for part in self.parts)

    @property
    def moved(self) -> float:
        """Channels that kernels other than products and attention read or write in a forward."""
        return sum(each.moved for each in self.parts.values())

    @property
    def before_layer(self) -> tuple[Sublayer, ...]:
        """Sublayers to which the layer's recompute modes do not apply."""
        return tuple(each for part, each in self.parts.items() if part.BEFORE_LAYER)

    def stored_in(self, mode: str) -> int:
        """Return the channels saved in recompute ``mode`` that a cut document's K/V buffer holds.

        They are 0 with a sliding window, because the buffer then holds copies.
        """
        replaced = self.stored_unless in SELECTIVE.get(mode, ())
        return 0 if self.shape.window or replaced else self.stored
