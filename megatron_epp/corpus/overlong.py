"""Policies for documents longer than the context, for both planning and training.

A document of L tokens has L - 1 input tokens. A document without input tokens has nothing to
predict and is skipped.

    context 4, a document of 10 input tokens:   truncate 4   drop nothing   split 4 4 2
"""

from dataclasses import dataclass, fields

import numpy as np

OVERLONG = ("truncate", "drop", "split")


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of sequences, documents and input tokens, by the effect of the policy.

    Attributes:
        sequences: number of sequences that were read.
        documents: number of documents that the policy makes of them.
        tokens: number of input tokens of these documents.
        skipped: number of sequences of fewer than 2 tokens, which have nothing to predict.
        truncated: number of sequences that were truncated.
        dropped: number of sequences that were dropped.
        split: number of sequences that became several documents.
        lost_tokens: number of input tokens that were cut off or dropped.
        untargeted: number of documents, or parts of documents, that were left out because they have
            no target (loss_mask.py).
        untargeted_tail: number of tokens that were left out because they follow the last target.
    """

    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    lost_tokens: int = 0
    untargeted: int = 0
    untargeted_tail: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    def __str__(self) -> str:
        parts = [f"{self.documents} documents, {self.tokens} input tokens"]
        if self.skipped:
            parts.append(f"{self.skipped} of fewer than 2 tokens skipped")
        if self.truncated:
            parts.append(f"{self.truncated} truncated")
        if self.dropped:
            parts.append(f"{self.dropped} overlong dropped")
        if self.split:
            parts.append(f"{self.split} split")
        if self.untargeted:
            parts.append(f"{self.untargeted} without a target dropped")
        if self.untargeted_tail:
            parts.append(f"{self.untargeted_tail} tokens that no target needs left out")
        if self.lost_tokens:
            fraction = self.lost_tokens / (self.tokens + self.lost_tokens)
            parts.append(f"{self.lost_tokens} tokens ({fraction:.1%}) lost to the context")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True, eq=False)
class DocumentIndex:
    """Documents after the policy, in the order of the corpus.

    Document d has ``inputs[d]`` input tokens, starting at token ``starts[d]`` of sequence
    ``sequences[d]``.

    Attributes:
        sequences: [documents] int32 or int64, number of the sequence in its file.
        starts: [documents], first token within the sequence, in the dtype of the lengths.
        inputs: [documents], number of input tokens, in the dtype of the lengths.
        counts: numbers of truncated, dropped, split and other sequences.
        masks: prefix of the loss masks; None: every token is a target.
    """

    sequences: np.ndarray
    starts: np.ndarray
    inputs: np.ndarray
    counts: Counts
    masks: str | None = None


def require_policy(overlong: str) -> None:
    """Raise a ValueError unless ``overlong`` is a policy."""
    if overlong not in OVERLONG:
        raise ValueError(f"overlong {overlong!r}: expected one of {', '.join(OVERLONG)}")


def apply_context(
    inputs: np.ndarray, context: int, overlong: str, first_sequence: int = 0
) -> DocumentIndex:
    """Return documents of at most ``context`` input tokens; apply ``overlong`` to longer sequences.

    Args:
        inputs: [sequences] int, number of input tokens of each sequence; sequences without input
            tokens are skipped.
        context: maximum number of input tokens of a document; 0: no limit.
        overlong: policy for longer documents: truncate, drop, or split into documents of their own.
        first_sequence: number that the first sequence of ``inputs`` has in its file.

    Raises:
        ValueError: ``overlong`` is not a policy.
    """
    require_policy(overlong)
    usable = inputs >= 1
    count = len(inputs)
    wide = np.int64 if first_sequence + count > np.iinfo(np.int32).max else np.int32
    sequences = np.arange(first_sequence, first_sequence + count, dtype=wide)[usable]
    kept = inputs[usable]
    starts = np.zeros_like(kept)
    over = kept > context if context else np.zeros(len(kept), bool)
    overlong_count = int(over.sum())
    tokens_before = int(kept.sum(dtype=np.int64))

    if overlong_count and overlong == "truncate":
        kept = np.minimum(kept, context)
    elif overlong_count and overlong == "drop":
        sequences, starts, kept = sequences[~over], starts[~over], kept[~over]
    elif overlong_count:
        pieces = -(-kept // context)
        # Number of each piece within its sequence: 0 1 2, 0, 0 1, ...
        first = np.cumsum(pieces, dtype=np.int64) - pieces
        piece = np.arange(int(pieces.sum(dtype=np.int64))) - np.repeat(first, pieces)
        starts = (piece * context).astype(kept.dtype)
        sequences = np.repeat(sequences, pieces)
        kept = np.minimum(np.repeat(kept, pieces) - starts, context)

    tokens = int(kept.sum(dtype=np.int64))
    done = {"truncate": "truncated", "drop": "dropped", "split": "split"}[overlong]
    counts = Counts(
        sequences=count,
        documents=len(kept),
        tokens=tokens,
        skipped=count - int(usable.sum()),
        lost_tokens=tokens_before - tokens,
        **{done: overlong_count},
    )
    return DocumentIndex(sequences, starts, kept.astype(inputs.dtype, copy=False), counts)
