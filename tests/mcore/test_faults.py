"""A certificate that cannot fail is none: every fault shows, and what is untouched passes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from math import inf

import pytest

from megatron_epp.certify.batches import (
    Frame,
    RandomBatch,
    StepCoverage,
    modes_drawn,
    most_offloaded,
)
from megatron_epp.certify.command import BOUND, BatchVerdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import LLAMA, Trial
from megatron_epp.ir import slices_of
from megatron_epp.layers.recompute.wrap import EXECUTABLE, OF_EXPERTS, OF_MLA
from megatron_epp.mcore.kinds.window.certificate import WINDOW
from tests.certify.backend import certify_checked
from tests.certify.trial import CheckedTrial
from tests.mcore import test_lockstep, test_trees, test_vocabulary_parallel
from tests.mcore.certified import models
from tests.mcore.fault_injection import FAULTS, names
from tests.mcore.models import (
    DSA,
    HYBRID_MOE,
    MTP,
    PATTERN,
    QWEN3,
    SSM,
    V3,
    WINDOWS,
)

pytestmark = pytest.mark.everything

# ------------------------------------------------------------------ batches in which faults show


def cut(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document of the batch is cut."""
    (plan,) = drawn.step.plans
    return max(slices_of(plan).later) >= 0


def cut_beside_others(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document is cut, and a chunk has several."""
    (plan,) = drawn.step.plans
    return cut(fault, drawn) and any(len(chunk.spans) > 1 for chunk in plan.chunks)


def cut_and_up_projected_again(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document is cut, and a chunk recomputes an up-projection."""
    (plan,) = drawn.step.plans
    return cut(fault, drawn) and any(OF_MLA in letters for letters in plan.recompute[0])


def between_two_others(fault: str, drawn: RandomBatch) -> bool:
    """Whether a slice shorter than the window lies between two others."""
    (plan,) = drawn.step.plans
    slices = slices_of(plan)
    return fault == "nothing" or any(
        slices.later[chunk] >= 0 and span.start > 0 and span.tokens < WINDOW
        for chunk in range(len(plan.chunks))
        for span in plan.chunks[chunk].spans
        if span.document == slices.document[chunk]
    )


def counts(drawn: RandomBatch, span) -> bool:
    """Whether ``span`` has targets."""
    document = drawn.step.assignments[0][span.document]
    return bool(drawn.loss_masks[document][span.start : span.stop].any())


def state_is_carried(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document is cut; where a call or a document begins wrongly, also after another in a
    chunk, with targets."""
    (plan,) = drawn.step.plans
    after = [span for chunk in plan.chunks for span in chunk.spans[1:] if counts(drawn, span)]
    if fault == "begin in the middle of a call":
        return any(span.start > 0 for span in after)
    return bool(after) if fault == "run over documents" else cut(fault, drawn)


def targets_before_others(fault: str, drawn: RandomBatch) -> bool:
    """Whether a slice with targets has others after it."""
    (plan,) = drawn.step.plans
    return any(
        span.stop < plan.documents[span.document] and counts(drawn, span)
        for chunk, later in zip(plan.chunks, slices_of(plan).later, strict=True)
        if later >= 0
        for span in chunk.spans
    )


def of_the_executor(fault: str, drawn: RandomBatch) -> bool:
    """Whether a document is cut; to append again, an earlier slice of it is recomputed; to lose a
    border's label, the label of such a slice's last row counts; in the host's memory, two layers
    that are worth it lie there at a time."""
    (plan,), (deal,) = drawn.step.plans, drawn.step.assignments
    cut, later = slices_of(plan).document, slices_of(plan).later
    earlier = [chunk for chunk in range(len(plan.chunks)) if later[chunk] >= 0]
    if "layer" in fault or "host" in fault:
        return most_offloaded(plan, 0, lambda chunk: chunk.tokens > 1) > 1
    if fault == "append again":
        return any("f" in plan.recompute[0][chunk] for chunk in earlier)
    if fault == "lose border labels":
        return any(
            span.document == cut[chunk] and drawn.loss_masks[deal[span.document]][span.stop - 1]
            for chunk in earlier
            for span in plan.chunks[chunk].spans
        )
    return fault.startswith("nothing") or bool(earlier)


def local_beside_spread(fault: str, drawn: RandomBatch) -> bool:
    """Whether a rank has two local documents of a chunk beside what is spread, and the other has
    some, too."""
    (plan,) = drawn.step.plans
    if "nothing" in fault:
        return ("local" in fault) <= (StepCoverage.of(drawn).mixed > 0)
    for chunk in plan.chunks:
        ranks = [span.rank for span in chunk.spans if span.local]
        if chunk.sharded_tokens and set(ranks) == {0, 1} and len(ranks) > 2:
            return True
    return False


# ------------------------------------------------------------------ jobs


@dataclass(frozen=True)
class Injection:
    """A job whose batches have the faults of a table, one each.

    frame: what its batches are drawn by; shows: whether a fault must show in a batch; seed: one
    with which each does in one of its batches, as long as these are drawn as they were; rounds:
    batches of each fault to choose from. Without a frame any seed will do.
    """

    job: Trial
    frame: Frame | None = None
    shows: Callable[[str, RandomBatch], bool] = cut
    seed: int = 0
    rounds: int = 1

    def numbers(self, faults: tuple[str, ...], seed: int) -> dict[str, int]:
        """Return by fault the number of the first of its batches in which it must show."""
        if self.frame is None:
            return {fault: number for number, fault in enumerate(faults)}
        found: dict[str, int] = {}
        for number, fault in enumerate(faults * self.rounds):
            if fault not in found and self.shows(fault, self.frame.draw(seed, number)):
                found[fault] = number
            elif fault not in found and number >= len(faults) * (self.rounds - 1):
                break
        return found


def alone(
    model: str,
    shows: Callable[[str, RandomBatch], bool],
    layers: int = 2,
    modes: str = EXECUTABLE,
    **others: int,
) -> Injection:
    """Return an injection in one process."""
    frame = Frame(61, (layers,), replicas=1, modes=modes_drawn(modes))
    return Injection(Trial(Degrees(1, 1, 1), models(model)), frame, shows, **others)


INJECTIONS = {
    "executor": alone(f"{LLAMA} --num-layers 2", of_the_executor, seed=6, rounds=2),
    "mla": alone(
        f"{V3} --num-layers 2",
        cut_and_up_projected_again,
        modes=EXECUTABLE + OF_MLA,
        seed=636,
    ),
    "dsa": alone(
        f"{V3} {DSA} --num-layers 2", cut_beside_others, modes=EXECUTABLE + OF_MLA, seed=40
    ),
    "ssm": alone(f"{SSM}{PATTERN}MM-M", state_is_carried, layers=4, seed=6),
    # Without the bias that moves with every batch, those with faults, too.
    "hybrid": alone(
        f"{LLAMA} {HYBRID_MOE} {PATTERN}*-*E*-".replace("--moe-router-enable-expert-bias ", ""),
        cut,
        layers=6,
        modes=EXECUTABLE + OF_EXPERTS,
    ),
    "window": alone(f"{LLAMA} --num-layers 2 {WINDOWS}", between_two_others, seed=6),
    "mtp": alone(
        f"{LLAMA} --num-layers 2 {MTP} --mtp-use-repeated-layer", targets_before_others, layers=4
    ),
    "trees": Injection(
        CheckedTrial(Degrees(1, 1, 1), models(f"{LLAMA} --num-layers 2"), trees=True),
        test_trees.FRAME,
        test_trees.shows,
    ),
    "shared_experts": Injection(
        test_trees.experts(Degrees(1, 1, 2), "seq_aux_loss", ep=2),
        replace(test_trees.FRAME, replicas=2, lockstep=2),
        test_trees.shows,
    ),
    # Two replicas reduce their gradients in buckets while ops run: a G, a B or a W may be the last.
    "vocabulary": Injection(
        Trial(Degrees(pp=2, tp=1, dp=2), test_vocabulary_parallel.model(), overlap=True)
    ),
    # Two ranks share rows and experts: rows are padded, counts and rows are exchanged.
    "moe": Injection(
        Trial(
            Degrees(1, 1, 1, cp=2),
            models(
                f"{QWEN3} --expert-model-parallel-size 2 --moe-router-score-function sigmoid "
                "--moe-token-dispatcher-type allgather --moe-router-enable-expert-bias "
                "--num-layers 2"
            ),
        ),
        seed=1,
    ),
    "lockstep": Injection(
        Trial(Degrees(pp=1, tp=1, dp=4), test_lockstep.spread(test_lockstep.SHORT, 4)),
        test_lockstep.FRAME,
        test_lockstep.shows,
        seed=4,
    ),
    # Two stages of two ranks each, which share the only key head; gradients in buckets.
    "single_rank": Injection(
        Trial(
            Degrees(2, 1, 1, cp=2),
            models(f"{LLAMA} --num-layers 4 --num-attention-heads 8 --num-query-groups 1"),
            overlap=True,
        ),
        Frame(61, (2, 2), 1, modes_drawn(EXECUTABLE), ranks=2),
        local_beside_spread,
        seed=1596,
    ),
}


@cache
def judged(table: str) -> tuple[list[str], Mapping[str, BatchVerdict]]:
    """Return the lines of a table's certificate, and its batches by fault."""
    of, path = INJECTIONS[table], FAULTS / f"{table}.py"
    faults, lines = names(path), []
    seed, numbers = next(
        (seed, found)
        for seed in (of.seed, *range(10_000))
        if len(found := of.numbers(faults, seed)) == len(faults)
    )
    job = replace(of.job, seed=seed, batches=max(numbers.values()) + 1, interfere=path)
    every = certify_checked(job, lines.append)
    assert len(every) == job.batches, every[-1]
    for number in numbers.values() if table == "executor" else ():
        counted = StepCoverage.of(of.frame.draw(seed, number))  # the batches that were looked at
        for one in fields(counted):
            assert getattr(every[number].coverage, one.name) == getattr(counted, one.name)
    return lines, {fault: every[number] for fault, number in numbers.items()}


# ------------------------------------------------------------------ what must show

RIGHT, WRONG, ANY = (0.0, BOUND), (1e6 * BOUND, inf), (0.0, inf)
MORE_TOKENS = r"counted other tokens: (\d+) in all where the reference model has (\d+)"


@dataclass(frozen=True)
class Sign:
    """What a fault shows: least and most errors, an expression of every problem, their number.

    or_refused: whether a problem may show instead; more, fewer: whether routers count other tokens
    """

    gradient: tuple[float, float] = WRONG
    loss: tuple[float, float] = ANY
    problem: str = ""
    problems: int = 0
    or_refused: bool = False
    parameter: str = ""
    more: bool = False
    fewer: bool = False


def refused(problem: str, gradient: tuple[float, float] = ANY, problems: int = 1) -> Sign:
    return Sign(gradient, problem=problem, problems=problems)


STAYS = r"bytes were offloaded; the plan lays aside ([2-9]|\d\d+) layers at a time"
COUNTED = Sign(ANY, more=True)
OF_ROUTERS = Sign(loss=RIGHT)
# By fault; of others gradients are far beyond the bound, and there is no other complaint.
SIGNS = {
    "drop returned gradients": Sign(loss=RIGHT),
    "lose border labels": Sign(loss=(inf, inf)),  # a lost token
    "append again": refused("rank 0: "),
    "forget to free": refused("K/V buffers outlive the iteration"),
    "leave layers where they are": refused(f": 0 {STAYS}", RIGHT),
    "lay one layer aside at a time": refused(rf": [1-9]\d* {STAYS}", RIGHT),
    "meet in between": refused("^not on the list: barrier over default_pg by ", RIGHT),
    "keep one index for all runs": Sign(or_refused=True),  # by the store, of what it is handed
    "forget the words before": Sign(loss=WRONG),
    "mistake the first word": Sign(loss=WRONG),
    "take own sums for all": Sign(loss=RIGHT, parameter="^output_layer.weight$"),
    "count masked rows in g": Sign(loss=RIGHT, parameter="^output_layer.weight$"),
    # Which experts tokens choose is another matter once the bias is off.
    "count padding": COUNTED,
    "count again": COUNTED,
    "count empty chunks": COUNTED,
    "mix documents": OF_ROUTERS,
    "sum too early": OF_ROUTERS,
    "moe: forget the state": OF_ROUTERS,  # that of SSM layers has its name
    "count for a wrong sample": OF_ROUTERS,
    "count shared rows once": Sign(loss=RIGHT, fewer=True),
    "move the bias twice": Sign(loss=RIGHT, parameter="expert_bias"),
    "deal wrongly": Sign(loss=WRONG),
    # By all ranks alike, so that nobody waits in an exchange: within a few seconds, not at the
    # timeout of the groups. Of the ways to break a block see tests/ir/test_lockstep.py.
    "skip empty chunks": refused("PlanError.*expected the same ops in the same order", problems=4),
}


@pytest.mark.parametrize(
    ("table", "fault"),
    [(table, fault) for table in INJECTIONS for fault in names(FAULTS / f"{table}.py")],
)
def test_a_fault_shows_and_nothing_else_does(table: str, fault: str) -> None:
    batch = judged(table)[1][fault]
    assert batch.passed == ("nothing" in fault), batch
    if batch.passed:
        return
    sign = SIGNS.get(f"{table}: {fault}") or SIGNS.get(fault, Sign())
    if sign.or_refused and batch.problems:
        return
    assert len(batch.problems) == sign.problems, batch
    assert all(re.search(sign.problem, problem, re.S) for problem in batch.problems), batch
    assert sign.gradient[0] <= batch.gradient_error <= sign.gradient[1], batch
    assert sign.loss[0] <= batch.loss_error <= sign.loss[1], batch
    assert re.search(sign.parameter, batch.parameter), batch
    totals = [re.search(MORE_TOKENS, line) for line in batch.routing]
    changes = {int(found[1]) - int(found[2]) for found in totals if found}
    assert max(changes, default=0) > 0 or not sign.more, batch
    assert min(changes, default=0) < 0 or not sign.fewer, batch


def test_losses_of_routers_in_the_log_are_compared() -> None:
    """Of other documents' lengths both are other averages; the bias is compared apart from them."""
    _, batches = judged("moe")
    lines = batches["mix documents"].routing
    assert any(line.startswith("load_balancing_loss of layer ") for line in lines)
    assert any(line.startswith("z_loss of layer ") for line in lines)
    assert not batches["move the bias twice"].routing


# ------------------------------------------------------------------ what is untouched


def untouched(table: str) -> list[BatchVerdict]:
    return [batch for fault, batch in judged(table)[1].items() if "nothing" in fault]


def test_the_output_layer_over_the_stages_of_replicas() -> None:
    test_vocabulary_parallel.require_proved(untouched("vocabulary"), Degrees(pp=2, tp=1, dp=2))


def test_experts_over_four_replicas() -> None:
    lines, _ = judged("lockstep")
    assert "4 replicas in lockstep" in lines[0]
    test_lockstep.require_proved(lines, untouched("lockstep"))


def test_stages_of_context_parallel_ranks() -> None:
    lines, batches = judged("single_rank")
    assert lines[0].startswith("PP 2, TP 1, DP 1, CP 2: layers 2 2")
    assert sum(b.coverage.split + b.coverage.hybrid for b in untouched("single_rank")) > 0
    assert batches["nothing"].coverage.local == batches["nothing spread"].coverage.local == 0
    for fault in ("nothing local", "nothing local again"):
        assert batches[fault].coverage.local > 0 and batches[fault].coverage.mixed > 0
    for batch in untouched("single_rank"):
        assert batch.coverage.messages == 2 * 2 * batch.coverage.chunks
        assert batch.coverage.collectives["rows for heads"] > 0
