"""A certificate whose every batch must pass."""

from megatron_epp.certify.command import BatchVerdict, verdict
from megatron_epp.certify.trial import Trial
from tests.certify.backend import certify_checked


def models(*lines: str) -> tuple[tuple[str, ...], ...]:
    """Flags of models as a trial has them."""
    return tuple(tuple(line.split()) for line in lines)


def certified(trial: Trial, *covered: str) -> tuple[list[str], list[BatchVerdict]]:
    """Lines that ``trial`` prints, and its batches: all that it asks for, each of which passed.

    covered: counts of their coverage that must not all be 0
    """
    lines: list[str] = []
    judged = certify_checked(trial, lines.append)
    said = "\n".join([*lines, verdict(judged)])
    assert len(judged) == trial.batches, said
    assert all(batch.passed for batch in judged), said
    for name in covered:
        assert any(getattr(batch.coverage, name) for batch in judged), name
    return lines, judged
