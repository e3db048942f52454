"""Refit of a cost model's seconds to ops of training, used only if held-out ops confirm it."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_epp.cost.fitting.fit import FitColumns, Sample, fit_profile
from megatron_epp.cost.profile import Profile, layer_coefficients
from megatron_epp.ir import Kind

HELD_OUT_EVERY = 4  # every fourth op is held out
BETTER = 0.9  # largest ratio of the errors after and before a refit
LEAST = 40  # fewest ops for a refit


@dataclass(frozen=True, slots=True)
class Refit:
    """Profile that reduces the median error on held-out ops from ``before`` to ``after``."""

    profile: Profile
    before: float
    after: float


def refit(profile: Profile, samples: Mapping[Kind, Sequence[Sample]]) -> Refit | None:
    """Return ``profile`` with seconds fitted to ``samples``, and its errors on held-out samples.

    ``samples`` contains measured seconds of ops by kind. The result is None if there
    are fewer than LEAST samples, or if the median error on held-out samples exceeds BETTER times
    that of ``profile``.

    Raises:
        ValueError: a measured time is not a finite number above 0.
    """
    if sum(map(len, samples.values())) < LEAST:
        return None
    seen = {
        kind: [s for i, s in enumerate(rows) if i % HELD_OUT_EVERY]
        for kind, rows in samples.items()
    }
    held_out = {kind: rows[::HELD_OUT_EVERY] for kind, rows in samples.items()}
    learnt = fit_profile(
        profile, profile.provenance, tp=profile.tp, cp=profile.cp, seconds=seen, near=True
    ).profile
    learnt = _with_seconds(profile, learnt)
    before, after = _error(profile, held_out), _error(learnt, held_out)
    if not after <= BETTER * before:
        return None
    return Refit(learnt, before, after)


_OF_LAYERS = ("layer_seconds", "column_seconds", "recompute_seconds")


def _with_seconds(profile: Profile, learnt: Profile) -> Profile:
    """Return ``profile`` with the seconds of ``learnt``.

    Other coefficients, such as communication, are those of ``profile``, because a fit sets
    communication to 0.
    """
    coefficients = {
        kind: dataclasses.replace(
            layer_coefficients(each),
            **{name: getattr(learnt.kinds[kind], name) for name in _OF_LAYERS},
        )
        for kind, each in profile.kinds.items()
    }
    ends = {name: getattr(learnt, name) for name in ("first_seconds", "last_seconds")}
    return dataclasses.replace(profile.with_kinds(coefficients), **ends)


def _error(profile: Profile, samples: Mapping[Kind, Sequence[Sample]]) -> float:
    """Return the median relative error of ``profile`` on ``samples``."""
    errors = []
    for op, rows in samples.items():
        columns = FitColumns.of(profile, op, rows)
        known = columns.coefficients_row(profile)
        for row in rows:
            seconds = sum(a * b for a, b in zip(columns.row(row), known, strict=True))
            errors.append(abs((seconds + columns.again(profile, row)) / row.value - 1))
    return statistics.median(errors)
