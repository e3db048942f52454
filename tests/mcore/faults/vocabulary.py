"""Faults of vocabulary parallelism."""

from dataclasses import replace
from unittest.mock import patch

import torch

from megatron_epp.layers.lm_head.vocabulary import Statistics, WeightRows
from megatron_epp.mcore.lm_head import shard
from megatron_epp.mcore.lm_head.head import ShardedHead
from megatron_epp.mcore.lm_head.shard import VocabularyShard
from tests.mcore.fault_injection import Faults, fault, in_turn, nothing


def add_means_unweighted(merged, one: Statistics, other: Statistics) -> Statistics:
    made = merged(one, other)
    if one.rows is None or other.rows is None:
        return made
    mean = (one.rows.mean_tH + other.rows.mean_tH) / 2
    assert made.rows is not None
    return replace(made, rows=WeightRows(mean, made.rows.label_tH))


def forget_label_rows(gradient, rows: WeightRows, weights):
    return gradient(WeightRows(rows.mean_tH, torch.zeros_like(rows.label_tH)), weights)


def mistake_the_first_word():
    plain = VocabularyShard.words
    first = property(lambda shard: replace(plain.__get__(shard), first=0))
    return patch.object(VocabularyShard, "words", first)


def count_masked_rows_in_g(learn, head: ShardedHead, chunk: int, labels, weights) -> None:
    learn(head, chunk, labels, weights if head.is_last else torch.ones_like(weights))


FAULTS: Faults = {
    "nothing 0": nothing,
    "nothing 1": nothing,
    "nothing 2": nothing,
    "nothing 3": nothing,
    "nothing 4": nothing,
    # A stage hands on its own statistics only.
    "forget the words before": fault(Statistics, "merged", lambda merged, one, other: other),
    # WeightRows of the weight are merged as if each stage had half of the softmax.
    "add means unweighted": fault(Statistics, "merged", add_means_unweighted),
    # The gradient of the hidden states lacks the label's row.
    "forget label rows": fault(WeightRows, "gradient", forget_label_rows),
    # G's softmax is over other vocabulary entries than all: its logarithm of their sum is off.
    "take own sums for all": fault(
        shard,
        "weight_gradients",
        lambda weight_gradients, hidden, labels, weights, lse, words: weight_gradients(
            hidden, labels, weights, lse - 0.1, words
        ),
    ),
    # Every stage takes its vocabulary entries for the first ones.
    "mistake the first word": mistake_the_first_word,
    # G weighs all rows alike.
    "count masked rows in g": fault(ShardedHead, "learn", count_masked_rows_in_g),
    "nothing again": nothing,
}
around = in_turn(FAULTS)
