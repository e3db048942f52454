"""A layer: the shape that sets its kind apart, and the sums over its parts.

The registry of parts is :data:`PARTS`; a new kind of layer is a class there, and its sizes a base
of :class:`LayerShape`. Nothing else of the cost model knows which parts there are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from megatron_epp.cost.catalogue.named import from_json
from megatron_epp.cost.columns import Column
from megatron_epp.cost.kinds.attention import AttentionPart
from megatron_epp.cost.kinds.base import (
    CarryOver,
    ContextWorkspace,
    Decoder,
    Part,
    RecomputedModule,
    RoutedExperts,
    Work,
    require_flags,
    require_sizes,
)
from megatron_epp.cost.kinds.dsa import DSAPart, DSASizes
from megatron_epp.cost.kinds.mla import MLAPart, MLASizes
from megatron_epp.cost.kinds.mlp import MLPPart
from megatron_epp.cost.kinds.moe import MoEPart, MoESizes
from megatron_epp.cost.kinds.mtp import MTPPart, MTPSizes
from megatron_epp.cost.kinds.ssm import GatedDeltaNetPart, MambaPart, SSMSizes
from megatron_epp.cost.kinds.window import WindowSizes
from megatron_epp.ir import SELECTIVE, Kind

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
    """Sizes that set a kind of layer apart from the model's plain one, which has attention over all
    that stands before a token and a dense MLP; fields: those of its bases."""

    def __post_init__(self):
        flags = tuple(field.name for field in fields(self) if field.type is bool)
        require_flags(self, flags)
        require_sizes(self, {f.name: 0 for f in fields(self) if f.name not in flags})
        self.require()
        if not any(part.there(self) for part in PARTS if not part.BEFORE_LAYER):
            raise ValueError("attention false, mlp false: expected a layer that has one of them")

    @classmethod
    def of(cls, kind: str, value: Any) -> "LayerShape":
        """The shape that a JSON object describes, as a model file has it for ``kind``."""
        return value if isinstance(value, cls) else from_json(f"kinds: {kind}", value, cls)

    @property
    def words(self) -> tuple[str, ...]:
        """Words for its name: how far it sees, its mixer, its feed-forward part; one alone of a
        layer of one part."""
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

    It is what sets the kind apart from the others of the model; where all layers are alike, from
    plain ones: none where they are plain.
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


@dataclass(frozen=True)  # no slots: its parts are made once, when first asked for
class Layer:
    """Sizes of one layer of some kind: channels of a token, parameters, forward flops."""

    model: Decoder
    shape: LayerShape

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part(self.model, self.shape) for part in PARTS if part.there(self.shape))

    def _sum(self, of: Callable[[Part], int]) -> int:
        return sum(of(part) for part in self.parts)

    @property
    def window(self) -> int:
        """Keys that a query sees at most, itself among them; 0: all in front of it."""
        return self.shape.window

    @property
    def experts(self) -> int:
        return self.shape.experts

    @property
    def modes(self) -> str:
        """Recompute letters that layers with its parts alone have."""
        return "".join(part.MODES for part in self.parts)

    @property
    def launches(self) -> int:
        return max(part.LAUNCHES for part in self.parts)

    @cached_property
    def carried(self) -> CarryOver:
        return sum((part.carried for part in self.parts), CarryOver())

    @property
    def parameters(self) -> int:
        """But for the experts', which are sharded differently."""
        return self._sum(lambda part: part.parameters)

    @property
    def expert_parameters(self) -> int:
        """All experts' but the shared one's."""
        return self.routed.parameters

    @cached_property
    def routed(self) -> RoutedExperts:
        """Of the one part that has experts."""
        return next((part.routed for part in self.parts if part.routed.copies), RoutedExperts())

    @property
    def active_parameters(self) -> int:
        """Those that a token meets."""
        return self.parameters + self.routed.active

    @property
    def flops_per_token(self) -> float:
        """Forward flops of the linears, and of scans."""
        return 2.0 * self.active_parameters + sum(part.scan_flops for part in self.parts)

    @property
    def flops_per_pair(self) -> float:
        """Forward flops of attention for one query and one key."""
        return sum(part.flops_per_pair for part in self.parts)

    @cached_property
    def work(self) -> Mapping[Column, Work]:
        """Work of further columns, each of one part."""
        return {column: work for part in self.parts for column, work in part.work.items()}

    @property
    def masks_diagonal(self) -> bool:
        """Whether a pair inside a slice may take longer than one of the slice and its context."""
        return self.flops_per_pair > 0 and not self.window

    @property
    def workspaces(self) -> Mapping[Kind, ContextWorkspace]:
        """Workspaces while F and B run, of the one part that needs any."""
        return {op: each for part in self.parts for op, each in part.workspaces.items()}

    @property
    def cp(self) -> bool:
        """Whether it runs under context parallelism."""
        return all(part.CP for part in self.parts)

    @property
    def moved(self) -> float:
        """Channels that kernels beside products and attention read or write in a forward."""
        return sum(part.moved for part in self.parts)

    @property
    def saved(self) -> int:
        return self._sum(lambda part: part.saved)

    @property
    def weight_inputs(self) -> int:
        return self._sum(lambda part: part.weight_inputs)

    @property
    def before_layer(self) -> tuple[Part, ...]:
        """Parts that its recompute letters leave alone."""
        return tuple(part for part in self.parts if part.BEFORE_LAYER)

    def stored(self, mode: str) -> int:
        """Channels among those saved with that recompute choice that lie in a cut document's own
        buffer; a window's tail is a copy."""
        if self.shape.window:
            return 0
        return self._sum(lambda part: part.stored(SELECTIVE.get(mode, ())))

    def recomputed(self, module: str) -> tuple[RecomputedModule, ...]:
        """``module`` of every part that has it."""
        modules = (part.recomputed.get(module) for part in self.parts)
        return tuple(each for each in modules if each is not None)

    @property
    def heads(self) -> int:
        return self._sum(lambda part: part.heads)

    @property
    def exchanged(self) -> int:
        return self._sum(lambda part: part.exchanged)

    @property
    def gathers(self) -> int:
        """Parts around which the hidden state is gathered inside a TP group."""
        return self._sum(lambda part: part.gathers)
