"""What a device holds beside chunks: weights, gradient buckets, the optimizer, communicators."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.cost.analytic import STATES
from megatron_epp.cost.catalogue.devices import GIB, device
from megatron_epp.mcore.job import job_cost
from megatron_epp.mcore.kinds.moe import router
from megatron_epp.mcore.patching import cpu_host
from tests.mcore.runs import trained


def test_states_are_those_that_megatron_holds() -> None:
    """Its own buffers and optimizers, over two replicas, behind a step."""
    from tests.mcore.held_states import WAYS, job

    run = trained([], processes=2, program=("-m", "tests.mcore.held_states"))
    lines = [json.loads(x[5:]) for x in run.output.splitlines() if x.startswith("held ")]
    assert len(lines) == len(WAYS)
    for way, held, expected in lines:
        assert held == pytest.approx(expected, rel=0.01), way
    # What the planners take where nobody says: the first of them.
    assert job_cost.training_states(job(**WAYS[0])) == STATES
    # A weight, and in fp8 its two copies; these alone where weights are held so.
    fp8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", **WAYS[0]}
    beside, alone = (
        job_cost.training_states(job(**fp8, fp8_param_gather=x)) for x in (False, True)
    )
    assert beside.zero1_resident == STATES.zero1_resident + 2 * (1 + 1 / 32)
    assert alone.zero1_resident == STATES.zero1_resident + 2 / 32


def test_a_budget_is_no_more_than_is_there(monkeypatch) -> None:
    """Communicators and others have taken some of the memory; torch's own blocks are ours."""
    named = device("h100-80g").budget_bytes
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * GIB, major=9)
    monkeypatch.setattr(cpu_host, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * GIB)
    for free, budget in ((59 * GIB, named), (40 * GIB, job_cost.UNBROKEN * 60 * GIB)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 * GIB))
        assert job_cost.default_budget_bytes(SimpleNamespace()) == budget


def test_an_iteration_counts_tokens_in_full(monkeypatch) -> None:
    """Megatron's counts go to bf16 with the model, where 256 + 1 is 256."""
    counts = torch.zeros(2).bfloat16()
    one = SimpleNamespace(local_tokens_per_expert=counts, apply_z_loss=None, weight=counts)
    model = SimpleNamespace(decoder=SimpleNamespace(layers=[None]), config=None)
    monkeypatch.setattr(router, "moe_layers", lambda model: [(0, SimpleNamespace(router=one))])
    monkeypatch.setattr(router, "balancing_of", lambda config: None)
    monkeypatch.setattr(router, "RouterStats", lambda *given: given)
    plan = SimpleNamespace(documents=(), chunks=())
    assert router.router_stats_for(model, plan, lambda device: 1.0, ()) is not None
    for _ in range(300):
        one.local_tokens_per_expert += torch.tensor([1, 0])
    assert one.local_tokens_per_expert.tolist() == [300, 0]
    assert one.local_tokens_per_expert is counts  # what a repeated iteration is set back to
