"""Kinds of layers in order, and numbers of layers by kind and recompute choice.

The kinds of the layers, first to last, belong to the model; a plan says how many layers a stage
has, and a letter for each. Planners count: so many layers of a stage and kind have that letter.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_epp.ir import Plan
from megatron_epp.ir.errors import quoted

Choice = tuple[int, str]  # a kind's number, and a recompute letter
# [stages, chunks] layers with each choice. Those of a kind stand from the front of a stage in their
# order, but kept layers behind them; offloaded ones stand anywhere.
Counts = Mapping[Choice, np.ndarray]


@dataclass(frozen=True, eq=False)  # no slots: its arrays are computed once, when first asked for
class StageKinds:
    """The kinds of all stages' layers.

    names   of the K kinds
    words   of every stage: the number of each of its layers' kind, first layer first
    """

    names: tuple[str, ...]
    words: tuple[np.ndarray, ...]

    @property
    def number(self) -> int:
        return len(self.names)

    @cached_property
    def counts(self) -> np.ndarray:
        """[K, stages]: layers of each kind."""
        return np.array(
            [[float((word == kind).sum()) for word in self.words] for kind in range(self.number)]
        )

    @cached_property
    def _before(self) -> np.ndarray:
        """[K, stages, most layers + 1]: of each kind among a stage's first so many."""
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
        """Two [stages, most layers]: of the layer so many before a stage's last, its kind and its
        place among its kind from the front; -1 where the stage has no more layers."""
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
        """``15`` layers; ``3 dense, 12 experts`` where there are several kinds in the model."""
        word = self.words[stage]
        if self.number == 1:
            return str(len(word))
        counts = ((int((word == kind).sum()), name) for kind, name in enumerate(self.names))
        return ", ".join(f"{count} {name}" for count, name in counts if count) or "0"

    def from_front(self, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """[K, stages, chunks]: layers of each kind among those of a stage from ``start`` to
        ``stop``, both [stages, chunks]."""
        stage = np.arange(len(self.words))[:, None]
        start, stop = start.astype(np.int64), stop.astype(np.int64)
        return self._before[:, stage, stop] - self._before[:, stage, start]

    def first(self, mode: str, layers: np.ndarray) -> Counts:
        """``mode`` for the first ``layers`` [stages, chunks] of every stage, whatever their
        kinds."""
        of_kinds = enumerate(self.from_front(np.zeros_like(layers), layers))
        return {(kind, mode): grid for kind, grid in of_kinds if grid.any()}

    def of_plan(self, plan: Plan) -> dict[Choice, np.ndarray]:
        """[stages, chunks] layers with each choice, as the letters of ``plan`` say."""
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
    """The kinds of stages of so many ``layers``, from the number of every layer's kind in
    ``names``; kinds that no stage has are left out."""
    used = sorted(set(of_layers)) or [0]
    numbers = np.array([used.index(kind) for kind in of_layers], np.int64)
    edges = [0, *itertools.accumulate(layers)]
    words = tuple(numbers[start:stop] for start, stop in itertools.pairwise(edges))
    return StageKinds(tuple(names[kind] for kind in used), words)


# ------------------------------------------------------------------ text

_RUN = re.compile(r"(?:([1-9][0-9]{0,4})\*)?([A-Za-z][A-Za-z0-9_.-]{0,63})")
_GROUP = re.compile(r"(?:([1-9][0-9]{0,4})\*)?\(([^()]*)\)|(\S+)")


def parse_kinds(text: str) -> tuple[str, ...]:
    """The kinds of layers, first to last, from ``3*dense 58*experts`` or ``18*(window full)``."""
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
    """As :func:`parse_kinds` reads it: runs; a pattern that repeats as one."""
    for period in range(1, len(kinds) // 2 + 1):
        if len(kinds) % period == 0 and all(a == b for a, b in zip(kinds, kinds[period:])):  # noqa: B905
            times = len(kinds) // period
            inner = _runs(kinds[:period])
            return f"{times}*{inner}" if period == 1 else f"{times}*({inner})"
    return _runs(kinds)


def _runs(kinds: Sequence[str]) -> str:
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(kinds)]
    return " ".join(kind if count == 1 else f"{count}*{kind}" for kind, count in runs)
