"""Model types of Hugging Face's config.json whose layer kinds are supported.

A key that is missing in a file has the default of transformers' class. Properties for which
config.json has no key are fields of :class:`ModelFamily`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Properties without a Megatron flag; the sizes of such a model are right nevertheless.
NORMS_AFTER = "norms after attention and MLP"
NORMS_OF_ALL_CHANNELS = "norms over all channels of Q and of K"
PARALLEL_PARTS = "attention and MLP in parallel"


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Default keys and other properties of a model type.

    Attributes:
        keys: defaults of keys, as in transformers' class.
        norm: RMSNorm or LayerNorm.
        gated: whether the MLP has a gate.
        qk_norm: whether every head of Q and K always has a norm.
        qkv_bias: whether Q, K and V always have a bias.
        out_bias: key that is true if attention's output has a bias; empty: it never has a bias.
        mlp_bias: whether MLPs or experts always have biases.
        interleaved: whether RoPE rotates adjacent channels.
        around_zero: whether the norms' weights are centred on zero instead of one.
        output_gate: whether attention's output has a gate.
        full_every: n if every n-th layer has full attention; 0 if all layers have a window.
        shared: whether layers always have a shared expert, which is as wide as a routed expert.
        sigmoid: whether the router's scores are sigmoids, with a bias for each expert.
        dsa: whether an indexer selects attention's keys.
        positions: rope, none, or learned_absolute.
        unsaid: properties of all models of this type for which Megatron has no flag.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    norm: str = "RMSNorm"
    gated: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: str = "attention_bias"
    mlp_bias: bool = False
    interleaved: bool = False
    around_zero: bool = False
    output_gate: bool = False
    full_every: int = 1
    shared: bool = False
    sigmoid: bool = False
    dsa: bool = False
    positions: str = "rope"
    unsaid: tuple[str, ...] = ()


def _family(eps: Any = 1e-6, theta: Any = 1e4, **fields: Any) -> ModelFamily:
    """Return a family with RMSNorm, SiLU and RoPE; ``fields`` are fields of ModelFamily or keys."""
    names = set(ModelFamily.__slots__) & set(fields)
    keys = {name: value for name, value in fields.items() if name not in names}
    common: dict[str, Any] = {"rms_norm_eps": eps, "rope_theta": theta, "hidden_act": "silu"}
    if "hidden_activation" in keys:
        del common["hidden_act"]
    all_keys = {"tie_word_embeddings": False, **common, **keys}
    return ModelFamily(all_keys, **{name: fields[name] for name in names})


def _layer_norm(eps_key: str, **fields: Any) -> ModelFamily:
    family = _family(norm="LayerNorm", **fields)
    keys = {name: value for name, value in family.keys.items() if name != "rms_norm_eps"}
    return replace(family, keys={**keys, eps_key: 1e-5})


_NO_BIAS = {"attention_bias": False}
_LLAMA = {**_NO_BIAS, "mlp_bias": False}
_AUX_LOSS: dict[str, Any] = {"router_aux_loss_coef": 0.001}
_SPARSE_STEP = {**_AUX_LOSS, "decoder_sparse_step": 1, "mlp_only_layers": []}
_DELTA = {
    **_NO_BIAS,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "around_zero": True,
    "qk_norm": True,
    "output_gate": True,
}
_MLA = {
    **_NO_BIAS,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "sigmoid": True,
}
_DEEPSEEK = {**_MLA, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
             "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
             "moe_intermediate_size": 2048}  # fmt: skip
_SCALED = ("embeddings times the root of hidden_size",)
_GEMMA = {**_NO_BIAS, "head_dim": 256, "tie_word_embeddings": True, "around_zero": True,
          "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
_MULTIPLIERS = ("embedding_multiplier", "logits_scaling", "residual_multiplier",
                "attention_multiplier")  # fmt: skip
_GRANITE = {**_NO_BIAS, **dict.fromkeys(_MULTIPLIERS, 1.0)}
_COHERE = {
    **_NO_BIAS,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
    "interleaved": True,
    "unsaid": (PARALLEL_PARTS, "norms without a bias"),
}
_GELU_BIAS = {"gated": False, "hidden_act": "gelu", "mlp_bias": True}

FAMILIES: Mapping[str, ModelFamily] = {
    "llama": _family(**_LLAMA),
    "llama4_text": _family(
        1e-5, 5e5, **_NO_BIAS, head_dim=128, num_local_experts=16, num_experts_per_tok=1,
        interleave_moe_layer_step=1, intermediate_size_mlp=16384, use_qk_norm=True,
        no_rope_layer_interval=4, attention_chunk_size=8192, attn_temperature_tuning=True,
        shared=True, interleaved=True, **_AUX_LOSS),
    "mistral": _family(sliding_window=4096, full_every=0),
    "ministral3": _family(1e-5, 1e6, sliding_window=None, full_every=0),
    "mixtral": _family(1e-5, 1e6, **_AUX_LOSS, num_local_experts=8, num_experts_per_tok=2,
                       sliding_window=None, full_every=0),
    "qwen2": _family(qkv_bias=True, use_sliding_window=False, max_window_layers=28),
    "qwen2_moe": _family(qkv_bias=True, **_SPARSE_STEP, norm_topk_prob=False,
                         moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
                         num_experts_per_tok=4, num_experts=60, use_sliding_window=False),
    "qwen3": _family(**_NO_BIAS, head_dim=128, qk_norm=True, use_sliding_window=False,
                     max_window_layers=28),
    "qwen3_moe": _family(**_NO_BIAS, **_SPARSE_STEP, norm_topk_prob=False, qk_norm=True,
                         moe_intermediate_size=768, num_experts_per_tok=8, num_experts=128,
                         use_sliding_window=False),
    "qwen3_next": _family(**_DELTA, **_SPARSE_STEP, norm_topk_prob=True, num_experts=512,
                          num_experts_per_tok=10, moe_intermediate_size=512,
                          shared_expert_intermediate_size=512),
    "qwen3_5_text": _family(**_DELTA),
    "qwen3_5_moe_text": _family(**_DELTA, **_AUX_LOSS, num_experts=256, num_experts_per_tok=8,
                                moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "deepseek_v2": _family(**{**_MLA, "n_shared_experts": 2, "n_routed_experts": 64,
                              "norm_topk_prob": False, "routed_scaling_factor": 1.0,
                              "first_k_dense_replace": 0, "topk_method": "greedy",
                              "sigmoid": False}),
    "deepseek_v3": _family(**_DEEPSEEK),
    # Its class is in its own repository, not in transformers
    "kimi_k2": _family(1e-6, **_DEEPSEEK),
    "deepseek_v32": _family(**_DEEPSEEK, index_topk=2048, index_head_dim=128, index_n_heads=64,
                            dsa=True),
    "glm_moe_dsa": _family(
        1e-5, **{**_DEEPSEEK, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256,
                 "n_group": 1, "topk_group": 1},
        index_topk=2048, index_head_dim=128, index_n_heads=32, dsa=True),
    "glm": _family(1.5625e-07, attention_bias=True, partial_rotary_factor=0.5, head_dim=128,
                   out_bias="", interleaved=True),
    "glm4": _family(1.5625e-07, attention_bias=True, partial_rotary_factor=0.5, head_dim=128,
                    out_bias="", interleaved=True, unsaid=(NORMS_AFTER,)),
    "glm4_moe": _family(1e-5, **_NO_BIAS, partial_rotary_factor=0.5, moe_intermediate_size=1408,
                        num_experts_per_tok=8, n_shared_experts=1, n_routed_experts=128, n_group=1,
                        topk_group=1, routed_scaling_factor=1.0, first_k_dense_replace=1,
                        norm_topk_prob=True, use_qk_norm=False, sigmoid=True, out_bias=""),
    "glm4_moe_lite": _family(
        1e-5, **{**_MLA, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
        moe_intermediate_size=1536, n_routed_experts=64, num_experts_per_tok=4, n_group=1,
        topk_group=1, routed_scaling_factor=1.8, first_k_dense_replace=1),
    "gemma": _family(**_GEMMA, unsaid=_SCALED),
    "gemma2": _family(**_GEMMA, query_pre_attn_scalar=256, sliding_window=4096, full_every=2,
                      final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
                      unsaid=(NORMS_AFTER, *_SCALED)),
    "gemma3_text": _family(theta=1e6, **_GEMMA, query_pre_attn_scalar=256, sliding_window=4096,
                           full_every=6, rope_local_base_freq=1e4, qk_norm=True,
                           unsaid=(NORMS_AFTER, *_SCALED)),
    "phi3": _family(1e-5, partial_rotary_factor=1.0, sliding_window=None, full_every=0),
    "gpt_oss": _family(1e-5, 1.5e5, attention_bias=True, head_dim=64, num_local_experts=128,
                       num_experts_per_tok=4, sliding_window=128, full_every=2,
                       swiglu_limit=7.0, mlp_bias=True, **_AUX_LOSS),
    "nemotron": _layer_norm("norm_eps", **{**_LLAMA, "hidden_act": "relu2"}, gated=False,
                            around_zero=True, partial_rotary_factor=0.5,
                            head_dim=128),
    "nemotron_h": ModelFamily(
        {**_LLAMA, "use_bias": False, "tie_word_embeddings": False, "head_dim": 128,
         "mlp_hidden_act": "relu2", "ssm_state_size": 128, "mamba_num_heads": 128,
         "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
         "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688,
         "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "n_group": 1,
         "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
         "moe_latent_size": None}, gated=False, positions="none", sigmoid=True),
    "mamba2": ModelFamily({"tie_word_embeddings": False, "use_bias": False, "n_groups": 8,
                      "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "expand": 2, "num_heads": 128,
                      "head_dim": 64, "state_size": 128}, gated=False, positions="none"),
    "falcon_h1": _family(1e-5, **_LLAMA, mamba_n_groups=1, mamba_d_state=256, mamba_d_conv=4,
                         mamba_n_heads=128,
                         unsaid=("attention and Mamba in parallel, with multipliers",)),
    "olmo2": _family(1e-5, **_NO_BIAS, unsaid=(NORMS_AFTER, NORMS_OF_ALL_CHANNELS)),
    "olmo3": _family(1e-5, 5e5, **_NO_BIAS, sliding_window=4096, full_every=4,
                     unsaid=(NORMS_AFTER, NORMS_OF_ALL_CHANNELS)),
    "olmoe": _family(1e-5, **_NO_BIAS, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
                     router_aux_loss_coef=0.01, unsaid=(NORMS_OF_ALL_CHANNELS,)),
    "exaone4": _family(1e-5, sliding_window=4096, sliding_window_pattern=4, qk_norm=True,
                       unsaid=(NORMS_AFTER,)),
    "granite": _family(**{**_GRANITE, "mlp_bias": False}),
    "granitemoe": _family(**_GRANITE, **_AUX_LOSS, num_local_experts=8, num_experts_per_tok=2),
    "granitemoeshared": _family(**_GRANITE, **_AUX_LOSS, num_local_experts=8, num_experts_per_tok=2,
                                shared_intermediate_size=0),
    "minimax_m2": _family(theta=5e6, head_dim=128, num_local_experts=256, num_experts_per_tok=8,
                          **_AUX_LOSS, sigmoid=True, unsaid=(NORMS_OF_ALL_CHANNELS,)),
    "hunyuan_v1_dense": _family(1e-5, **_NO_BIAS, unsaid=("norms of Q and K after RoPE",)),
    "hunyuan_v1_moe": _family(1e-5, **_NO_BIAS, num_experts=1, moe_topk=1, shared=True,
                              unsaid=("norms of Q and K after RoPE",)),
    "cohere": _layer_norm("layer_norm_eps", **_COHERE, theta=5e5, use_qk_norm=False),
    "cohere2": _layer_norm("layer_norm_eps", **_COHERE, head_dim=128, sliding_window=4096,
                           full_every=4),
    "starcoder2": _layer_norm("norm_epsilon", **{**_GELU_BIAS, "tie_word_embeddings": True,
                              "mlp_bias": False, "out_bias": "use_bias",
                              "use_bias": True, "hidden_act": "gelu_pytorch_tanh",
                              "sliding_window": None, "full_every": 0}),
    "internlm3": _family(1e-5, **_LLAMA),
    "seed_oss": _family(attention_bias=True, attention_out_bias=False, mlp_bias=False, head_dim=128,
                        out_bias="attention_out_bias"),
    "smollm3": _family(**_LLAMA, theta=2e6, tie_word_embeddings=True, use_sliding_window=False,
                       no_rope_layer_interval=4),
    "ernie4_5": _family(1e-5, 5e5, tie_word_embeddings=True, use_bias=False, head_dim=128,
                        interleaved=True),
    "arcee": _family(1e-5, **{**_LLAMA, "hidden_act": "relu2"}, gated=False),
    "gpt_neox": _layer_norm("layer_norm_eps", **_GELU_BIAS, partial_rotary_factor=0.25,
                            attention_bias=True, use_parallel_residual=True),
    "gpt2": ModelFamily({"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5,
                    "activation_function": "gelu_new"},
                   norm="LayerNorm", gated=False, positions="learned_absolute", qkv_bias=True,
                   out_bias="", mlp_bias=True),
}  # fmt: skip

# Other names of the same layers: text parts of multimodal models, and repositories' own types.
SAME: Mapping[str, str] = {
    "internlm2": "llama",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_omni": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "mistral3": "mistral",
    "llama4": "llama4_text",
    "gemma3": "gemma3_text",
    "kimi_k25": "kimi_k2",
    "glm4v_moe": "glm4_moe",
    "glm4v": "glm4",
}

# Types without a supported layer kind, and the reason.
REFUSED: Mapping[str, str] = {
    "kimi_linear": "Kimi delta attention mixed with latents",
    "minimax": "lightning attention",
    "minimax_text_01": "lightning attention",
    "lfm2": "short convolutions",
    "lfm2_moe": "short convolutions",
    "lfm2_vl": "short convolutions",
    "mllama": "layers of cross attention",
    "mllama_text_model": "layers of cross attention",
    "gemma3n": "layers that share K and V, and embeddings of every layer",
    "gemma3n_text": "layers that share K and V, and embeddings of every layer",
    "gemma4": "heads that differ by layer",
    "gemma4_text": "heads that differ by layer",
    "mimo_v2_flash": "heads that differ by layer, and V narrower than K",
    "nemotron-nas": "heads that differ by layer",
    "deci": "heads that differ by layer",
    "jamba": "Mamba-1",
    "mamba": "Mamba-1",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "t5": "an encoder",
    "bert": "an encoder",
}
