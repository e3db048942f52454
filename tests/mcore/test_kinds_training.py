"""Trained with layers of several kinds: each is measured alone, and what plans predict is so."""

import re

import pytest

from megatron_epp.cost.profile import Profile
from megatron_epp.ir import KEEP, Kind, Step
from tests.mcore.runs import PROGRAM, Run, flags, trained

pytestmark = pytest.mark.everything

HYBRID_PROGRAM = ("-m", "megatron_epp.pretrain_hybrid")

LENGTHS = [900, 40, 700, 60, 300, 20, 1000, 512, 33, 90, 17, 250, 600, 5, 121, 800, 64, 450]
COMMON = {
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "train_iters": 3,
    "epp_cost_model": None,
    "epp": True,
    "epp_effort": 1,
}
DENSE_FIRST = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": "[0]*1+[1]*3",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
LATENTS = {
    **DENSE_FIRST,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "epp_mla_keeps": "latents",
    "group_query_attention": None,
    "num_query_groups": None,
}
HYBRID = {
    **DENSE_FIRST,
    "moe_layer_freq": None,
    "hybrid_layer_pattern": "*-*E|*-*-",
}
ALTERNATE = {
    **DENSE_FIRST,
    "window_size": "100,0",
    "window_attn_skip_freq": 2,
    "softmax_type": "learnable",
    "group_query_attention": None,  # a key head for every query head
    "num_query_groups": None,
    "epp_row_multiple": 16,  # as on a GPU
}
BUDGET_GIB = 0.006  # a third of what packing takes without recompute
_PEAKS = re.compile(r"([0-9.]+) of ([0-9.]+)")


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        # Slow: test_profile.py measures kinds like these; peaks are predicted for the hybrid's.
        pytest.param(
            ALTERNATE,
            "window-dense full-experts window-experts full-experts",
            marks=pytest.mark.slow,
        ),
        pytest.param(LATENTS, "dense 3*experts", marks=pytest.mark.slow),
        (HYBRID, "attention mlp attention experts 2*(attention mlp)"),
    ],
    ids=[
        "alternate windows, experts behind a dense first layer",
        "latents and a dense first layer",
        "attention, MLP and experts alone",
    ],
)
def test_memory_is_what_was_predicted(corpus, tmp_path, model, kinds) -> None:
    folder, within = tmp_path / "record", {"epp_memory_budget_gib": BUDGET_GIB}
    words = flags(corpus, epp_record=folder, **within, **COMMON, **model)
    run = trained(words, program=HYBRID_PROGRAM if model is HYBRID else PROGRAM)
    measured = Profile.load(str(folder / "epp-cost-model.json"))
    assert list(measured.kinds) == list(dict.fromkeys(re.findall("[a-z-]+", kinds)))
    saved = {
        kind.removeprefix("window-").removeprefix("full-"): each.saved_bytes[KEEP].per_token
        for kind, each in measured.kinds.items()
    }
    assert len(set(saved.values())) == len(saved) > 1  # a window alone keeps no fewer
    if model is HYBRID:
        of = measured.kinds
        assert [of[kind].kv_bytes_per_token > 0 for kind in of] == [True, False, False]
        assert of["mlp"].layer_seconds[Kind.FORWARD].per_pair == 0
        assert of["attention"].layer_seconds[Kind.FORWARD].per_pair > 0
        assert of["mlp"].saved_bytes["n"] != of["mlp"].saved_bytes[KEEP]
        assert of["attention"].saved_bytes["m"] == of["attention"].saved_bytes[KEEP]
    steps = [Step.parse(path.read_text()) for path in sorted(folder.glob("*.step"))]
    assert len(steps) == 3
    starts = [span.start for step in steps for c in step.plans[0].chunks for span in c.spans]
    cut = any(starts)
    rows = model.get("epp_row_multiple", 1)
    assert all(start % rows == 0 for start in starts)
    assert rows > 1 or any(start % 16 for start in starts)
    recomputed = any(
        set(text) - {KEEP} for step in steps for stage in step.plans[0].recompute for text in stage
    )
    assert cut and recomputed
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
