"""Megatron-LM's hybrid (dynamic) context parallelism: every document has its own CP degree.

A document's degree is the smallest power of two that brings its tokens per device under a limit.
Its work is its length squared divided by the degree. Micro-batches are filled in descending length:
a document opens a group of its degree if devices are left; otherwise it joins the group of its
degree with the least work. A micro-batch ends when its groups are balanced or full. Small groups
are then widened onto idle devices. There is no pipeline. Source: the description of these rules in
Megatron-LM's scheduler.
"""

import math
from collections.abc import Iterator

import numpy as np

from .costs import GroupCosts, MicroBatch

GROUP_SLACK = 0.10  # more work than the micro-batch's largest, that a group takes documents up to
EVEN = 0.05  # a micro-batch is done when its groups' work differs by at most this share
# The most tokens of a document on a device, as shares of what a device can hold: the first that
# Megatron's flag would be set to, and finer ones, of which the best is taken.
LIMIT_FRACTIONS = (1.0, 0.5, 0.25)


def divide(lengths: np.ndarray, costs: GroupCosts) -> Iterator[tuple[str, list[MicroBatch]]]:
    """Yield a note and the micro-batches for every limit that the longest document permits."""
    for fraction in LIMIT_FRACTIONS:
        limit = fraction * float(costs.most_tokens[-1]) / costs.devices
        if lengths[0] <= limit * costs.devices:
            note = f"at most {limit:.0f} tokens of a document per device"
            yield note, _fill(lengths, costs, limit)


def _fill(lengths: np.ndarray, costs: GroupCosts, limit: float) -> list[MicroBatch]:
    # The smallest degree with at most ``limit`` tokens per device, and the document.
    waiting = [
        (min(len(costs.degrees) - 1, max(0, math.ceil(math.log2(length / limit)))), document)
        for document, length in enumerate(lengths.tolist())
    ]
    batches: list[MicroBatch] = []
    while waiting:
        groups: list[list[int]] = []
        which: list[int] = []
        work: list[float] = []
        tokens: list[float] = []
        left = costs.devices
        later = []
        for number, (degree, document) in enumerate(waiting):
            if left == 0 and max(work) - min(work) <= EVEN * max(work):
                later.extend(waiting[number:])
                break
            length = float(lengths[document])
            adds = length * length / float(costs.degrees[degree])
            if costs.degrees[degree] <= left:
                groups.append([document])
                which.append(degree)
                work.append(adds)
                tokens.append(length)
                left -= int(costs.degrees[degree])
                continue
            bound = (1 + GROUP_SLACK) * max(work)
            able = [
                group
                for group in range(len(groups))
                if which[group] == degree
                and work[group] + adds <= bound
                and tokens[group] + length <= costs.most_tokens[degree]
            ]
            if not able:
                later.append((degree, document))
                continue
            group = min(able, key=lambda group: work[group])
            groups[group].append(document)
            work[group] += adds
            tokens[group] += length
        # Idle devices double the groups with the most work, where they can be had.
        while left:
            able = [g for g in range(len(groups)) if costs.degrees[which[g]] <= left]
            if not able:
                break
            group = max(able, key=lambda group: work[group] / costs.degrees[which[group]])
            left -= int(costs.degrees[which[group]])
            which[group] += 1
        batches.append((np.array(which), [np.array(held) for held in groups]))
        waiting = later
    return batches
