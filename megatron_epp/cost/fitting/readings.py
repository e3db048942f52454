"""Measurements of one rank: the samples to which a profile is fitted."""

import dataclasses
from dataclasses import dataclass, replace

from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.split_seconds import SplitSeconds
from megatron_epp.cost.kinds.layer import PARTS, Layer
from megatron_epp.ir import FULL, KEEP, SELECTIVE, Kind

# Tokens of the chunks whose memory is measured after contexts. Backward makes the gradients of all
# keys of the context at once; they show only if they are larger than a weight's gradient.
AFTER_CONTEXT_TOKENS = 1024
OWN_MODES = "".join(part.MODES for part in PARTS)  # modes that only some layer kinds have


def modes_of(layer: Layer) -> str:
    """Return KEEP and the recompute modes that make a difference to ``layer``."""
    return KEEP + FULL + "".join(x for x in SELECTIVE if x not in OWN_MODES) + layer.modes


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory of an op beyond the bytes that its chunk holds, for one layer or the LM head.

    Attributes:
        kind: kind of op.
        mode: recompute mode of the layer.
        end: whether the peak is of the LM head; otherwise of a layer.
        tokens: tokens of the chunk.
        context: tokens before the chunk in its document.
        bytes: additional bytes; below 0 if a backward frees more than it makes.
    """

    kind: Kind
    mode: str
    end: bool
    tokens: int
    context: int
    bytes: int


@dataclass(slots=True)
class Readings:
    """Measurements of one rank.

    Attributes:
        rank: pipeline rank.
        forward: samples of seconds of F.
        backward: samples of seconds of B.
        held: samples of bytes held from F to B.
        peaks: peaks of ops beyond the bytes in ``held``.
        again: (mode, tokens, increase of B in seconds, seconds of F) of one layer.
        module_seconds: seconds per token to recompute a module of one layer, by the module's name.
        link: (tokens of a message between stages, its seconds).
        split: measurements of full and split backwards.
        exchange: (tokens, additional seconds of F, additional seconds of B) of one layer with
            sharded documents, compared with single-rank documents.
        host: (seconds of F, seconds of B) that a GPU's host takes to issue a layer; empty on a CPU.
        host_rate: bytes per second to host memory.
        stores_last_slice: whether the layer's attention also caches K and V of last slices.
        replica: index of the pipeline's replica.
    """

    rank: int = 0
    forward: list[Sample] = dataclasses.field(default_factory=list)
    backward: list[Sample] = dataclasses.field(default_factory=list)
    held: list[Sample] = dataclasses.field(default_factory=list)
    peaks: list[Peak] = dataclasses.field(default_factory=list)
    again: list[tuple[str, int, float, float]] = dataclasses.field(default_factory=list)
    module_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    link: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    split: list[SplitSeconds] = dataclasses.field(default_factory=list)
    exchange: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    host: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    host_rate: float = 0.0
    stores_last_slice: bool = False
    replica: int = 0

    def of_fastest(self, factor: float) -> "Readings":
        """Return the readings with the seconds of a device that is ``factor`` times as fast."""

        def timed(samples: list[Sample]) -> list[Sample]:
            return [replace(each, value=each.value / factor) for each in samples]

        return replace(
            self,
            forward=timed(self.forward),
            backward=timed(self.backward),
            again=[
                (mode, tokens, more / factor, without / factor)
                for mode, tokens, more, without in self.again
            ],
            module_seconds={name: each / factor for name, each in self.module_seconds.items()},
            split=[
                replace(s, whole=s.whole / factor, input=s.input / factor, weight=s.weight / factor)
                for s in self.split
            ],
            exchange=[(tokens, f / factor, b / factor) for tokens, f, b in self.exchange],
        )
