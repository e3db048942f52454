"""Trained with layers of several kinds: each is measured alone, and what plans predict is so."""

import re

import pytest

from megatron_epp.cost.profile import Profile
from megatron_epp.ir import KEEP, Kind, Step
from tests.mcore.runs import Run, flags, trained

pytestmark = pytest.mark.everything

HYBRID_PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")

LENGTHS = [900, 40, 700, 60, 300, 20, 1000, 512, 33, 90, 17, 250, 600, 5, 121, 800, 64, 450]
HYBRID = {
    "hybrid_layer_pattern": "*-*E|*-*-",
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "train_iters": 3,
    "epp_cost_model": None,
    "epp": True,
    "epp_effort": 1,
    "epp_memory_budget_gib": 0.006,  # a third of what packing takes without recompute
}
_PEAKS = re.compile(r"([0-9.]+) of ([0-9.]+)")


def test_memory_is_what_was_predicted(corpus, tmp_path) -> None:
    folder = tmp_path / "record"
    run = trained(flags(corpus, epp_record=folder, **HYBRID), program=HYBRID_PROGRAM)
    of = Profile.load(str(folder / "epp-cost-model.json")).kinds
    assert list(of) == ["attention", "mlp", "experts"]
    saved = {each.saved_bytes[KEEP].per_token for each in of.values()}
    assert len(saved) == len(of)
    assert [of[kind].kv_bytes_per_token > 0 for kind in of] == [True, False, False]
    assert of["mlp"].layer_seconds[Kind.FORWARD].per_pair == 0
    assert of["attention"].layer_seconds[Kind.FORWARD].per_pair > 0
    assert of["mlp"].saved_bytes["n"] != of["mlp"].saved_bytes[KEEP]
    assert of["attention"].saved_bytes["m"] == of["attention"].saved_bytes[KEEP]
    steps = [Step.parse(path.read_text()) for path in sorted(folder.glob("*.step"))]
    assert len(steps) == 3
    starts = [span.start for step in steps for c in step.plans[0].chunks for span in c.spans]
    recomputed = any(
        set(text) - {KEEP} for step in steps for stage in step.plans[0].recompute for text in stage
    )
    assert any(starts) and recomputed
    for held, predicted in peaks(run):
        # Both are printed to a tenth of a MiB.
        assert held == pytest.approx(predicted, abs=0.03 * predicted + 0.1), run.output


def peaks(run: Run) -> list[tuple[float, float]]:
    """(measured, predicted) MiB of every stage in every iteration."""
    lines = re.findall(r"epp iteration \d+: .*", run.output)
    found = [
        tuple(map(float, pair))
        for line in lines
        for pair in _PEAKS.findall(line.split("| peak ")[1].split(" MiB")[0])
    ]
    assert len(found) == 6, run.output
    return found
