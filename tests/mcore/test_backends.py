"""Which attention a rank computes with: the flag, its refusals, and what surrounds GPU kernels."""

import os
from types import SimpleNamespace

import pytest
import torch
from megatron.training.arguments import parse_args

from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.layers.attention.te import MASK, TOP_LEFT_MASK
from megatron_epp.layers.attention.varlen import VarlenAttention
from megatron_epp.mcore.flags import config as config_module
from megatron_epp.mcore.flags.config import FUSED_LINEARS, elastic_defaults
from megatron_epp.mcore.job import job_cost
from megatron_epp.mcore.job.job_cost import training_levers
from megatron_epp.mcore.job.read_flags import with_our_flags
from megatron_epp.mcore.kinds.registry import heads_of, kind_defaults
from megatron_epp.mcore.model import attention
from megatron_epp.mcore.model.attention import attention_for, choose_mask
from megatron_epp.mcore.patching import cpu_host
from megatron_epp.planner.options import TRAINING_LEVERS

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LATENT = {
    "multi_latent_attention": True,
    "qk_head_dim": 128,
    "v_head_dim": 128,
    "rotary_scaling_factor": 40,
    "mscale_all_dim": 1.0,
}


def config(**changes) -> SimpleNamespace:
    fields = {
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "softmax_scale": None,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 1,
        "params_dtype": torch.bfloat16,
        "num_layers": 4,
        "window_size": None,
        "window_attn_skip_freq": None,
        "softmax_type": "vanilla",
    }
    return SimpleNamespace(**fields | changes)


def test_a_cpu_has_torchs_kernels() -> None:
    for wanted in ("auto", "torch"):
        assert isinstance(attention_for(wanted, config(), CPU), PartsAttention)
    with pytest.raises(ValueError, match="--epp-attention te: this host has no CUDA GPU"):
        attention_for("te", config(), CPU)


class Fake:
    """A kernel for heads of (queries and keys, values)."""

    def __init__(self, name: str, sizes: tuple[int, int], layers: tuple = ()):
        self.name, self.sizes, self.layers = name, sizes, layers

    def of_layers(self, before, sinks):
        return Fake(self.name, self.sizes, (before, sinks))


@pytest.fixture
def kernels(monkeypatch) -> dict[str, str]:
    """By name, what is wrong with a back end; nothing: it is right."""
    wrong: dict[str, str] = {}

    def absent(name: str):
        def make(heads):
            if wrong.get(name) == "absent":
                raise ModuleNotFoundError(f"No module named {name!r}")
            if wrong.get(name) == "one size" and heads.size != heads.value:
                raise ValueError(f"heads of {heads.size} and {heads.value}")
            return Fake(name, (heads.size, heads.value))

        return make

    def judge(kernel, *heads) -> None:
        if wrong.get(kernel.name, "one size") != "one size":
            raise ValueError(f"{wrong[kernel.name]}\nand more")

    monkeypatch.setattr(attention, "_KERNELS", {name: absent(name) for name in ("te", "torch")})
    monkeypatch.setattr(attention, "require_right", judge)
    return wrong


def test_auto_takes_the_first_that_computes_rightly(kernels, caplog) -> None:
    assert attention_for("auto", config(), GPU).name == "te"
    assert attention_for("torch", config(), GPU).name == "torch"
    assert not caplog.records
    kernels["te"] = "the output is off"
    assert attention_for("auto", config(), GPU).name == "torch"
    assert caplog.messages == ["attention by torch kernels, as te: the output is off"]
    kernels["te"] = "absent"
    assert attention_for("auto", config(), GPU).name == "torch"


def test_heads_of_two_sizes_are_padded_where_no_kernel_takes_them(kernels, caplog) -> None:
    latent = config(**LATENT, qk_pos_emb_head_dim=60)
    chosen = attention_for("auto", latent, GPU).kernel
    assert (chosen.size, chosen.value) == chosen.kernel.sizes == (192, 128)  # multiples of 8
    latent.qk_pos_emb_head_dim = 64
    assert attention_for("auto", latent, GPU).kernel.sizes == (192, 128)  # as they are
    assert not caplog.records
    kernels["te"] = "one size"
    chosen = attention_for("auto", latent, GPU).kernel
    assert (chosen.size, chosen.value) == chosen.kernel.sizes == (192, 192)
    said = "attention by te (heads padded to 192) kernels, as te: heads of 192 and 128"
    assert caplog.messages == [said]


def test_kernels_are_tried_on_every_kind_of_layers(kernels, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        attention, "require_right", lambda kernel, *given: asked.append((kernel.layers, given[-2:]))
    )
    attention_for("te", config(), GPU)
    windows = config(window_size=(16, 0), window_attn_skip_freq=2, softmax_type="learnable")
    attention_for("te", windows, GPU)
    attention_for("te", config(window_size=(16, 0)), GPU)
    kinds = [(None, False)], [(None, True), (16, True)], [(16, False)]
    assert [given for _, given in asked] == [kind for each in kinds for kind in each]
    assert [layers for layers, _ in asked] == [(), (None, True), (16, True), (16, False)]


def test_an_assertion_of_a_kernel_is_a_reason_like_others(kernels, monkeypatch, caplog) -> None:
    def judge(kernel, *heads) -> None:
        assert kernel.name != "te", "THD is not for this head size"

    monkeypatch.setattr(attention, "require_right", judge)
    assert attention_for("auto", config(), GPU).name == "torch"
    assert caplog.messages == ["attention by torch kernels, as te: THD is not for this head size"]


class FakeEngine:
    """Transformer Engine's kernel, without the module."""

    name, without_context = "te", None

    def use_top_left(self, wanted):
        self.without_context = Fake("top left", (8, 8)) if wanted else None

    def of_layers(self, before, sinks):
        return Fake(self.name, (8, 8), (before, sinks))


@pytest.fixture
def engine(monkeypatch) -> SimpleNamespace:
    """An engine in the place of Transformer Engine; which masks it was tried with; times."""
    seen = SimpleNamespace(tried=[], wrong=(), milliseconds=(), timed=[])

    def judge(kernel, *heads) -> None:
        has_two = getattr(kernel, "without_context", None) is not None
        mask = "top left" if has_two else "bottom right"
        seen.tried.append(mask)
        if mask in seen.wrong:
            raise ValueError(f"{mask} is off")

    def timed(kernels, heads, device) -> list[float]:
        seen.timed.append(([kernel.name for kernel in kernels], heads))
        return [1e-3 * value for value in seen.milliseconds]

    monkeypatch.setattr(attention, "TransformerEngineKernel", FakeEngine)
    monkeypatch.setattr(attention, "_KERNELS", {"te": lambda heads: FakeEngine()})
    monkeypatch.setattr(attention, "require_right", judge)
    monkeypatch.setattr(attention, "backward_seconds", timed)
    return seen


@pytest.mark.parametrize(
    ("milliseconds", "chosen"), [((1.4, 0.7), TOP_LEFT_MASK), ((0.7, 1.4), MASK)]
)
def test_a_gpu_times_the_masks_and_the_faster_is_tested_and_said(
    engine, caplog, milliseconds, chosen
) -> None:
    caplog.set_level("INFO")
    made = attention_for("te", config(), GPU)
    assert engine.tried == ["top left"]
    engine.milliseconds = milliseconds
    choose_mask(made, config(), GPU)
    assert engine.timed == [(["te", "top left"], heads_of(config()))]
    assert (made.kernel.without_context is not None) == (chosen == TOP_LEFT_MASK)
    assert engine.tried == ["top left", *(["bottom right"] if chosen == MASK else [])]
    assert caplog.messages == [
        f"attention without context: mask {chosen}, as the backward of 4096 tokens takes "
        f"{milliseconds[0]:.3f} ms with padding_causal_bottom_right, {milliseconds[1]:.3f} ms with "
        "padding_causal"
    ]


def test_rank_0_decides_for_the_job(engine, monkeypatch) -> None:
    """Whatever this rank would measure; single-rank documents, over all heads, follow."""
    spread = config(context_parallel_size=2)
    for answer in (MASK, TOP_LEFT_MASK):
        monkeypatch.setattr(attention, "broadcast_result", lambda make, group, is_=answer: is_)
        made = attention_for("te", spread, GPU)
        choose_mask(made, spread, GPU, object())
        kernels = made.kernel, made.all_heads.kernel
        assert kernels[0] is not kernels[1] and not engine.timed
        assert {one.without_context is not None for one in kernels} == {answer == TOP_LEFT_MASK}


def test_a_mask_that_computes_wrongly_is_not_taken(engine, caplog) -> None:
    engine.wrong = ("top left",)
    made = attention_for("te", config(), GPU)
    choose_mask(made, config(), GPU)
    assert made.kernel.without_context is None and not engine.timed
    assert engine.tried == ["top left", "bottom right"]
    assert caplog.messages == [
        "attention without context by mask padding_causal_bottom_right: top left is off"
    ]


def test_masks_are_not_timed_where_no_layer_takes_both_or_there_is_no_gpu(engine) -> None:
    windows = config(window_size=(16, 0))
    choose_mask(attention_for("te", windows, GPU), windows, GPU)
    made = VarlenAttention(FakeEngine())
    made.kernel.use_top_left(True)
    choose_mask(made, config(), CPU)
    choose_mask(PartsAttention(0.5), config(), CPU)
    assert made.kernel.without_context is not None and not engine.timed


@pytest.mark.parametrize("before", [None, "1"])
def test_unfused_attention_is_off_around_our_calls_alone(before, monkeypatch) -> None:
    """Megatron asserts that it is on wherever it builds a model."""
    monkeypatch.delenv("NVTE_UNFUSED_ATTN", raising=False)
    if before is not None:
        monkeypatch.setenv("NVTE_UNFUSED_ATTN", before)
    with pytest.raises(KeyError), attention._no_scores():
        assert os.environ["NVTE_UNFUSED_ATTN"] == "0"
        raise KeyError
    assert os.environ.get("NVTE_UNFUSED_ATTN") == before


def test_what_was_named_is_not_replaced(kernels) -> None:
    kernels["te"] = "the output is off"
    with pytest.raises(ValueError) as error:
        attention_for("te", config(), GPU)
    assert str(error.value) == (
        "--epp-attention te: no attention can be used on this device (te: the output is off)"
    )
    kernels["torch"] = "absent"
    with pytest.raises(ValueError, match=r"\(te: the output is off; torch: No module named"):
        attention_for("auto", config(), GPU)


def test_kernels_of_a_gpu_know_half_precision_only(kernels) -> None:
    with pytest.raises(ValueError, match=r"trains in float32 here, .* give --bf16 or --fp16"):
        attention_for("auto", config(params_dtype=torch.float32), GPU)


def test_torchs_kernels_refuse_heads_that_they_cannot_run() -> None:
    for size in (100, 512):
        with pytest.raises(ValueError, match=f"heads of {size}: expected a multiple of 8"):
            attention._torch(heads_of(config(kv_channels=size)))


@pytest.mark.parametrize(("backend", "names"), [("nccl", ["tp", "cp", "ep"]), ("gloo", [])])
def test_layers_exchange_on_streams_of_high_priority(monkeypatch, backend, names) -> None:
    """Of NCCL; what the user gives counts."""
    words = ["pretrain_gpt.py", "--distributed-backend", backend, "--epp"]
    for given in ([], ["dp"]):
        flags = [*words, *(["--high-priority-stream-groups", *given] if given else [])]
        monkeypatch.setattr("sys.argv", flags)
        defaults = elastic_defaults(parse_args(with_our_flags))

        def prepare(parser, defaults=defaults):
            with_our_flags(parser).set_defaults(**defaults)
            return parser

        assert parse_args(prepare).high_priority_stream_groups == (given or names)


def test_what_defaults_and_plans_do_without(monkeypatch) -> None:
    """Fused positions are Transformer Engine's kernel; fused accumulation of the output layer's
    gradient is apex's, of linears Transformer Engine's. --no-gradient-accumulation-fusion counts.
    """
    wanted = SimpleNamespace(
        max_position_embeddings=8,
        transformer_impl="transformer_engine",
        gradient_accumulation_fusion=True,
        multi_latent_attention=False,
        distributed_backend="gloo",
    )
    assert "apply_rope_fusion" not in elastic_defaults(wanted)
    wanted.multi_latent_attention = True
    assert kind_defaults(wanted)["apply_rope_fusion"] is False
    wanted.multi_latent_attention, wanted.transformer_impl = False, "local"
    assert elastic_defaults(wanted)["apply_rope_fusion"] is False
    monkeypatch.setattr(config_module, "find_spec", lambda name: None)
    for impl, asked, fused in (
        ("transformer_engine", True, True),
        ("transformer_engine", False, False),
        ("local", True, False),
    ):
        wanted.transformer_impl, wanted.gradient_accumulation_fusion = impl, asked
        defaults = elastic_defaults(wanted)
        assert defaults["gradient_accumulation_fusion"] is False
        assert defaults[FUSED_LINEARS] is fused
    monkeypatch.setattr(config_module, "find_spec", lambda name: name)
    assert "gradient_accumulation_fusion" not in elastic_defaults(wanted)


def test_the_levers_of_training(monkeypatch) -> None:
    assert training_levers("default") == TRAINING_LEVERS
    assert training_levers("default,offload") == TRAINING_LEVERS | {"offload"}
    assert training_levers("-wsplit") == TRAINING_LEVERS - {"wsplit"}
    assert hash(training_levers("all"))  # options are values
    monkeypatch.setattr(cpu_host, "has_gpu", lambda: True)
    assert training_levers("default") == TRAINING_LEVERS | {"offload"}
    assert "offload" not in training_levers("default,-offload")
    with pytest.raises(ValueError, match="uneven: removed; --placement auto moves layers"):
        training_levers("default,uneven")


@pytest.mark.parametrize(
    ("kept", "flags"),
    [
        ("", {}),
        ("all", {"gradient_accumulation_fusion": True}),
        ("", {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": True}),
        ("experts", {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}),
        ("experts", {"transformer_impl": "transformer_engine", "hybrid_layer_pattern": "*E"}),
        ("", {"moe_grouped_gemm": True}),  # local experts are separate linears
    ],
)
def test_linears_priced_in_i(kept, flags) -> None:
    args = {
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "moe_grouped_gemm": False,
        "hybrid_layer_pattern": None,
    }
    assert job_cost.kept_in_input(SimpleNamespace(**args | flags)) == kept
