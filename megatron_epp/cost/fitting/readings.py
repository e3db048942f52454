"""Measurements of one rank of its parts of a model: the samples that a profile is fitted to."""

import dataclasses
from dataclasses import dataclass, replace

from megatron_epp.cost.fitting.fit import Sample
from megatron_epp.cost.fitting.split_seconds import SplitSeconds
from megatron_epp.cost.kinds.layer import PARTS, Layer
from megatron_epp.ir import FULL, KEEP, SELECTIVE, Kind

# Behind contexts so many tokens are weighed: a backward makes the gradients of all its keys at
# once, which shows only where they are more than what a weight's gradient takes.
AFTER_CONTEXT_TOKENS = 1024
OWN_MODES = "".join(part.MODES for part in PARTS)  # of layers of some kinds alone


def modes_of(layer: Layer) -> str:
    """The recompute letters that make a difference to ``layer``, and KEEP."""
    return KEEP + FULL + "".join(x for x in SELECTIVE if x not in OWN_MODES) + layer.modes


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that an op held beyond its chunk's bytes: of one layer, or of the last stage's end.

    bytes   below 0 where a backward frees more than it makes
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

    rank            of the pipeline, of the ``replica``
    held            samples of bytes from F to B; ``peaks`` beyond them
    again           (letter, tokens, seconds that it added to B, seconds of F) of one layer
    module_seconds  by name of a selective set's module: of one layer, per token
    link            (tokens of a message, seconds)
    split           backwards whole and in halves
    exchange        (tokens, seconds of F, of B) that one layer takes longer of spread documents
                    than of those local to a context-parallel rank
    host            (seconds of F, of B) that a GPU's host takes to issue a layer; none on a CPU
    host_rate       bytes per second to the host's memory
    stores_last_slice      whether the layer's attention has last slices kept, too
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
        """Seconds as they were on a device that is ``factor`` times as fast."""

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
