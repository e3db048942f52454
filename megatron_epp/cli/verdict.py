"""Verdict of ``compare`` and ``tune``: use ``--epp``, do not use it, or either."""

# Smaller differences do not matter: no cost model is accurate enough for them.
PAYS = 0.01


def verdict(epp: float | None, stock: float | None, which: str, why: str) -> str:
    """Return one sentence that compares ``--epp`` with stock.

    Args:
        epp: seconds of an iteration with ``--epp``; None if no plan fits the memory budget.
        stock: seconds of the fastest of Megatron's own schedules; None if none fits.
        which: description of this schedule.
        why: reason why stock is faster; used only if ``epp`` exceeds ``stock`` by more than 1%.
    """
    if epp is None and stock is None:
        return "Verdict: neither --epp nor a schedule of Megatron's own fits the memory budget."
    if stock is None:
        return "Verdict: use --epp; none of Megatron's own schedules fits the memory budget."
    if epp is None:
        return f"Verdict: leave --epp out; stock ({which}) fits the memory budget, no plan does."
    if stock > epp * (1 + PAYS):
        return f"Verdict: use --epp, {stock / epp - 1:.1%} faster than stock ({which})."
    if epp > stock * (1 + PAYS):
        slower = f"{epp / stock - 1:.1%} slower than stock ({which})"
        return f"Verdict: leave --epp out, {slower}: {why}."
    return f"Verdict: either; --epp and stock ({which}) are within {PAYS:.0%} of each other."


def why_stock(overlap: str, stages: int) -> str:
    """Return the reason why stock is faster: hidden communication, no pipeline, or its schedule.

    Args:
        overlap: description of the communication that stock hides; "" if none.
        stages: number of stages of the fastest layout.
    """
    if overlap:
        return "--epp hides less communication"
    return "no pipeline is needed" if stages == 1 else "its schedule suits these batches better"
