"""Loops of others on real processes, against the plain model; and what a certificate notices."""

import functools
import math
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest

from megatron_epp.certify.command import BOUND, BatchVerdict, verdict
from megatron_epp.certify.degrees import Degrees
from megatron_epp.certify.trial import GPT, LLAMA
from tests.certify.backend import main
from tests.certify.loops.micro_batches import LoopFrame, loop_loss
from tests.certify.trial import ENCODER, CheckedTrial
from tests.mcore.certified import certified, models
from tests.mcore.fault_injection import FAULTS as SHARED
from tests.mcore.fault_injection import inject, names, require_shown
from tests.mcore.models import BALANCED
from tests.mcore.test_trees import FRAME

pytestmark = pytest.mark.everything

FOLDER = Path(__file__).with_name("faults")


def trial(degrees: Degrees, batches: int, llama: str = "", **others) -> CheckedTrial:
    """``llama``: flags that its model has besides."""
    layers = f" --num-layers {2 * degrees.pp}"
    sequence = " --sequence-parallel" if degrees.tp > 1 else ""
    flags = models(f"{LLAMA}{layers}{sequence} {llama}", GPT + layers)
    return CheckedTrial(degrees, flags, batches, timeout=90.0, **others)


WINDOWS = "--window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable"
# Both ranks share a micro-batch's rows, and the experts among them.
EXPERTS = (
    "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 352 --moe-token-dispatcher-type "
    "alltoall --moe-router-load-balancing-type none --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --moe-shared-expert-intermediate-size 704"
)


# Of a micro-batch, its padding too; not of a document, as with --epp.
AUXILIARY = EXPERTS.replace(
    "balancing-type none", "balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
)


def test_loops_compute_what_the_plain_model_computes() -> None:
    asked = trial(Degrees(2, 1, 2), 6, WINDOWS, loop=True, overlap=True, lora_rank=2)
    _, judged = certified(asked)
    assert {batch.coverage.loss for batch in judged} == {"tokens", "mean", "sequence", "sequences"}
    assert sum(batch.coverage.halved for batch in judged) > 0
    assert sum(batch.coverage.cut for batch in judged) > 0
    for batch in judged:
        assert batch.coverage.messages == 2 * batch.coverage.chunks
        assert {"gradient reduction", "call"} <= set(batch.coverage.collectives)
    assert "certified: " in verdict(judged)
    assert "values in the caller's order" in verdict(judged)


@pytest.mark.parametrize(
    ("degrees", "llama", "kind"),
    [(Degrees(1, 2, 1), AUXILIARY, "encoder"), (Degrees(1, 2, 1, cp=2), AUXILIARY, "subclass")],
)
def test_slices_of_models_of_others(degrees, llama, kind) -> None:
    """An encoder that sees whole documents once; rows of a slice over context-parallel ranks, and
    experts among these, balanced over a micro-batch as Megatron balances them."""
    _, judged = certified(trial(degrees, 4, llama, loop=True, loop_model=kind))
    assert sum(batch.coverage.cut for batch in judged) > 0
    shares = [batch.coverage.collectives["outputs of a slice"] > 0 for batch in judged]
    assert all(shares) == (degrees.cp > 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--loop", "--ep", "0"), "--ep 0: expected at least 1"),
        (("--loop", "--batches", "0"), "--batches 0: expected at least 1"),
        (("--loop-model", "encoder"), "--loop-model encoder: of slices; give --loop"),
        (
            ("--loop", "--placement", "interleaved 2"),
            "--placement: slices of loops run one stage a",
        ),
        (("--loop", "--loop-model", "other"), "--loop-model other: expected subclass or encoder"),
        (("--loop", "--device", "cuda"), "--loop: on GPUs in bf16; give --dtype bf16, or no --dev"),
    ],
)
def test_the_command_line(words, says) -> None:
    with pytest.raises(ValueError, match=says):
        main(words)


# ------------------------------------------------------------------ faults

# By table: degrees, what else is asked, and what the batches must have for a fault to show.
TABLES = {
    "slices": (Degrees(1, 1, 1), {}, "cut"),
    "encoder": (Degrees(1, 1, 1), {"loop_model": ENCODER}, "cut"),
    "ranks": (Degrees(1, 1, 1, cp=2), {}, None),
    "trees": (Degrees(1, 1, 1), {"trees": True}, "branches"),
    "shared_experts": (Degrees(1, 1, 1), {"trees": True}, "branches"),
}


def file_of(table: str) -> Path:
    return (SHARED if table == "shared_experts" else FOLDER) / f"{table}.py"


FAULTS = [(table, way) for table in TABLES for way in names(file_of(table))]
# Errors of these faults, (losses, gradients): wrong far beyond the bound, within it, or either.
WRONG, RIGHT, EITHER = (1e6 * BOUND, math.inf), (0.0, BOUND), (0.0, math.inf)
ERRORS = {
    "return in the order run": (WRONG, RIGHT),
    "forget a gradient": (RIGHT, WRONG),
    "scale by chunks": (RIGHT, WRONG),
    "drop returned gradients": (RIGHT, WRONG),
    "lose a slice for the loss": (WRONG, EITHER),
    "gather from the wrong rank": (WRONG, EITHER),  # a mean's gradient is that of any outputs
}


def branches(number: int, seed: int) -> bool:
    """Whether somewhere several parts continue one, in the batch of a loop's turn."""
    from megatron_epp.mcore.loops.adapter import forest_of
    from megatron_epp.mcore.loops.adapters.samples import Samples

    (drawn,) = LoopFrame(FRAME, False).draw(seed, number).micro_batches
    for batch in drawn:
        nodes = forest_of(Samples(loop_loss), batch, 0, 10**6, 1).nodes
        parents = [node.parent for node in nodes if node.parent >= 0]
        if len(set(parents)) < len(parents):
            return True
    return False


@functools.cache
def judged(table: str) -> Mapping[str, BatchVerdict]:
    path, (degrees, others, _) = file_of(table), TABLES[table]
    model = f"{LLAMA} --num-layers 2" + f" {BALANCED}aux_loss" * (table == "shared_experts")
    if "trees" in others:
        half = range(-(-len(names(path)) // 2))  # the same batches in both turns
        others |= {"seed": next(s for s in count() if all(branches(n, s) for n in half))}
    return inject(path, CheckedTrial(degrees, models(model), loop=True, **others))


@pytest.mark.parametrize(("table", "way"), FAULTS)
def test_whatever_is_broken_shows(table, way) -> None:
    batch, needed = judged(table)[way], TABLES[table][2]
    assert needed is None or getattr(batch.coverage, needed) > 0
    if way == "meet in between":
        (problem,) = batch.problems
        assert problem.startswith("not on the list: barrier over default_pg by ")
    elif way in ERRORS:
        assert not batch.problems
        for error, (least, most) in zip(
            (batch.loss_error, batch.gradient_error), ERRORS[way], strict=True
        ):
            assert least <= error <= most, batch
    else:
        require_shown(batch, way)
