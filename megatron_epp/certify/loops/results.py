"""Answers of the processes of a loop's certificate."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from megatron_epp.certify.compare import Shard


@dataclass(frozen=True, slots=True)
class LoopReference:
    """From the plain model.

    values[replica][number]   of the loss of each micro-batch
    sums[replica][number]     what a pass of forwards collects of it
    gradients                 of the whole model by key, as Megatron's reduction leaves them
    """

    values: tuple[tuple[float, ...], ...]
    sums: tuple[tuple[float, ...], ...]
    gradients: Mapping[str, numpy.ndarray]


@dataclass(frozen=True, slots=True)
class LoopComputed:
    """Results of one rank for a batch.

    replica      of which this rank is part
    values       of the loss of each micro-batch, from the ranks of the last stage; else none
    collected    what a pass of forwards collected of each, from the same ranks
    gradients    of its part of the model
    chunks, cut, halved   of the plan: chunks, those beyond one a micro-batch, Ws of all stages
    messages     sent and received in training
    collectives  issued in training, by their name on the list (allowed.py)
    problems     what went otherwise than planned, one line each
    """

    replica: int
    values: tuple[float, ...]
    collected: tuple[float, ...]
    gradients: list[Shard]
    chunks: int
    cut: int
    halved: int
    messages: int
    collectives: Counter[str]
    problems: list[str]
