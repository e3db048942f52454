"""Whether a job cuts its output layer over the stages: planned both ways, the faster is taken."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_epp.cost.analytic import is_of_cpu
from megatron_epp.cost.cost import Cost
from megatron_epp.planner.options import Options
from megatron_epp.planner.tuning.partitions import heaviest, sketched_seconds

# Vocabulary parallelism must save so much of the time: no model of costs is that exact.
PAYS = 0.01


@dataclass(frozen=True, slots=True)
class VocabularyChoice:
    """``cost`` is the chosen one. Seconds of plans for all batches, with the output layer on the
    last stage (``whole``) and cut over all; None where some batch does not fit, or cutting is ruled
    out."""

    cost: Cost
    whole_seconds: float | None
    cut_seconds: float | None

    @property
    def said(self) -> str:
        """Text on what it was chosen by."""
        if self.whole_seconds is None or self.cut_seconds is None:
            which = "with" if self.cut_seconds is None else "without"
            return f"{which} it some batch fits no plan"
        return f"it takes {abs(self.gain):.1%} {'less' if self.gain >= 0 else 'more'} time"

    @property
    def gain(self) -> float:
        """The share of the time that cutting saves; below 0 where it costs."""
        if self.whole_seconds is None or self.cut_seconds is None:
            return 0.0
        return 1 - self.cut_seconds / self.whole_seconds


def ruled_out(cost: Cost) -> str | None:
    """Why nobody need plan with the output layer over the stages; None: it may pay."""
    if cost.layout.stages == 1:
        return "there is one stage"
    if cost.layout.ep > cost.layout.tp * cost.layout.cp:
        return "experts are spread over replicas"
    if is_of_cpu(cost.layout.profile):
        # scripts/bench/results/2026-11-22-cpu-vocab.md: 24% less time was promised.
        return "on a CPU it took 1.16 of the time (measured)"
    return None


def vocabulary_of(
    cost: Cost,
    batches: Sequence[Sequence[int]],
    options: Options,
    planner: str,
    cut: Cost | None = None,
) -> VocabularyChoice:
    """``cost`` with the output layer where plans by ``planner`` take least over whole ``batches``
    of the job, by at least ``PAYS``; of a batch the replica with most work counts.

    ``cut``: with vocabulary parallelism, where its stages have other layers than those of ``cost``.
    A pure function of what it is given.
    """
    whole = cost.with_vocabulary(False)
    if ruled_out(cost) is not None:
        return VocabularyChoice(whole, None, None)
    cut = (cut or cost).with_vocabulary(True)
    held = [heaviest(lengths, whole) for lengths in batches]
    closed = dataclasses.replace(options, levers=options.levers - {"uneven"})
    without, having = (sketched_seconds(each, held, closed, planner) for each in (whole, cut))
    pays = having is not None and (without is None or having <= without * (1 - PAYS))
    return VocabularyChoice(cut if pays else whole, without, having)
