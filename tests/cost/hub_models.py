"""Facts of published models, as keys of the config.json of transformers.

Each was written down from what its makers publish: the model's card, its report, and the sizes of
its repository, which ``source`` names. Keys that transformers' class has as defaults are left out
here and there on purpose: a file may.
"""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model: where its facts are published, and the keys."""

    source: str
    keys: dict[str, Any]


def _sizes(
    model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
    }


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    return {"rope_theta": 500000.0, "rope_scaling": scaling, "rms_norm_eps": 1e-5}


def _yarn(factor: float, original: int, **more: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            "beta_fast": 32, "beta_slow": 1, **more}  # fmt: skip


def _nested(top: dict[str, Any], text: dict[str, Any], name: str = "text_config") -> dict[str, Any]:
    return {**top, name: text, "vision_config": {"hidden_size": 1280, "depth": 32}}


_QWEN3 = {"head_dim": 128, "rope_theta": 1000000, "rms_norm_eps": 1e-6, "attention_bias": False}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
              "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
_DELTA = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
}
_LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "rms_norm_eps": 1e-6, "rope_theta": 10000}  # fmt: skip
_V3_YARN = {"rope_scaling": {**_yarn(40, 4096, mscale=1.0, mscale_all_dim=1.0), "type": "yarn"}}
_V3 = {**_sizes("deepseek_v3", 61, 7168, 18432, 128, 128, 129280), **_LATENTS, "q_lora_rank": 1536,
       "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
       "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
       "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "norm_topk_prob": True,
       "num_nextn_predict_layers": 1, **_V3_YARN,
       "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000,
        "rope_scaling": _yarn(32.0, 4096, truncate=False), "attention_bias": True,
        "swiglu_limit": 7.0, "rms_norm_eps": 1e-5}  # fmt: skip
_MAMBA = {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
          "conv_kernel": 4, "head_dim": 128, "mlp_hidden_act": "relu2",
          "layer_norm_epsilon": 1e-5}  # fmt: skip
_SCOUT = {**_sizes("llama4_text", 48, 5120, 8192, 40, 8, 202048), "head_dim": 128,
          "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "rope_theta": 500000.0,
          "attention_chunk_size": 8192, "rms_norm_eps": 1e-5}  # fmt: skip


def _hub(repository: str) -> str:
    return f"https://huggingface.co/{repository}"


def _table() -> dict[str, Published]:
    llama_70b = _sizes("llama", 80, 8192, 28672, 64, 8, 128256)
    gemma3 = _sizes("gemma3_text", 62, 5376, 21504, 32, 16, 262208)
    models: dict[str, tuple[str, dict[str, Any]]] = {
        "llama-2-7b": ("meta-llama/Llama-2-7b-hf",
            {**_sizes("llama", 32, 4096, 11008, 32, 32, 32000), "rms_norm_eps": 1e-5}),
        "llama-3.1-8b": ("meta-llama/Llama-3.1-8B",
            {**_sizes("llama", 32, 4096, 14336, 32, 8, 128256), **_llama3(8.0)}),
        "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", {**llama_70b, **_llama3(8.0)}),
        "llama-3.2-1b": ("meta-llama/Llama-3.2-1B",
            {**_sizes("llama", 16, 2048, 8192, 32, 8, 128256), **_llama3(32.0), "head_dim": 64,
             "tie_word_embeddings": True}),
        "llama-3.2-3b": ("meta-llama/Llama-3.2-3B",
            {**_sizes("llama", 28, 3072, 8192, 24, 8, 128256), **_llama3(32.0), "head_dim": 128,
             "tie_word_embeddings": True}),
        "yi-34b": ("01-ai/Yi-34B", {**_sizes("llama", 60, 7168, 20480, 56, 8, 64000),
             "rope_theta": 5000000.0, "rms_norm_eps": 1e-5}),
        "llama-4-scout": ("meta-llama/Llama-4-Scout-17B-16E",
            _nested({"model_type": "llama4"}, {**_SCOUT, "num_local_experts": 16,
                    "interleave_moe_layer_step": 1, "use_qk_norm": True})),
        "llama-4-maverick": ("meta-llama/Llama-4-Maverick-17B-128E",
            _nested({"model_type": "llama4"}, {**_SCOUT, "num_local_experts": 128,
                    "interleave_moe_layer_step": 2, "use_qk_norm": False})),
        "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3",
            {**_sizes("mistral", 32, 4096, 14336, 32, 8, 32768), "rope_theta": 1000000.0,
             "sliding_window": None, "rms_norm_eps": 1e-5}),
        "mistral-7b-v0.1": ("mistralai/Mistral-7B-v0.1",
            {**_sizes("mistral", 32, 4096, 14336, 32, 8, 32000), "rope_theta": 10000.0,
             "sliding_window": 4096, "rms_norm_eps": 1e-5}),
        "mistral-small-3.1-24b": ("mistralai/Mistral-Small-3.1-24B-Base-2503",
            _nested({"model_type": "mistral3"}, {
                **_sizes("mistral", 40, 5120, 32768, 32, 8, 131072), "head_dim": 128,
                "rope_theta": 1000000000.0, "sliding_window": None, "rms_norm_eps": 1e-5})),
        "devstral-2-123b": ("mistralai/Devstral-2-123B-Instruct-2512",
            {**_sizes("ministral3", 88, 12288, 28672, 96, 8, 131072), "head_dim": 128,
             "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1000000.0,
                **_yarn(64.0, 4096, mscale=1.0, mscale_all_dim=0.0, llama_4_scaling_beta=0.0)}}),
        "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1",
            {**_sizes("mixtral", 32, 4096, 14336, 32, 8, 32000), "num_local_experts": 8,
             "num_experts_per_tok": 2, "rope_theta": 1000000.0, "sliding_window": None,
             "rms_norm_eps": 1e-5}),
        "mixtral-8x22b": ("mistralai/Mixtral-8x22B-v0.1",
            {**_sizes("mixtral", 56, 6144, 16384, 48, 8, 32768), "num_local_experts": 8,
             "num_experts_per_tok": 2, "rope_theta": 1000000.0, "sliding_window": None}),
        "qwen2.5-3b": ("Qwen/Qwen2.5-3B",
            {**_sizes("qwen2", 36, 2048, 11008, 16, 2, 151936), "rope_theta": 1000000.0,
             "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 36,
             "tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
        "qwen2.5-7b": ("Qwen/Qwen2.5-7B",
            {**_sizes("qwen2", 28, 3584, 18944, 28, 4, 152064), "rope_theta": 1000000.0,
             "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}),
        "qwen2.5-32b": ("Qwen/Qwen2.5-32B",
            {**_sizes("qwen2", 64, 5120, 27648, 40, 8, 152064), "rope_theta": 1000000.0,
             "rms_norm_eps": 1e-5}),
        "qwen2.5-vl-7b": ("Qwen/Qwen2.5-VL-7B-Instruct",
            {**_sizes("qwen2_5_vl", 28, 3584, 18944, 28, 4, 152064), "rope_theta": 1000000.0,
             "vision_config": {"depth": 32}, "use_sliding_window": False,
             "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
        "qwen1.5-moe-a2.7b": ("Qwen/Qwen1.5-MoE-A2.7B",
            {**_sizes("qwen2_moe", 24, 2048, 5632, 16, 16, 151936), "num_experts": 60,
             "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False,
             "shared_expert_intermediate_size": 5632, "rope_theta": 1000000.0}),
        "qwen3-4b": ("Qwen/Qwen3-4B", {**_sizes("qwen3", 36, 2560, 9728, 32, 8, 151936), **_QWEN3,
             "tie_word_embeddings": True}),
        "qwen3-8b": ("Qwen/Qwen3-8B",
            {**_sizes("qwen3", 36, 4096, 12288, 32, 8, 151936), **_QWEN3}),
        "qwen3-14b": ("Qwen/Qwen3-14B",
            {**_sizes("qwen3", 40, 5120, 17408, 40, 8, 151936), **_QWEN3}),
        "qwen3-32b": ("Qwen/Qwen3-32B",
            {**_sizes("qwen3", 64, 5120, 25600, 64, 8, 151936), **_QWEN3}),
        "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B",
            {**_sizes("qwen3_moe", 48, 2048, 6144, 32, 4, 151936), **_QWEN3_MOE,
             "moe_intermediate_size": 768}),
        "qwen3-vl-235b": ("Qwen/Qwen3-VL-235B-A22B-Instruct",
            _nested({"model_type": "qwen3_vl_moe", "tie_word_embeddings": False}, {
                **_sizes("qwen3_vl_moe_text", 94, 4096, 12288, 64, 4, 151936), **_QWEN3_MOE,
                "moe_intermediate_size": 1536, "rope_theta": 5000000,
                "rope_scaling": {"rope_type": "default", "mrope_interleaved": True,
                                 "mrope_section": [24, 20, 20]}})),
        "qwen3-next-80b": ("Qwen/Qwen3-Next-80B-A3B-Instruct",
            {**_sizes("qwen3_next", 48, 2048, 5120, 16, 2, 151936), **_DELTA,
             "linear_num_value_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
             "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
             "norm_topk_prob": True, "partial_rotary_factor": 0.25, "rope_theta": 10000000}),
        "qwen3.5-27b": ("Qwen/Qwen3.5-27B",
            _nested({"model_type": "qwen3_5", "tie_word_embeddings": False}, {
                **_sizes("qwen3_5_text", 64, 5120, 17408, 24, 4, 248320), **_DELTA,
                "linear_num_value_heads": 48, "attn_output_gate": True,
                "mtp_num_hidden_layers": 1, "rope_parameters": {
                    "rope_type": "default", "rope_theta": 10000000,
                    "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10]}})),
        "qwen3.5-397b": ("Qwen/Qwen3.5-397B-A17B",
            _nested({"model_type": "qwen3_5_moe", "tie_word_embeddings": False}, {
                **{k: v for k, v in _sizes("qwen3_5_moe_text", 60, 4096, 0, 32, 2, 248320).items()
                   if k != "intermediate_size"}, **_DELTA,
                "linear_num_value_heads": 64, "num_experts": 512, "num_experts_per_tok": 10,
                "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000000,
                                    "partial_rotary_factor": 0.25}})),
        "deepseek-v2-lite": ("deepseek-ai/DeepSeek-V2-Lite",
            {**_sizes("deepseek_v2", 27, 2048, 10944, 16, 16, 102400), **_LATENTS,
             "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6,
             "n_shared_experts": 2, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
             "moe_layer_freq": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy",
             "scoring_func": "softmax", "norm_topk_prob": False,
             "rope_scaling": _yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707)}),
        "deepseek-v2": ("deepseek-ai/DeepSeek-V2",
            {**_sizes("deepseek_v2", 60, 5120, 12288, 128, 128, 102400), **_LATENTS,
             "q_lora_rank": 1536, "n_routed_experts": 160, "num_experts_per_tok": 6,
             "n_shared_experts": 2, "moe_intermediate_size": 1536, "first_k_dense_replace": 1,
             "moe_layer_freq": 1, "routed_scaling_factor": 16.0, "n_group": 8, "topk_group": 3,
             "topk_method": "group_limited_greedy", "scoring_func": "softmax",
             "rope_scaling": _yarn(40, 4096, mscale=0.707, mscale_all_dim=0.707)}),
        "deepseek-v3": ("deepseek-ai/DeepSeek-V3",
            {**_V3, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}),
        "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2",
            {**_V3, "model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128,
             "index_topk": 2048}),
        "kimi-k2": ("moonshotai/Kimi-K2-Instruct",
            {**_V3, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"],
             "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
             "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
             "routed_scaling_factor": 2.827, "rope_theta": 50000.0, "num_nextn_predict_layers": 0,
             "rope_scaling": _yarn(32.0, 4096, mscale=1.0, mscale_all_dim=1.0)}),
        "glm-5": ("zai-org/GLM-5",
            {**_sizes("glm_moe_dsa", 78, 6144, 12288, 64, 64, 154880), "kv_lora_rank": 512,
             "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
             "v_head_dim": 256, "n_routed_experts": 256, "num_experts_per_tok": 8,
             "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
             "routed_scaling_factor": 2.5, "index_n_heads": 32, "index_head_dim": 128,
             "index_topk": 2048, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
             "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}),
        "glm-4-9b-0414": ("zai-org/GLM-4-9B-0414",
            {**_sizes("glm4", 40, 4096, 13696, 32, 2, 151552), "head_dim": 128,
             "attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}),
        "glm-4.7": ("zai-org/GLM-4.7",
            {**_sizes("glm4_moe", 92, 5120, 12288, 96, 8, 151552), "head_dim": 128,
             "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 160,
             "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1536,
             "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "n_group": 1,
             "topk_group": 1, "rope_theta": 1000000, "partial_rotary_factor": 0.5,
             "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5}),
        "glm-4.5-air": ("zai-org/GLM-4.5-Air",
            {**_sizes("glm4_moe", 46, 4096, 10944, 96, 8, 151552), "head_dim": 128,
             "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128,
             "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408,
             "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "rope_theta": 1000000,
             "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5}),
        "glm-4.7-flash": ("zai-org/GLM-4.7-Flash",
            {**_sizes("glm4_moe_lite", 47, 2048, 10240, 20, 20, 154880), "kv_lora_rank": 512,
             "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
             "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
             "n_shared_experts": 1, "moe_intermediate_size": 1536, "first_k_dense_replace": 1,
             "routed_scaling_factor": 1.8, "rope_theta": 1000000, "rms_norm_eps": 1e-5}),
        "gemma-7b": ("google/gemma-7b", {**_sizes("gemma", 28, 3072, 24576, 16, 16, 256000),
             "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"}),
        "gemma-2-9b": ("google/gemma-2-9b", {**_sizes("gemma2", 42, 3584, 14336, 16, 8, 256000),
             "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}),
        "gemma-3-27b": ("google/gemma-3-27b-it",
            _nested({"model_type": "gemma3"}, {**gemma3, "head_dim": 128, "sliding_window": 1024,
                    "query_pre_attn_scalar": 168, "rope_theta": 1000000.0,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})),
        "phi-3-mini": ("microsoft/Phi-3-mini-4k-instruct",
            {**_sizes("phi3", 32, 3072, 8192, 32, 32, 32064), "sliding_window": 2047,
             "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}),
        "phi-4": ("microsoft/phi-4", {**_sizes("phi3", 40, 5120, 17920, 40, 10, 100352),
             "rope_theta": 250000, "sliding_window": None}),
        "gpt-oss-20b": ("openai/gpt-oss-20b", {**_sizes("gpt_oss", 24, 2880, 2880, 64, 8, 201088),
             **_OSS, "num_local_experts": 32}),
        "gpt-oss-120b": ("openai/gpt-oss-120b",
            {**_sizes("gpt_oss", 36, 2880, 2880, 64, 8, 201088), **_OSS, "num_local_experts": 128,
             "layer_types": ["sliding_attention", "full_attention"] * 18}),
        "nemotron-h-8b": ("nvidia/Nemotron-H-8B-Base-8K",
            {**_sizes("nemotron_h", 52, 4096, 21504, 32, 8, 131072), **_MAMBA,
             "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
             "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}}),
        "nemotron-3-nano": ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            {**_sizes("nemotron_h", 52, 2688, 1856, 32, 2, 131072), **_MAMBA,
             "mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6,
             "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
             "n_shared_experts": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
             "hybrid_override_pattern": 5 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME"}),
        "mamba-codestral-7b": ("mistralai/Mamba-Codestral-7B-v0.1",
            {"model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "expand": 2,
             "num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
             "vocab_size": 32768, "tie_word_embeddings": False}),
        "falcon-h1-7b": ("tiiuae/Falcon-H1-7B-Base",
            {**_sizes("falcon_h1", 44, 3072, 12288, 12, 2, 130048), "head_dim": 128,
             "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_n_groups": 1,
             "mamba_d_state": 256, "mamba_d_conv": 4, "rope_theta": 100000000000.0}),
        "olmo-2-7b": ("allenai/OLMo-2-1124-7B",
            {**_sizes("olmo2", 32, 4096, 11008, 32, 32, 100352), "rope_theta": 500000,
             "rms_norm_eps": 1e-6}),
        "olmo-3.1-32b": ("allenai/Olmo-3.1-32B-Instruct",
            {**_sizes("olmo3", 64, 5120, 27648, 40, 8, 100278), "sliding_window": 4096,
             "rope_theta": 500000, "rms_norm_eps": 1e-6}),
        "olmoe-7b": ("allenai/OLMoE-1B-7B-0924",
            {**_sizes("olmoe", 16, 2048, 1024, 16, 16, 50304), "num_experts": 64,
             "num_experts_per_tok": 8, "norm_topk_prob": False}),
        "exaone-4-32b": ("LGAI-EXAONE/EXAONE-4.0-32B",
            {**_sizes("exaone4", 64, 5120, 27392, 40, 8, 102400), "head_dim": 128,
             "sliding_window": 4096, "rope_theta": 1000000,
             "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16}),
        "granite-3.1-8b": ("ibm-granite/granite-3.1-8b-base",
            {**_sizes("granite", 40, 4096, 12800, 32, 8, 49152), "tie_word_embeddings": True,
             "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22,
             "attention_multiplier": 0.0078125, "rope_theta": 10000000.0, "rms_norm_eps": 1e-5}),
        "granite-3.0-3b-a800m": ("ibm-granite/granite-3.0-3b-a800m-base",
            {**_sizes("granitemoe", 32, 1536, 512, 24, 8, 49155), "num_local_experts": 40,
             "num_experts_per_tok": 8, "tie_word_embeddings": True, "embedding_multiplier": 12.0,
             "logits_scaling": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}),
        "minimax-m2": ("MiniMaxAI/MiniMax-M2",
            {**_sizes("minimax_m2", 62, 3072, 1536, 48, 8, 200064), "head_dim": 128,
             "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
             "rotary_dim": 64, "rope_theta": 5000000, "use_qk_norm": True}),
        "hunyuan-a13b": ("tencent/Hunyuan-A13B-Instruct",
            {**_sizes("hunyuan_v1_moe", 32, 4096, 3072, 32, 8, 128167), "head_dim": 128,
             "num_experts": 64, "moe_topk": [8] * 32, "moe_intermediate_size": [3072] * 32,
             "num_shared_expert": [1] * 32, "tie_word_embeddings": True}),
        "command-r-35b": ("CohereForAI/c4ai-command-r-v01",
            {**_sizes("cohere", 40, 8192, 22528, 64, 64, 256000), "logit_scale": 0.0625,
             "rope_theta": 8000000.0}),
        "command-r7b": ("CohereForAI/c4ai-command-r7b-12-2024",
            {**_sizes("cohere2", 32, 4096, 14336, 32, 8, 256000), "sliding_window": 4096,
             "logit_scale": 0.25, "rope_theta": 50000.0}),
        "starcoder2-3b": ("bigcode/starcoder2-3b",
            {**_sizes("starcoder2", 30, 3072, 12288, 24, 2, 49152), "use_bias": True,
             "rope_theta": 999999.4420358813, "sliding_window": 4096}),
        "internlm3-8b": ("internlm/internlm3-8b-instruct",
            {**_sizes("internlm3", 48, 4096, 10240, 32, 2, 128512), "head_dim": 128,
             "rope_theta": 50000000, "rms_norm_eps": 1e-5,
             "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
             "auto_map": {"AutoConfig": "configuration_internlm3.InternLM3Config"}}),
        "seed-oss-36b": ("ByteDance-Seed/Seed-OSS-36B-Instruct",
            {**_sizes("seed_oss", 64, 5120, 27648, 80, 8, 155136), "head_dim": 128,
             "attention_bias": True, "attention_out_bias": False, "rope_theta": 10000000.0}),
        "smollm3-3b": ("HuggingFaceTB/SmolLM3-3B",
            {**_sizes("smollm3", 36, 2048, 11008, 16, 4, 128256), "rope_theta": 5000000.0,
             "no_rope_layers": [1, 1, 1, 0] * 9, "tie_word_embeddings": True}),
        "ernie-4.5-0.3b": ("baidu/ERNIE-4.5-0.3B-PT",
            {**_sizes("ernie4_5", 18, 1024, 3072, 16, 2, 103424), "head_dim": 128,
             "use_bias": False, "rope_theta": 500000.0, "tie_word_embeddings": True}),
        "afm-4.5b": ("arcee-ai/AFM-4.5B", {**_sizes("arcee", 36, 2560, 18432, 20, 4, 128004),
             "head_dim": 128, "hidden_act": "relu2", "rope_theta": 10000.0}),
        "minitron-8b": ("nvidia/Minitron-8B-Base",
            {**_sizes("nemotron", 32, 4096, 16384, 48, 8, 256000), "head_dim": 128,
             "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
        "pythia-6.9b": ("EleutherAI/pythia-6.9b",
            {**_sizes("gpt_neox", 32, 4096, 16384, 32, 32, 50432), "rotary_pct": 0.25,
             "use_parallel_residual": True, "hidden_act": "gelu", "layer_norm_eps": 1e-5}),
        "gpt2-xl": ("openai-community/gpt2-xl",
            {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_inner": None,
             "n_positions": 1024, "vocab_size": 50257, "activation_function": "gelu_new"}),
    }  # fmt: skip
    return {name: Published(_hub(repository), keys) for name, (repository, keys) in models.items()}


HUB_MODELS = _table()
