"""Loss masks of a corpus: ``PREFIX_mask.bin/.idx``, one byte for every token of ``PREFIX``.

Value 1 marks a target: a token for which training computes a loss. A sequence has as many mask
bytes as tokens. Planning omits the tokens after the last target of a document, and documents
without a target.

    tokens    a b c d e f g      of a sequence
    mask      0 0 0 1 1 0 0      d and e are targets
    inputs    a b c d            4 = the document's length
    labels    b c d e
    weights   0 0 1 1            of the labels' losses

The policies for documents longer than the context (overlong.py) take targets into account. ``drop``
considers the length up to the last target. ``truncate`` and ``split`` cut as without masks; each
part then ends at its last target, or is left out if it has none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_epp.corpus.idx_file import BLOCK_ENTRIES, CorpusFiles, read_index
from megatron_epp.corpus.overlong import (
    Counts,
    DocumentIndex,
    apply_context,
    require_policy,
)

SUFFIX = "_mask"
# Bytes of masks that are read at once; positions of targets take eight times as much.
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LossMasks:
    """Loss masks of a corpus, with one mask byte for every token of a sequence.

    Attributes:
        prefix: path without suffix.
        lengths: [sequences] int32, number of tokens of each sequence.
    """

    prefix: str
    lengths: np.ndarray = field(compare=False, repr=False)

    def last_targets(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the position of the last target in each range, or -1 if none: [ranges] int64.

        From the first range to the last, this method reads the masks once, block by block.

        Args:
            starts: [ranges] positions from the beginning of the file, ascending; no ranges overlap.
            stops: [ranges] ends of the ranges, exclusive.

        Raises:
            ValueError: a byte is neither 0 nor 1.
        """
        last_target = np.full(len(stops), -1, np.int64)
        last, judged = -1, 0
        for targets, end in self._targets(int(starts[0]), int(stops[-1])) if len(stops) else ():
            ready = int(np.searchsorted(stops, end, side="right"))
            place = np.searchsorted(targets, stops[judged:ready]) - 1
            here = np.full(len(place), last, np.int64)
            here[place >= 0] = targets[place[place >= 0]]
            last_target[judged:ready] = np.where(here >= starts[judged:ready], here, -1)
            last, judged = int(targets[-1]) if len(targets) else last, ready
        return last_target

    def _targets(self, start: int, stop: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield (positions of the targets, end) of each block of masks in [start, stop)."""
        data = Path(self.prefix + ".bin")
        if start == stop:
            return
        masks = np.memmap(data, np.uint8, mode="r")
        for first in range(start, stop, _BLOCK_BYTES):
            end = min(first + _BLOCK_BYTES, stop)
            block = masks[first:end]
            if block.max() > 1:
                at = int((block > 1).argmax())
                raise ValueError(
                    f"{data}: byte {first + at} is {block[at]}; expected 1 for a token that is a "
                    "target and 0 for any other"
                )
            yield np.flatnonzero(block.view(np.bool_)) + first, end

    def index(
        self, context: int, overlong: str, first_sequence: int = 0, count: int | None = None
    ) -> DocumentIndex:
        """Return the documents of consecutive sequences, with the policy ``overlong`` applied.

        Args:
            context: maximum number of input tokens of a document; 0: no limit.
            overlong: policy for longer documents (overlong.py).
            first_sequence: number of the first sequence.
            count: number of sequences; None: all sequences from ``first_sequence`` on.

        Raises:
            ValueError: ``overlong`` is not a policy, or a byte is neither 0 nor 1.
        """
        require_policy(overlong)
        rest = len(self.lengths) - first_sequence
        lengths = self.lengths[first_sequence : first_sequence + (rest if count is None else count)]
        usable = lengths >= 2
        uncut = lengths[usable].astype(np.int64) - 1  # inputs of the untouched documents
        before = int(self.lengths[:first_sequence].sum(dtype=np.int64))
        begins = (before + np.cumsum(lengths, dtype=np.int64) - lengths)[usable]

        # Parts of a document: pieces of the context's size, or the first such piece and the rest.
        limit = context or int(uncut.max(initial=1))
        parts = -(-uncut // limit)
        if overlong != "split":
            parts = np.minimum(parts, 2)
        document = np.repeat(np.arange(len(uncut)), parts)  # of each part
        first = np.cumsum(parts) - parts  # part of each document
        starts = (np.arange(len(document)) - first[document]) * limit
        ends = starts + limit
        ends[first + parts - 1] = uncut
        # The labels of inputs [start, end) are the tokens [start + 1, end + 1).
        origin = begins[document]
        last = self.last_targets(origin + starts + 1, origin + ends + 1)
        inputs = np.where(last < 0, 0, last - origin - starts)

        # Input tokens of each document up to its last target
        needed = np.zeros(len(uncut), np.int64)
        np.maximum.at(needed, document, np.where(inputs > 0, starts + inputs, 0))
        over = needed > limit
        if overlong == "split":
            kept, changed = np.flatnonzero(inputs > 0), over
            # Documents without a target, and parts without a target that precede one with a target.
            without = (needed == 0).sum() + ((inputs == 0) & (starts < needed[document])).sum()
        elif overlong == "drop":
            kept, changed = first[(needed > 0) & ~over], over
            without = (needed == 0).sum()
        else:
            kept, changed = first[inputs[first] > 0], over & (inputs[first] > 0)
            without = (inputs[first] == 0).sum()
        tokens = int(inputs[kept].sum())
        lost = 0 if overlong == "split" else int(needed.sum()) - tokens
        done = {"truncate": "truncated", "drop": "dropped", "split": "split"}[overlong]
        counts = Counts(
            sequences=len(lengths),
            documents=len(kept),
            tokens=tokens,
            skipped=len(lengths) - len(uncut),
            lost_tokens=lost,
            untargeted=int(without),
            untargeted_tail=int(uncut.sum()) - tokens - lost,
            **{done: int(changed.sum())},
        )
        wide = np.int64 if first_sequence + len(lengths) > np.iinfo(np.int32).max else np.int32
        sequences = np.flatnonzero(usable)[document[kept]] + first_sequence
        return DocumentIndex(
            sequences.astype(wide),
            starts[kept].astype(lengths.dtype),
            inputs[kept].astype(lengths.dtype),
            counts,
            self.prefix,
        )


def index_of_split(
    lengths: np.ndarray,
    split: tuple[int, int],
    context: int,
    overlong: str,
    masks: LossMasks | None = None,
) -> DocumentIndex:
    """Return the documents of a split of a corpus, with a policy for overlong documents applied.

    Args:
        lengths: [sequences] number of tokens of every sequence of the corpus.
        split: number of the split's first sequence, and the number after its last sequence.
        context: maximum number of input tokens of a document; 0: no limit.
        overlong: policy for longer documents.
        masks: loss masks of the corpus, if any. With masks, a document ends at its last target.

    Raises:
        ValueError: ``overlong`` is not a policy, or a byte of the masks is neither 0 nor 1.
    """
    first, stop = split
    if masks is not None:
        return masks.index(context, overlong, first, stop - first)
    return apply_context(lengths[first:stop] - 1, context, overlong, first)


def examine_masks(files: CorpusFiles) -> LossMasks | None:
    """Return the loss masks of a corpus, or None if it has none.

    Raises:
        ValueError: one of the masks' two files is missing or damaged, the masks are not bytes, or
            the lengths of their sequences are not those of the corpus.
    """
    prefix = files.prefix + SUFFIX
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    if not index.exists() and not data.exists():
        return None
    remedy = f"prepare the masks again, or rename them to train on every token of {files.prefix}"
    for there, missing in ((index, data), (data, index)):
        if there.exists() and not missing.is_file():
            raise ValueError(
                f"{missing}: no such file, but {there.name} is there; expected both files of the "
                f"loss masks of {files.prefix}; {remedy}"
            )
    masks = read_index(index)
    if masks.dtype is not np.uint8:
        raise ValueError(
            f"{index}: holds {masks.dtype.__name__}; loss masks are bytes (uint8); {remedy}"
        )
    if masks.sequences != files.sequences:
        raise ValueError(
            f"{index}: {masks.sequences} sequences of masks; {files.prefix}.idx has "
            f"{files.sequences} sequences of tokens; {remedy}"
        )
    for first in range(0, files.sequences, BLOCK_ENTRIES):
        mask_lengths = masks.lengths[first : first + BLOCK_ENTRIES]
        token_lengths = files.lengths[first : first + BLOCK_ENTRIES]
        if (unlike := mask_lengths != token_lengths).any():
            at = int(unlike.argmax())
            raise ValueError(
                f"{index}: the mask of sequence {first + at} has {mask_lengths[at]} entries, the "
                f"sequence in {files.prefix}.idx {token_lengths[at]} tokens; {remedy}"
            )
    return LossMasks(prefix, masks.lengths)
