"""Kinds of the layers in order, and numbers of layers by kind and recompute mode.

The model defines the kind of each layer. A plan defines the number of layers of each stage, and a
recompute mode for each layer and chunk. Planners use counts: the number of layers of a stage with a
certain kind and mode.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_epp.ir import Plan
from megatron_epp.ir.errors import quoted

Choice = tuple[int, str]  # number of a kind, and a recompute mode
# Number of layers with each choice, [stages, chunks]. From the first layer of a stage on, layers of
# one kind are in the order of this mapping. Saved layers are last; offloaded ones may be anywhere.
Counts = Mapping[Choice, np.ndarray]


@dataclass(frozen=True, eq=False)  # no slots, because its arrays are cached
class StageKinds:
    """Kinds of the layers of all stages.

    Attributes:
        names: names of the K kinds.
        words: ``words[s][i]`` is the index in ``names`` of the kind of layer i of stage s.
    """

    names: tuple[str, ...]
    words: tuple[np.ndarray, ...]

    @property
    def number(self) -> int:
        """Number of kinds."""
        return len(self.names)

    @cached_property
    def counts(self) -> np.ndarray:
        """[K, stages]: number of layers of each kind."""
        return np.array(
            [[float((word == kind).sum()) for word in self.words] for kind in range(self.number)]
        )

    @cached_property
    def _before(self) -> np.ndarray:
        """[K, stages, n + 1]: number of layers of each kind among a stage's first 0, 1, ..., n."""
        most = max(len(word) for word in self.words)
        before = np.zeros((self.number, len(self.words), most + 1))
        for stage, word in enumerate(self.words):
            for kind in range(self.number):
                seen = np.concatenate(([0], np.cumsum(word == kind)))
                before[kind, stage, : len(seen)] = seen
                before[kind, stage, len(seen) :] = seen[-1]
        return before

    @cached_property
    def nth(self) -> tuple[np.ndarray, np.ndarray]:
        """Kind of each layer, and its index among the stage's layers of that kind.

        Both are arrays [stages, n]. Column 0 is the last layer of a stage; indices count from its
        first layer. n is the largest number of layers of a stage, and entries beyond a stage's
        layers are -1.
        """
        most = max(len(word) for word in self.words)
        kinds = np.full((len(self.words), most), -1, np.int64)
        places = np.full((len(self.words), most), -1, np.int64)
        for stage, word in enumerate(self.words):
            last = len(word) - 1
            for at, kind in enumerate(word):
                kinds[stage, last - at] = kind
                places[stage, last - at] = (word[:at] == kind).sum()
        return kinds, places

    def stage_text(self, stage: int) -> str:
        """Return the layers of a stage: ``15``, or with several kinds ``3 dense, 12 experts``."""
        word = self.words[stage]
        if self.number == 1:
            return str(len(word))
        counts = ((int((word == kind).sum()), name) for kind, name in enumerate(self.names))
        return ", ".join(f"{count} {name}" for count, name in counts if count) or "0"

    def from_front(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return [K, stages, chunks]: number of layers of each kind in [``start``, ``stop``).

        ``start`` and ``stop`` [stages, chunks] are indices of layers within a stage.
        """
        stage = np.arange(len(self.words))[:, None]
        start, stop = start.astype(np.int64), stop.astype(np.int64)
        return self._before[:, stage, stop] - self._before[:, stage, start]

    def first(self, mode: str, layers: np.ndarray) -> Counts:
        """Return counts of each stage's first ``layers`` [stages, chunks], all with ``mode``."""
        of_kinds = enumerate(self.from_front(np.zeros_like(layers), layers))
        return {(kind, mode): grid for kind, grid in of_kinds if grid.any()}

    def of_plan(self, plan: Plan) -> dict[Choice, np.ndarray]:
        """Return the number of layers of ``plan`` by (kind, recompute mode): [stages, chunks]."""
        seen: dict[tuple[int, str], dict[Choice, int]] = {}
        counts: dict[Choice, np.ndarray] = {}
        for stage, choices in enumerate(plan.recompute):
            for chunk, text in enumerate(choices):
                if (stage, text) not in seen:
                    count: dict[Choice, int] = {}
                    for kind, mode in zip(self.words[stage].tolist(), text, strict=True):
                        count[kind, mode] = count.get((kind, mode), 0) + 1
                    seen[stage, text] = count
                for choice, layers in seen[stage, text].items():
                    if choice not in counts:
                        counts[choice] = np.zeros((plan.stages, len(plan.chunks)))
                    counts[choice][stage, chunk] = layers
        return counts


def stage_kinds(
    names: Sequence[str], of_layers: Sequence[int], layers: Sequence[int]
) -> StageKinds:
    """Return the kinds of the layers of each stage; kinds without layers are omitted.

    Args:
        names: names of all kinds.
        of_layers: index in ``names`` of each layer's kind.
        layers: number of layers of each stage.
    """
    used = sorted(set(of_layers)) or [0]
    numbers = np.array([used.index(kind) for kind in of_layers], np.int64)
    edges = [0, *itertools.accumulate(layers)]
    words = tuple(numbers[start:stop] for start, stop in itertools.pairwise(edges))
    return StageKinds(tuple(names[kind] for kind in used), words)


# ------------------------------------------------------------------ text

_RUN = re.compile(r"(?:([1-9][0-9]{0,4})\*)?([A-Za-z][A-Za-z0-9_.-]{0,63})")
_GROUP = re.compile(r"(?:([1-9][0-9]{0,4})\*)?\(([^()]*)\)|(\S+)")


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kind of each layer from text like ``3*dense 58*experts`` or ``18*(window full)``.

    Raises:
        ValueError: the text is invalid.
    """
    kinds: list[str] = []
    part: tuple[str, ...]
    at = 0
    text = text.strip()
    while at < len(text):
        match = _GROUP.match(text, at)
        if match is None:
            raise ValueError(_EXPECTED.format(quoted(text)))
        times, group, single = match.groups()
        if single is not None:
            run = _RUN.fullmatch(single)
            if run is None:
                raise ValueError(_EXPECTED.format(quoted(text)))
            part, times = (run[2],), run[1]
        else:
            part = parse_kinds(group)
        repeats = int(times or 1)
        if len(kinds) + len(part) * repeats > _MOST_LAYERS:
            raise ValueError(f"kinds of layers {quoted(text)}: more than {_MOST_LAYERS} layers")
        kinds += part * repeats
        at = match.end()
        while at < len(text) and text[at].isspace():
            at += 1
    if not kinds:
        raise ValueError(_EXPECTED.format(quoted(text)))
    return tuple(kinds)


_MOST_LAYERS = 10_000
_EXPECTED = (
    "kinds of layers {}: expected kinds in the order of the layers, as in 3*dense 58*experts or "
    "18*(window full)"
)


def format_kinds(kinds: Sequence[str]) -> str:
    """Return the text for :func:`parse_kinds`, with repeated kinds or patterns abbreviated."""
    for period in range(1, len(kinds) // 2 + 1):
        if len(kinds) % period == 0 and all(a == b for a, b in zip(kinds, kinds[period:])):  # noqa: B905
            times = len(kinds) // period
            inner = _runs(kinds[:period])
            return f"{times}*{inner}" if period == 1 else f"{times}*({inner})"
    return _runs(kinds)


def _runs(kinds: Sequence[str]) -> str:
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    return " ".join(kind if count == 1 else f"{count}*{kind}" for kind, count in runs)
