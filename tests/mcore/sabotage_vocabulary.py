"""Breaks the output layer over the stages on purpose, another way in every batch.

Run inside a rank (``Trial.interfere``), as sabotage.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from unittest.mock import patch

import torch

from megatron_epp.layers.lm_head.vocabulary import Statistics, WeightRows
from megatron_epp.mcore.lm_head import shard
from megatron_epp.mcore.lm_head.head import ShardedHead
from megatron_epp.mcore.lm_head.shard import VocabularyShard


def forget_the_words_before() -> AbstractContextManager:
    """A stage hands on its own statistics only."""
    return patch.object(Statistics, "merged", lambda self, other: other)


def add_means_unweighted() -> AbstractContextManager:
    """WeightRows of the weight are merged as if each stage had half of the softmax."""
    plain = Statistics.merged

    def merged(self: Statistics, other: Statistics) -> Statistics:
        if self.rows is None or other.rows is None:
            return plain(self, other)
        mean = (self.rows.mean_tH + other.rows.mean_tH) / 2
        made = plain(self, other)
        assert made.rows is not None
        return replace(made, rows=WeightRows(mean, made.rows.label_tH))

    return patch.object(Statistics, "merged", merged)


def forget_label_rows() -> AbstractContextManager:
    """The gradient of the hidden states lacks the label's row."""
    plain = WeightRows.gradient
    return patch.object(
        WeightRows,
        "gradient",
        lambda self, weights: plain(
            WeightRows(self.mean_tH, torch.zeros_like(self.label_tH)), weights
        ),
    )


def take_own_sums_for_all() -> AbstractContextManager:
    """G's softmax is over other words than all: its logarithm of their sum is off."""
    plain = shard.weight_gradients
    return patch.object(
        shard,
        "weight_gradients",
        lambda hidden, labels, weights, lse, words: plain(
            hidden, labels, weights, lse - 0.1, words
        ),
    )


def mistake_the_first_word() -> AbstractContextManager:
    """Every stage takes its words for the first ones."""
    plain = VocabularyShard.words
    return patch.object(
        VocabularyShard,
        "words",
        property(lambda self: replace(plain.__get__(self), first=0)),
    )


def count_masked_rows_in_g() -> AbstractContextManager:
    """G weighs all rows alike."""
    plain = ShardedHead.learn

    def learn(self: ShardedHead, chunk: int, labels, weights) -> None:
        plain(self, chunk, labels, weights if self.is_last else torch.ones_like(weights))

    return patch.object(ShardedHead, "learn", learn)


WAYS: tuple[Callable[[], AbstractContextManager], ...] = (
    *(nullcontext,) * 5,
    forget_the_words_before,
    add_means_unweighted,
    forget_label_rows,
    take_own_sums_for_all,
    mistake_the_first_word,
    count_masked_rows_in_g,
    nullcontext,
)


def around(number: int) -> AbstractContextManager:
    return WAYS[number]()
