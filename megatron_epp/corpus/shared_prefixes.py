"""Forest of sequences with common prefixes, in which every shared prefix occurs once.

0  a b c d e        node 0  a b c      of sequences 0, 1, 2
1  a b c d f        node 1    d        of 0 and 1, continues node 0
2  a b c x          node 2, 3 e | f    node 4  x
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

# Shortest prefix worth sharing: one more document costs about as much as this many tokens
LEAST = 32
_PART = re.compile(r"(?P<tokens>[1-9][0-9]{0,9})(?P<prefix>\+\()?|(?P<closed>\))|,")
_BLOCK = 64  # rows that are compared at first; doubled each time


@dataclass(frozen=True, slots=True)
class SharedSpan:
    """Node of a :class:`PrefixForest`: tokens [start, stop) that one or more sequences share.

    Attributes:
        sequence: number of one of these sequences, from which the tokens can be read.
        start: index of the first token in this sequence.
        stop: index after the last token.
        parent: number of the node that this node continues, which precedes it in the forest; -1 if
            this node is the beginning of its sequences.
    """

    sequence: int
    start: int
    stop: int
    parent: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PrefixForest:
    """Sequences as a forest, whose nodes are the spans of tokens that they share.

    Attributes:
        nodes: nodes, each after its parent.
        last: last node of each sequence; this node and its ancestors make up the sequence.
    """

    nodes: tuple[SharedSpan, ...]
    last: tuple[int, ...]

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> "PrefixForest":
        """Return the forest of sequences of ``lengths`` that share no tokens."""
        nodes = (SharedSpan(number, 0, length, -1) for number, length in enumerate(lengths))
        return cls(tuple(nodes), tuple(range(len(lengths))))

    @classmethod
    def parsed(cls, text: str) -> "PrefixForest | None":
        """Return the forest of a group such as ``3000+(1200,800+(900,700))``; None for other text.

        A number before ``+(`` is a prefix of all sequences within the parentheses; any other number
        ends a sequence.
        """
        spans: list[tuple[int, int, int]] = []  # first token, stop, parent
        last: list[int] = []
        open_ones: list[int] = []  # prefixes whose parentheses are open
        at, complete = 0, False  # complete: a sequence or a closed parenthesis precedes
        while at < len(text):
            match = _PART.match(text, at)
            if match is None or complete == bool(match["tokens"]):
                return None
            at = match.end()
            if match["tokens"]:
                parent = open_ones[-1] if open_ones else -1
                begin = spans[parent][1] if open_ones else 0
                spans.append((begin, begin + int(match["tokens"]), parent))
                complete = not match["prefix"]
                (last if complete else open_ones).append(len(spans) - 1)
            elif not open_ones:
                return None
            elif match["closed"]:
                open_ones.pop()
            else:
                complete = False
        if open_ones or not complete:
            return None
        sequence: dict[int, int] = {}
        for number, node in enumerate(last):
            while node >= 0 and node not in sequence:
                sequence[node] = number
                node = spans[node][2]
        nodes = (SharedSpan(sequence[at], *span) for at, span in enumerate(spans))
        return cls(tuple(nodes), tuple(last))

    @classmethod
    def joined(cls, forests: Iterable["PrefixForest"]) -> "PrefixForest":
        """Return the forest of the sequences of several forests, in order."""
        nodes: list[SharedSpan] = []
        last: list[int] = []
        for forest in forests:
            first, sequence = len(nodes), len(last)
            for node in forest.nodes:
                parent = node.parent + first if node.parent >= 0 else -1
                nodes.append(SharedSpan(node.sequence + sequence, node.start, node.stop, parent))
            last += (node + first for node in forest.last)
        return cls(tuple(nodes), tuple(last))

    @property
    def depths(self) -> int:
        """Sum over all nodes of the number of nodes that they continue."""
        depth: list[int] = []
        for node in self.nodes:
            depth.append(depth[node.parent] + 1 if node.parent >= 0 else 0)
        return sum(depth)

    def __str__(self) -> str:
        """Return the lengths of the sequences if they share no tokens, else the repr."""
        return str(self.lengths) if self == self.apart(self.lengths) else repr(self)

    def require(self, lengths: Sequence[int]) -> None:
        """Check that the forest consists of complete sequences of ``lengths``.

        Raises:
            ValueError: the forest does not consist of them.
        """
        if len(self.last) != len(lengths):
            raise ValueError(f"{len(self.last)} sequences; expected {len(lengths)}")
        for number, node in enumerate(self.nodes):
            if not -1 <= node.parent < number:
                raise ValueError(
                    f"node {number} continues node {node.parent}; expected one before it, or -1"
                )
            begin = 0 if node.parent < 0 else self.nodes[node.parent].stop
            if not 0 <= node.sequence < len(lengths):
                raise ValueError(f"node {number} is of sequence {node.sequence}; there are "
                                 f"{len(lengths)}")  # fmt: skip
            if node.start != begin or not begin < node.stop <= lengths[node.sequence]:
                raise ValueError(
                    f"node {number} holds tokens [{node.start}:{node.stop}] of sequence "
                    f"{node.sequence}, of {lengths[node.sequence]}; expected some from {begin} on, "
                    "where what it continues ends"
                )
        for sequence, last in enumerate(self.last):
            if not 0 <= last < len(self.nodes) or self.nodes[last].stop != lengths[sequence]:
                raise ValueError(
                    f"sequence {sequence} ends with node {last}; expected one that ends at its "
                    f"{lengths[sequence]} tokens"
                )

    @property
    def shares(self) -> bool:
        """Whether sequences share tokens."""
        return any(node.parent >= 0 for node in self.nodes) or len(self.nodes) < len(self.last)

    def path(self, sequence: int) -> tuple[int, ...]:
        """Return the nodes of ``sequence``, in the order of its tokens."""
        nodes, node = [], self.last[sequence]
        while node >= 0:
            nodes.append(node)
            node = self.nodes[node].parent
        return tuple(reversed(nodes))

    def shared(self, one: int, other: int) -> int:
        """Return the number of leading tokens that two sequences share."""
        nodes = {*self.path(one)} & {*self.path(other)}
        return max((self.nodes[node].stop for node in nodes), default=0)

    @property
    def tokens(self) -> int:
        """Number of tokens to compute: those of all nodes."""
        return sum(node.tokens for node in self.nodes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of every sequence."""
        return tuple(self.nodes[node].stop for node in self.last)

    def of(self, sequences: Sequence[int]) -> "PrefixForest":
        """Return the forest of the sequences whose numbers are ``sequences``, in this order.

        A node that no longer ends a sequence and has a single child is merged with the child.
        """
        last = [self.last[sequence] for sequence in sequences]
        holder: dict[int, int] = {}  # first of the sequences that holds a node
        for number, sequence in enumerate(sequences):
            for node in self.path(sequence):
                holder.setdefault(node, number)
        branches = Counter(self.nodes[node].parent for node in holder)
        ended = set(last)
        new: dict[int, int] = {-1: -1}
        start: dict[int, tuple[int, int]] = {-1: (0, -1)}  # of the merged node: first token, parent
        nodes = []
        for node in sorted(holder):
            span = self.nodes[node]
            before = span.parent
            if before >= 0 and branches[before] == 1 and before not in ended:
                start[node] = start[before]
            else:
                start[node] = span.start, new[before]
            if branches[node] == 1 and node not in ended:
                continue
            nodes.append(SharedSpan(holder[node], start[node][0], span.stop, start[node][1]))
            new[node] = len(nodes) - 1
        return PrefixForest(tuple(nodes), tuple(new[node] for node in last))


Batch = Sequence[int] | PrefixForest  # lengths of documents, or documents with shared prefixes


def as_sent(batch: Batch) -> Batch:
    """Return ``batch`` with Python integers, equal for equal documents in repr and pickle."""
    return batch if isinstance(batch, PrefixForest) else list(map(int, batch))


def lengths_of(batch: Batch) -> Sequence[int]:
    """Return the number of tokens of every document."""
    return batch.lengths if isinstance(batch, PrefixForest) else batch


def sharing_text(forests: Sequence[PrefixForest], where: str, document: str) -> str:
    """Describe how many tokens of ``forests`` repeat others, as "of 9 tokens in ``where``, ..."."""
    tokens = sum(sum(forest.lengths) for forest in forests)
    saved = tokens - sum(forest.tokens for forest in forests)
    return (
        f"of {tokens:,} tokens in {where}, {saved:,} ({saved / max(1, tokens):.0%}) repeat the "
        f"beginning of another {document}; a replica computes them once"
    )


def computed_spans(batch: Batch) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the number of tokens, and the first position, of each span that is computed once.

    The spans are the nodes of a forest, or whole documents. The second result is None if all spans
    begin at position 0. Both arrays are [spans].
    """
    if not isinstance(batch, PrefixForest):
        return np.array(batch), None
    spans = np.array([(node.tokens, node.start) for node in batch.nodes])
    return spans[:, 0], spans[:, 1]


def shared_prefixes(sequences: Sequence[np.ndarray], least: int = LEAST) -> PrefixForest:
    """Return the forest of ``sequences``, in time proportional to their tokens.

    Args:
        sequences: arrays of shape [tokens, ...] with at least one token. Two sequences share their
            leading tokens up to the first row that differs. If a token's output depends on its
            label, the label must be part of the row.
        least: minimum number of tokens of a shared prefix; shorter prefixes are not shared.

    Raises:
        ValueError: a sequence is empty, or ``least`` is below 1.
    """
    rows = [np.ascontiguousarray(each) for each in sequences]
    for number, each in enumerate(rows):
        if not len(each):
            raise ValueError(f"sequence {number} has no token; expected at least one")
    if least < 1:
        raise ValueError(f"least {least}: expected at least 1 token to share")
    nodes: list[SharedSpan] = []
    last = [-1] * len(rows)
    # (sequences, rows that are in nodes already, rows in which the sequences agree, last node).
    open_groups = [(group, 0, 0, -1) for group in reversed(list(_apart(rows, range(len(rows)), 0)))]
    while open_groups:
        group, begin, reached, parent = open_groups.pop()
        first = group[0]
        stop = len(rows[first]) if len(group) == 1 else _agree(rows, group, reached)
        ended = [s for s in group if len(rows[s]) == stop]
        is_shared = stop - begin >= least or len(group) == 1 or len(ended) == len(group)
        if is_shared and stop > begin:
            nodes.append(SharedSpan(first, begin, stop, parent))
            parent, begin = len(nodes) - 1, stop
        for sequence in ended:
            if begin < stop:  # too short to share: each sequence has its own node
                nodes.append(SharedSpan(sequence, begin, stop, parent))
                last[sequence] = len(nodes) - 1
            else:
                last[sequence] = parent
        going_on = [s for s in group if len(rows[s]) > stop]
        for subgroup in reversed(list(_apart(rows, going_on, stop))):
            open_groups.append((subgroup, begin, stop, parent))
    return PrefixForest(tuple(nodes), tuple(last))


def _apart(rows: Sequence[np.ndarray], group: Sequence[int], place: int) -> Iterator[list[int]]:
    """Split ``group`` into lists of sequences whose rows at index ``place`` are equal.

    The lists are in the order in which their first sequences appear in ``group``.
    """
    groups: dict[bytes, list[int]] = {}
    for sequence in group:
        groups.setdefault(rows[sequence][place].tobytes(), []).append(sequence)
    yield from groups.values()


def _agree(rows: Sequence[np.ndarray], group: Sequence[int], reached: int) -> int:
    """Return how many leading rows are equal in all of ``group``; ``reached`` is a lower bound."""
    first = rows[group[0]]
    end = min(len(rows[sequence]) for sequence in group)
    for sequence in group[1:]:
        at, block = reached, _BLOCK
        while at < end:
            stop = min(at + block, end)
            unlike = first[at:stop] != rows[sequence][at:stop]
            if unlike.ndim > 1:
                unlike = unlike.any(axis=tuple(range(1, unlike.ndim)))
            if unlike.any():
                end = at + int(unlike.argmax())
                break
            at, block = stop, 2 * block
    return end
