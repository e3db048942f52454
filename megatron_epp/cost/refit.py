"""A cost model's seconds fitted anew to ops that were trained on, kept only where it foretells
better what the fit has not seen."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_epp.cost.fit import Sample, fit_profile
from megatron_epp.cost.profile import Profile, Seconds
from megatron_epp.ir import BACKWARDS, KEEP, Kind

JUDGES = 4  # every fourth op judges
BETTER = 0.9  # its errors must shrink at least to this share
LEAST = 40  # ops; of fewer nothing is learnt


@dataclass(frozen=True, slots=True)
class Refit:
    """``profile`` foretells held-out ops with a median error of ``after`` instead of ``before``."""

    profile: Profile
    before: float
    after: float


def refit(profile: Profile, samples: Mapping[Kind, Sequence[Sample]]) -> Refit | None:
    """A better profile, or None where there is none. ``samples``: measured seconds of ops."""
    if sum(map(len, samples.values())) < LEAST:
        return None
    seen = {kind: [s for i, s in enumerate(rows) if i % JUDGES] for kind, rows in samples.items()}
    judges = {kind: rows[::JUDGES] for kind, rows in samples.items()}
    learnt = fit_profile(
        profile, profile.provenance, tp=profile.tp, cp=profile.cp, seconds=seen, near=True
    ).profile
    # The fit gives up communication, which its samples contain.
    learnt = dataclasses.replace(profile, **{name: getattr(learnt, name) for name in _LEARNT})
    before, after = _error(profile, judges), _error(learnt, judges)
    if not after <= BETTER * before:
        return None
    return Refit(learnt, before, after)


_LEARNT = ("layer_seconds", "first_seconds", "last_seconds", "recompute_seconds")


def _error(profile: Profile, samples: Mapping[Kind, Sequence[Sample]]) -> float:
    return statistics.median(
        abs(_seconds(profile, kind, row) / row.value - 1)
        for kind, rows in samples.items()
        for row in rows
    )


def _seconds(profile: Profile, kind: Kind, row: Sample) -> float:
    def of(seconds: Seconds) -> float:
        return seconds(row.tokens, row.pairs)

    total = row.layers * of(profile.layer_seconds[kind])
    total += row.first * of(profile.first_seconds[kind])
    total += row.last * of(profile.last_seconds[kind])
    if kind in BACKWARDS:
        again = (letter for letter in row.choice if letter != KEEP)
        total += sum(of(profile.recompute_seconds[letter]) for letter in again)
    return total
