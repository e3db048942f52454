"""Measurement of split backwards on this device: seconds of I and W, and bytes held from I to W."""

from collections.abc import Iterator, Sequence
from statistics import median

from megatron_epp.cost.fitting.split_seconds import SMALL_TOKENS, SplitSeconds
from megatron_epp.ir import KEEP
from megatron_epp.mcore.calibrate.probe import Probe, Shape

SPLIT_REPEATS = 4  # the result is the median, as for unsplit backwards


def measure_split(
    probe: Probe, busy: Probe, tokens: int, weighed: Sequence[int]
) -> list[SplitSeconds]:
    """Return measurements of split backwards on one rank.

    The function measures seconds with ``busy`` (:meth:`.probe.Probe.after_work`) for chunks up to
    ``tokens``, a large size for this device. It measures bytes with ``probe`` for chunks of
    ``weighed`` tokens.
    """
    return [*_bytes(probe, weighed), *_seconds(busy, tokens)]


def _bytes(probe: Probe, weighed: Sequence[int]) -> Iterator[SplitSeconds]:
    for tokens in weighed:
        shape = Shape(tokens)
        if probe.device.type == "cuda":  # memory that the first call allocates and keeps
            probe.layers(shape, KEEP, split=True)
        halves = [(False, probe.layers(shape, KEEP, weigh=True, split=True))]
        if probe.last:
            halves.append((True, probe.ends(shape, weigh=True, split=True)))
        for end, half in halves:
            held = half.weight_input_bytes
            yield SplitSeconds(
                end, tokens, input_bytes=max(0, half.backward_bytes), weight_input_bytes=held
            )


def _seconds(probe: Probe, largest: int) -> Iterator[SplitSeconds]:
    for tokens in (SMALL_TOKENS, largest // 2, largest):
        shape = Shape(tokens)
        runs = []
        for _ in range(SPLIT_REPEATS):
            unsplit = probe.layers(shape, KEEP)
            halves = probe.layers(shape, KEEP, split=True)
            runs.append((unsplit.backward_seconds, halves.backward_seconds, halves.weight_seconds))
        yield SplitSeconds(False, tokens, *map(median, zip(*runs, strict=True)))
    if probe.last:
        shape = Shape(largest // 2)
        ends = [probe.ends(shape, split=True) for _ in range(SPLIT_REPEATS)]
        seconds, weight = (
            median(getattr(one, name) for one in ends)
            for name in ("backward_seconds", "weight_seconds")
        )
        yield SplitSeconds(True, shape.tokens, seconds + weight, seconds, weight)
