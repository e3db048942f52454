"""Deferred weight gradients inside Megatron: its linears, its gradient reduction, its trainer."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import nn
from torch.nn import Parameter

from megatron_epp.ir import BACKWARDS, Kind, Op, Plan, Step, check, parse_records
from megatron_epp.mcore.model.split_backward import Deferral, kept_in_input, report_kept
from tests.mcore.resumes import require_equal, tensors
from tests.mcore.runs import flags, trained, write_corpus


def megatron_linear(fused: bool = False) -> ColumnParallelLinear:
    """One without the groups and buffers that its constructor asks for."""
    module = ColumnParallelLinear.__new__(ColumnParallelLinear)
    nn.Module.__init__(module)
    module.weight = Parameter(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    module.gradient_accumulation_fusion = fused
    module.tp_group = None
    return module


class GroupedLinear(nn.Linear):
    __module__ = "transformer_engine.pytorch.module.grouped_linear"


def test_linears_that_cannot_defer_are_named():
    model = nn.Sequential(megatron_linear(), megatron_linear(fused=True), GroupedLinear(4, 4))
    assert kept_in_input(model) == ["ColumnParallelLinear", "GroupedLinear"]
    assert kept_in_input(model[:1]) == []
    assert Deferral(model).linears == [model[0]]


def test_the_start_names_what_stays_in_i_on_any_rank(caplog, monkeypatch):
    def gather(every, own, group):
        every[:] = [own, ["TEGroupedLinear"]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    told = "split backward: I computes the weight gradients of GroupedLinear, TEGroupedLinear"
    for rank, lines in ((0, [told]), (1, [])):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        caplog.clear()
        with caplog.at_level("INFO"):
            report_kept([nn.Sequential(GroupedLinear(2, 2))], group)
        assert caplog.messages == lines


# ------------------------------------------------------------------ inside the trainer


def split(order: tuple[Op, ...], merged: int | None) -> tuple[Op, ...]:
    """Every B as an I, its W behind everything; but for the B of chunk ``merged``, which is last.

    The Ws come in the order of the Is, so that every weight's gradients add up as before.
    """
    weights = tuple(
        Op(Kind.WEIGHT, op.chunk) for op in order if op.kind in BACKWARDS and op.chunk != merged
    )
    halves = tuple(
        Op(Kind.INPUT, op.chunk) if op.kind in BACKWARDS and op.chunk != merged else op
        for op in order
    )
    if merged is None:
        return halves + weights
    assert halves[-1] == Op(Kind.BACKWARD, merged)
    return (*halves[:-1], *weights, halves[-1])


TOKENS, LAYERS, FFN = 120, 4, 64
# Per token and layer: inputs of the four linears, gradients of their outputs. Hidden size and
# queries 32, keys and values 16 each, float32.
WEIGHT_INPUT_BYTES = 4 * ((32 + 32 + 32 + FFN) + (32 + 2 * 16 + 32 + 2 * FFN + 32))

PLANS = """
plan v1
replica {replica} of 2
documents 40 40 40
layers 4
chunk 0: 0[0:25]
chunk 1: 0[25:40] 1[0:40]
chunk 2: 2[0:40]
recompute 0: 4k 1f2k1f 4f
stage 0: F2 F0 F1 B1 B2 B0
"""


@pytest.mark.everything
def test_replicas_whose_plans_end_with_w_and_with_b_reduce_in_step(tmp_path):
    """Overlapped reduction, a bucket per parameter, biases, tied embeddings on one stage: the
    same weights to the last bit after three iterations, however the backward is split."""
    corpus = write_corpus(tmp_path / "documents", [41] * 20)
    plans = tuple(Plan.parse(PLANS.format(replica=replica)) for replica in range(2))
    ends = (None, 0)
    halved = tuple(
        replace(plan, orders=tuple(map(partial(split, merged=end), plan.orders)))
        for plan, end in zip(plans, ends, strict=True)
    )
    saved = []
    for name, chosen in (("whole", plans), ("halves", halved)):
        for plan in chosen:
            check(plan)
        path = tmp_path / f"{name}.step"
        path.write_text(str(Step(((0, 1, 2), (3, 4, 5)), chosen)))
        words = flags(
            corpus,
            pipeline_model_parallel_size=1,
            overlap_grad_reduce=True,
            ddp_bucket_size=1,
            ffn_hidden_size=FFN,
            epp=True,
            epp_record=tmp_path / f"{name} records",
            epp_plan=path,
            save=tmp_path / name,
            save_interval=3,
        )
        unwanted = ("--disable-bias-linear", "--untie-embeddings-and-output-weights")
        words = [word for word in words if word not in unwanted]
        run = trained(words)
        assert len(run.losses) == 3
        folder: Path = tmp_path / name / "iter_0000003"
        saved.append(tensors(folder, tmp_path / f"{name}.pt"))
    # All of replica 0's activations are gone when its first W begins.
    records = (tmp_path / "halves records" / "iteration-000002.replica-0.timed").read_text()
    first = next(record for record in parse_records(records) if record.op.kind is Kind.WEIGHT)
    assert first.peak_bytes == TOKENS * LAYERS * WEIGHT_INPUT_BYTES
    require_equal(*saved, at_least=21)
