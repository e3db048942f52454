"""The measured profile: what it is refused for, what it measures, and the command that makes it."""

import dataclasses
from types import SimpleNamespace

import pytest

from megatron_epp.cli import layout, options
from megatron_epp.cli.flags import MachineFlags, PlansMachineFlags, TunedMachineFlags
from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.catalogue.devices import BUDGET_HELP, DEVICES, GIB
from megatron_epp.cost.catalogue.models import Model
from megatron_epp.cost.kinds.layer import LayerShape
from megatron_epp.cost.layout import StageLayout
from megatron_epp.cost.profile import LAYER_KIND, Profile, Provenance
from megatron_epp.ir import FULL, KEEP, Kind
from megatron_epp.mcore.calibrate.measure import CPU_FLOPS, REPEATS, grid
from megatron_epp.mcore.calibrate.probe import Shape
from megatron_epp.mcore.calibrate.profile_file import provenance_of, require
from megatron_epp.mcore.certify.model_flags import parsed
from megatron_epp.mcore.flags.config import Config
from megatron_epp.mcore.job import job_cost
from megatron_epp.mcore.kinds.registry import LAYER_KINDS
from megatron_epp.mcore.lm_head import fused_head
from megatron_epp.mcore.model.shape import model_shape
from megatron_epp.mcore.trainer.profile_command import _without_layout, main
from tests.mcore.models import megatron_args as args
from tests.mcore.runs import MODEL

HIDDEN, FFN, GROUPS, HEAD = 32, 128, 2, 8  # of megatron_args


def measured(provenance: Provenance) -> Profile:
    model = Model("m", 2, HIDDEN, FFN, 4, GROUPS, HEAD, 128, gated=True)
    made = analytic_profile(model, DEVICES["cpu"])
    return dataclasses.replace(made, provenance=provenance)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 64},
        {"num_query_groups": 4},
        {"swiglu": False},
        {"padded_vocab_size": 256},
        {"tensor_model_parallel_size": 2},
        {"overlap_grad_reduce": True, "align_grad_reduce": False},  # logits are kept
        {"num_experts": 4},
        {"window_size": (64, 0)},
        {"window_size": (64, 0), "window_attn_skip_freq": 2},
        {"hybrid_layer_pattern": "*-"},
        {"hybrid_layer_pattern": "--"},
    ],
)
def test_another_models_profile_is_refused(changes) -> None:
    mine, theirs = provenance_of(args()), provenance_of(args(**changes))
    assert require(measured(mine), mine, "a.json").provenance == mine
    with pytest.raises(ValueError, match=r"cost model a\.json is of another model: it says"):
        require(measured(theirs), mine, "a.json")


def test_another_device_or_format_is_refused() -> None:
    mine = provenance_of(args())
    other = dataclasses.replace(mine, device="cpu: an abacus, 1 threads a rank")
    with pytest.raises(ValueError, match="another device: it says 'cpu: an abacus"):
        require(measured(other), mine, "a.json")
    with pytest.raises(ValueError, match="another dtype"):
        require(measured(provenance_of(args(params_dtype="torch.bfloat16"))), mine, "a.json")


def test_the_early_heads_blocks_are_of_every_context_ranks_rows(monkeypatch) -> None:
    """A rank takes its rows block by block: over two context ranks that is a block of each."""
    monkeypatch.setattr(job_cost, "fused_head", lambda args: True)
    blocks = [
        job_cost.analytic(args(context_parallel_size=cp)).last_workspace_tokens for cp in (1, 2, 4)
    ]
    assert blocks == [cp * fused_head.CPU_BLOCK_TOKENS for cp in (1, 2, 4)]


def test_without_groups_every_query_head_has_a_key_head() -> None:
    """Megatron's --num-query-groups is 1 then, and means nothing."""
    words = MODEL.replace("--group-query-attention", "").replace("--num-query-groups 2", "")
    sizes = ["--seq-length", "64", "--max-position-embeddings", "64", "--epp"]
    args = parsed([*words.split(), *sizes], 1)
    changes = {"padded_vocab_size": 128, "kv_channels": 8, "ffn_hidden_size": 128}
    vars(args).update(changes, params_dtype="torch.float32")
    assert args.num_query_groups == 1
    model = model_shape(args)
    assert (model.heads, model.kv_heads) == (4, 4)
    assert "in 4 groups" in provenance_of(args).model


def test_every_pipeline_rank_may_have_its_own_budget() -> None:
    words = [*MODEL.split(), "--seq-length", "64", "--max-position-embeddings", "64"]
    words += ["--epp", "--epp-cost-model", "analytic", "--epp-memory-budget-gib"]

    def budgets(*gib: str, **changes) -> tuple[float, ...]:
        args = parsed([*words, *gib], 2)
        filled = {"padded_vocab_size": 128, "kv_channels": 8, "ffn_hidden_size": 128}
        filled |= {"data_parallel_size": 1, "epp_vocab_parallel": "off", **changes}
        vars(args).update(filled, params_dtype="torch.bfloat16")
        config, layers = Config.of(args), (1,) * (4 if changes else 2)
        cost = job_cost.training_cost(args, config, layers, job_cost.analytic(args))
        return tuple(each / 2**30 for each in cost.device_budget_bytes)

    assert budgets("2") == (2, 2) and budgets("2", "1") == (2, 1)
    assert budgets("2", "1", epp_place=[0, 1, 1, 0]) == (2, 1)
    with pytest.raises(ValueError, match="-gib: 3 numbers for 2 pipeline ranks; expected one, or"):
        budgets("2", "1", "3")
    # The command line takes the same.
    asked = ["--lengths", "wlb", "--model", "gpt-7b", "--device", "a100-80g", "--pp", "2"]
    asked += ["--placement", "place", "0", "1", "1", "0", "--memory-budget-gib"]
    for gib in (["60"], ["60", "70"]):
        arguments = options.parser("plan").parse_args(["plan", *asked, *gib])
        cost = layout.named_layout_cost(arguments, "epp")
        assert cost.layout.place == (0, 1, 1, 0)
        assert cost.device_budget_bytes == tuple(
            each * GIB for each in budgets(*gib, epp_place=[0, 1, 1, 0])
        )
    for schema in (MachineFlags, PlansMachineFlags, TunedMachineFlags, Config):
        known = {each.name.removeprefix("epp_"): each for each in dataclasses.fields(schema)}
        assert BUDGET_HELP in known["memory_budget_gib"].metadata["help"]


def test_default_budgets_are_by_rank_where_devices_go_by_different_names() -> None:
    alike = [(0, "h100-80g", 7.0), (1, "h100-80g", 6.0)]
    assert job_cost.unlike_budgets(alike) == ()
    other = [(1, "a100-40g", 4.0), (1, "a100-40g", 3.0), (0, "h100-80g", 8.0)]
    assert job_cost.unlike_budgets([*alike[:1], *other]) == (7.0, 3.0)


@pytest.mark.parametrize(
    "flag, counted", [("alltoall", "alltoall"), ("allgather", "alltoall"), ("flex", "flex")]
)
def test_an_analytic_profile_sends_tokens_to_experts_as_the_job_does(flag, counted) -> None:
    profile = job_cost.analytic(args(moe_token_dispatcher_type=flag))
    assert profile.token_dispatcher == counted


@pytest.mark.parametrize(("dtype", "element", "summed"), [("float32", 4, 4), ("float64", 8, 8)])
def test_an_analytic_profile_counts_the_elements_of_the_jobs_data_type(
    dtype, element, summed
) -> None:
    """Softmaxes and the gradients of K and V are in float32 or wider. Products take as long."""
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 64}
    half, wide = (
        job_cost.analytic(args(params_dtype=f"torch.{name}", **experts))
        for name in ("bfloat16", dtype)
    )

    def of_elements(profile: Profile) -> list[float]:
        held = (*profile.saved_bytes.values(), profile.weight_input_bytes)
        stage = StageLayout(profile, (1, 1), stacked_experts=True)
        return [
            *(one(2, 1) for one in held),
            profile.kv_bytes_per_token,
            profile.all_to_all_bytes_per_token,
            profile.tensor_bytes_per_token,
            profile.expert_bytes_per_token,
            profile.link_seconds_per_token,
            stage.coefficients[0].workspace_bytes[Kind.BACKWARD].per_op,
        ]

    assert min(of_elements(half)) > 0
    assert of_elements(wide) == [element / 2 * each for each in of_elements(half)]
    sizes = (half, 2, 4), (wide, element, summed)
    for profile, of_element, of_sum in sizes:
        assert profile.kv_gradient_bytes_per_token == of_sum * 2 * GROUPS * HEAD
        logits = profile.last_workspace_bytes[Kind.FORWARD].per_token
        assert logits == (of_element + of_sum) * 128
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert wide.layer_seconds[kind] == half.layer_seconds[kind]


def test_an_analytic_profile_was_measured_on_nothing() -> None:
    analytic = analytic_profile(Model("m", 2, 64, 128, 4, 2, 8, 128), DEVICES["cpu"])
    assert require(analytic, provenance_of(args()), "a.json") is analytic


# ------------------------------------------------------------------ what is measured


@pytest.mark.parametrize("hidden", [64, 512, 2048])
def test_the_grid_follows_the_work_not_the_clock(hidden) -> None:
    model = Model("m", 8, hidden, 4 * hidden, 8, 8, hidden // 8, 1000)
    layer = model.shapes[LAYER_KIND]
    shapes = grid(layer, 16384, CPU_FLOPS)
    assert shapes == grid(layer, 16384, CPU_FLOPS)
    work = sum(
        (4 if letter == FULL else 3)
        * (shape.tokens * layer.flops_per_token + shape.pairs * layer.flops_per_pair)
        for shape, letter in shapes
    )
    assert REPEATS * work <= CPU_FLOPS or max(shape.tokens for shape, _ in shapes) <= 128
    # What is recomputed is measured kept, too: the difference is what counts.
    kept = {shape for shape, letter in shapes if letter == KEEP}
    assert {shape for shape, letter in shapes if letter == FULL} <= kept
    for shape, _ in grid(layer, 256, CPU_FLOPS):
        assert shape.context + shape.tokens <= 256


def test_made_up_chunks_have_the_pairs_they_say() -> None:
    assert Shape(10, 5).pairs == 10 * 5 + 55
    pieces = Shape(10, pieces=3)
    assert [span.tokens for span in pieces.spans] == [4, 3, 3]
    assert pieces.pairs == 10 + 6 + 6


# ------------------------------------------------------------------ kinds of layers


EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 24}
WINDOWS = {"window_size": (16, 0), "window_attn_skip_freq": 2}


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({}, ""),
        ({**EXPERTS, "moe_layer_freq": [0, 1, 1, 1]}, "dense 3*experts"),
        ({**EXPERTS, "moe_layer_freq": 2}, "2*(experts dense)"),
        (EXPERTS, "4*experts"),
        (WINDOWS, "2*(window full)"),
        (
            {**EXPERTS, **WINDOWS, "moe_layer_freq": [0, 0, 1, 1]},
            "window-dense full-dense window-experts full-experts",
        ),
    ],
)
def test_the_flags_say_which_layer_is_of_which_kind(changes, pattern) -> None:
    """What the sizes of each kind are: test_hub_flags.py."""
    model = model_shape(args(num_layers=4, **changes))
    assert model.pattern == pattern and model.ffn_hidden == FFN
    with pytest.raises(ValueError, match="--moe-layer-freq: 3 layers; expected --num-layers, 4"):
        model_shape(args(num_layers=4, **EXPERTS, moe_layer_freq=[0, 1, 1]))


def test_every_size_of_a_layer_is_read_from_flags() -> None:
    """A kind of layer whose flags nobody reads is named by its sizes."""
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    states = {
        "mamba_num_heads": 4,
        "mamba_num_groups": 2,
        "mamba_state_dim": 8,
        "mamba_head_dim": 6,
    }
    states |= {f"linear_num_{side}_heads": 2 for side in ("key", "value")}
    states |= {f"linear_{side}_head_dim": 4 for side in ("key", "value")}
    states |= {f"dsa_indexer_{size}": 4 for size in ("n_heads", "head_dim", "topk")}
    every = args(
        **latent, **states, multi_latent_attention=True, num_experts=8, window_size=(16, 0)
    )
    read = {name for part in LAYER_KINDS for name in {**part.sizes(every), **part.ABSENT}}
    assert {field.name for field in dataclasses.fields(LayerShape)} - read == {"ffn_hidden"}


@pytest.mark.everything
def test_the_command_measures_one_layer_of_every_kind(tmp_path, capsys) -> None:
    """Of a pattern that is longer than the layers it builds."""
    out = tmp_path / "model.json"
    words = [*MODEL.split(), "--ffn-hidden-size", str(FFN), "--seq-length", "1024"]
    flags = """
        --num-layers 7 --num-experts 4 --moe-ffn-hidden-size 16 --moe-layer-freq [0]*3+[1]*4
        --window-size 16,0 --window-attn-skip-freq 7 --vocab-size 127
    """
    words += flags.split()
    main(["--pp", "1", "-o", str(out), *words])
    made = Profile.load(str(out))
    kinds = ["window-dense", "window-experts", "full-experts"]
    assert list(made.kinds) == kinds
    assert [each.window for each in made.kinds.values()] == [17, 17, 0]
    dense, experts, full = (each.saved_bytes[KEEP].per_token for each in made.kinds.values())
    # Two of four experts of 16 in the place of one MLP of 128, and what routers keep.
    assert experts < 0.8 * dense and full == pytest.approx(experts, rel=0.02)
    # The activation's output of two experts, and what Megatron's unfused one saves inside it.
    for kind, each in made.kinds.items():
        freed = each.saved_bytes[KEEP].per_token - each.saved_bytes["e"].per_token
        assert freed >= 2 * 16 * 4 if kind.endswith("experts") else freed == 0, kind
        assert each.recompute_seconds["e"].per_token > 0 or kind.endswith("dense")
    said = capsys.readouterr().out
    assert f"kinds {' '.join(kinds)}" in said
    assert all(f"layer {kind}   F" in said for kind in kinds)


# ------------------------------------------------------------------ the command


def test_flags_that_place_layers_are_left_out() -> None:
    """With all their values; a training's other flags stay."""
    words = (
        "--epp-placement interleaved 2 --bf16 --num-virtual-stages-per-pipeline-rank=2 --lr -1 "
        "--hybrid-layer-pattern"
    )
    assert _without_layout([*words.split(), "M*"]) == ["--bf16", "--lr", "-1"]


def test_what_cannot_be_measured_is_one_line(tmp_path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        main(["-o", str(tmp_path / "nowhere" / "x.json"), *MODEL.split()])
    with pytest.raises(ValueError, match="--pp 0: expected at least 1"):
        main(["--pp", "0", *MODEL.split()])


@pytest.mark.parametrize(
    ("name", "gib", "major", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, 9, "h100-80g"),
        ("NVIDIA H200", 139.8, 9, "h200-141g"),
        ("NVIDIA B200", 178.4, 10, "b200-180g"),  # not an H200, whose memory it has
        ("NVIDIA H20", 95.6, 9, "h20-96g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, 8, "a100-80g"),
    ],
)
def test_a_gpu_goes_by_its_chips_name(name, gib, major, expected, monkeypatch) -> None:
    found = SimpleNamespace(name=name, total_memory=int(gib * GIB), major=major)
    monkeypatch.setattr(job_cost.torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(job_cost.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(job_cost.cpu_host, "has_gpu", lambda: True)
    assert job_cost.device_name() == expected
    assert DEVICES[expected].budget_bytes <= found.total_memory
