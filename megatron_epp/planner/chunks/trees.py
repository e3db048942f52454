"""Chunks of documents with shared prefixes: a prefix in slices, the documents after it in packs.

    forwards    p0 p1 a b | q0 c d          p0 p1: slices of a prefix; a, b: packs that continue it
    backwards   a b p1 p0 | c d q0

The chunks of documents with a common root are a group. The forward of a chunk runs after that of
the chunk that it continues, and its backward after those of the chunks that continue it. The
backward of a pack needs no forward of another pack, so few packs are in flight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Self

import numpy as np

from megatron_epp.planner.chunks.chunking import Chunking, starts_of
from megatron_epp.planner.chunks.params import ChunkingParams
from megatron_epp.planner.chunks.slicing import Spans
from megatron_epp.planner.chunks.tree_cutting import Span, Tree

# As TAPERS of packs: sizes of the chunks of the trees at an end, as fractions of the other chunks'.
# A tree that is smaller than such a chunk is one chunk.
ENDS = ((), (0.5,), (0.5, 0.8), (0.25, 0.8), (0.3, 0.8, 0.8), (0.15, 0.3, 0.8, 0.8))


@dataclass(frozen=True, slots=True)
class TreeChunking(Chunking):
    """Chunks in which documents continue others; the chunks of a group are a tree in pre-order.

    Attributes:
        continued: for every chunk, the chunk of its group that it continues, or -1.
        tree: the documents.
    """

    continued: np.ndarray = field(kw_only=True)
    tree: Tree = field(kw_only=True)

    @classmethod
    def of_tree(
        cls, tree: Tree, spans: Spans, chunk: np.ndarray, starts: np.ndarray, continued: np.ndarray
    ) -> "TreeChunking":
        """Build chunks from all spans of the documents of ``tree``."""
        cut = np.bincount(spans.document)[spans.document] > 1
        own = Chunking.of_spans(spans, chunk, starts, cut)
        before = np.array(tree.offsets)[spans.document] * spans.tokens
        return cls(
            **{each.name: getattr(own, each.name) for each in fields(Chunking)}
            | {"pairs": own.pairs + np.bincount(own.chunk, before, own.count).astype(np.int64)},
            continued=continued,
            tree=tree,
        )

    @property
    def last_of_group(self) -> np.ndarray:
        """For every chunk, the last chunk of its subtree: of itself and what continues it."""
        last = np.arange(self.count)
        for chunk in range(self.count - 1, -1, -1):
            if (before := self.continued[chunk]) >= 0:
                last[before] = max(last[before], last[chunk])
        return last

    @property
    def backward(self) -> np.ndarray:
        """[chunks]: chunks in the order of their backwards, each after those that continue it."""
        order: list[int] = []
        path: list[int] = []
        for chunk, before in enumerate(self.continued.tolist()):
            while path and path[-1] != before:
                order.append(path.pop())
            path.append(chunk)
        return np.array(order + path[::-1])

    @property
    def widths(self) -> np.ndarray:
        """Most chunks of every group that are in flight at a backward of 1F1B."""
        needed = self.last_of_group[self.backward] + 1 - np.arange(self.count)
        return np.maximum.reduceat(needed, self.starts[:-1])

    def arranged(self, order: Sequence[int] | np.ndarray) -> Self:
        """Return the same chunks with the groups in ``order``."""
        order = np.asarray(order)
        chunking = Chunking.arranged(self, order)
        moved = np.repeat(chunking.starts[:-1] - self.starts[order], chunking.sizes)
        continued = self.continued[np.arange(self.count) - moved]
        return replace(chunking, continued=np.where(continued >= 0, continued + moved, -1))


def build_trees(
    params: ChunkingParams, tree: Tree, target: float, most_tokens: int, multiple: int = 1
) -> TreeChunking:
    """Build chunks of about equal time from documents that continue others.

    Args:
        params: parameters of the chunks.
        tree: the documents.
        target: seconds of a chunk. Chunks of the first and last trees may be smaller.
        most_tokens: maximum number of tokens of a chunk.
        multiple: number of tokens; slice boundaries are multiples of it.
    """
    contents: list[list[Span]] = []
    continued: list[int] = []
    firsts = []
    for roots, fraction in _parts(params, tree):
        times = target * fraction
        some, links = tree.cut(times, times * params.cut, 1, most_tokens, multiple, roots)
        firsts.append(len(contents))
        continued += (each + len(contents) if each >= 0 else -1 for each in links)
        contents += some
    seconds = [sum(map(tree.span_seconds, spans)) for spans in contents]
    groups = pre_order(continued)
    order = [chunk for group in groups for chunk in group]
    works = [sum(seconds[chunk] for chunk in group) for group in groups]
    new = {chunk: at for at, chunk in enumerate(order)} | {-1: -1}
    spans, at = (
        [span for chunk in order for span in contents[chunk]],
        [new[chunk] for chunk in order for _ in contents[chunk]],
    )
    chunking = TreeChunking.of_tree(
        tree,
        Spans(*np.array(spans, dtype=np.int64).T),
        np.array(at),
        starts_of(np.array([*map(len, groups)])),
        np.array([new[continued[chunk]] for chunk in order]),
    )
    # Small groups at both ends; of the others, the longest first.
    part = np.searchsorted(firsts, [group[0] for group in groups], side="right")
    sign = 1 if params.reverse else -1
    return chunking.arranged(np.lexsort((sign * np.array(works), part)))


def pre_order(continued: Sequence[int]) -> list[list[int]]:
    """Return the chunks of every tree in pre-order, small subtrees before large ones.

    Chunk c continues chunk ``continued[c]``, and comes after it; -1: it is the root of a tree.
    """
    children: dict[int, list[int]] = {}
    below = [1] * len(continued)  # chunks of the subtree of each chunk
    for chunk in reversed(range(len(continued))):
        if (before := continued[chunk]) >= 0:
            below[before] += below[chunk]
    for chunk, before in enumerate(continued):
        children.setdefault(before, []).append(chunk)
    groups: list[list[int]] = []
    for root in children[-1]:
        open_ones = [root]
        groups.append([])
        while open_ones:
            groups[-1].append(chunk := open_ones.pop())
            open_ones += sorted(children.get(chunk, []), key=lambda c: -below[c])
    return groups


def _parts(params: ChunkingParams, tree: Tree) -> Iterator[tuple[list[int], float]]:
    """Yield roots to cut together, and their chunks' seconds as a fraction of a chunk's.

    The trees at both ends have smaller chunks, which fill and drain the pipeline sooner.
    """
    roots = [document for document, parent in enumerate(tree.parents) if parent < 0]
    roots.sort(key=lambda root: tree.below[root])
    front = params.ramp_fractions if params.ramp else ENDS[params.front]
    back = ENDS[params.back]
    first = min(len(front), max(0, len(roots) - 1))
    last = min(len(back), max(0, len(roots) - 1 - first))
    for root, fraction in zip(roots[:first], front, strict=False):
        yield [root], fraction
    yield roots[first + last :], 1.0
    for root, fraction in zip(roots[first : first + last], reversed(back[:last]), strict=True):
        yield [root], fraction
