"""Model flags of the architectures that certificates and training runs have."""

from argparse import Namespace

from megatron_epp.certify.trial import EXPERTS, LLAMA

MLA = (
    "--hidden-size 1024 --num-attention-heads 16 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --multi-latent-attention --kv-lora-rank 256 "
    "--qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 96 --qk-layernorm "
)
# DeepSeek-V3's: queries have a latent, YaRN's stretch is in the scale.
V3 = f"{MLA} --q-lora-rank 384 --rotary-scaling-factor 40 --mscale-all-dim 1.0 "
# V2-Lite's: they have none, and a norm before their projection.
LITE = f"{MLA} --rope-type rope --apply-layernorm-1p "
V3_MOE = (
    "--num-experts 64 --moe-router-topk 8 --moe-layer-freq [0]+[1]*3 --moe-ffn-hidden-size 256 "
    "--moe-shared-expert-intermediate-size 256 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall "
)
INDEXER = (
    "--dsa-indexer-n-heads 64 --dsa-indexer-head-dim 64 --dsa-indexer-topk 2048 "
    "--dsa-indexer-loss-coeff 0.1 "
)
DSA = f"--experimental-attention-variant dsa {INDEXER}"
QWEN3 = (
    f"{LLAMA} --num-layers 4 --qk-layernorm --num-experts 128 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 384 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-z-loss-coeff 1e-3 --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
)
# All losses of routers; samples that share a prefix count its rows in each.
BALANCED = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 352 --expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 "
    "--moe-router-load-balancing-type "
)
WINDOWS = "--window-size 127,0 --window-attn-skip-freq 2 --softmax-type learnable "

# ------------------------------------------------------------------ with a layer pattern

PATTERN = " --hybrid-layer-pattern="
HYBRID_MOE = (
    "--num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 256 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-3 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
)
HYBRID_MLA = (
    f"{MLA} --q-lora-rank 384 ".replace("--untie-embeddings-and-output-weights ", "")
).replace("--multi-latent-attention ", "")
SSM = f"{LLAMA} --mamba-num-heads 32 --mamba-num-groups 8 "
SSM_MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
)
# Qwen3-Next's shape, a GPTModel: every fourth layer has attention, its outputs gated.
GATED_DELTA_NET = (
    f"{LLAMA} {SSM_MOE} --qk-layernorm --apply-layernorm-1p --attention-output-gate "
    "--kv-channels 128 --moe-shared-expert-intermediate-size 256 --moe-shared-expert-gate "
    "--rotary-percent 0.25 --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 4 --num-layers 8 --linear-num-key-heads 16 "
    "--linear-num-value-heads 32 "
)

# ------------------------------------------------------------------ multi-token prediction

MTP = "--mtp-num-layers 2 "
MTP_MOE = (
    EXPERTS.replace("balancing-type none", "balancing-type seq_aux_loss")
    + " --moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-3 --expert-tensor-parallel-size 1 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
MTP_MLA = (
    LLAMA.replace("--group-query-attention --num-query-groups 8 ", "")
    + " --num-layers 4 --mtp-num-layers 1 --multi-latent-attention --kv-lora-rank 256 "
    "--q-lora-rank 384 --qk-head-dim 64 --qk-pos-emb-head-dim 32 "
)

# ------------------------------------------------------------------ small ones, to be trained

TRAINED_MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_token_dispatcher_type": "alltoall",
}
TRAINED_SSM = {
    "hybrid_layer_pattern": "M*G-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_num_groups": 2,
    "mamba_state_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
TRAINED_MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 12,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "rotary_scaling_factor": 4,
    "mscale_all_dim": 1.0,
    "group_query_attention": None,
    "num_query_groups": None,
}
TRAINED_EXPERTS = {
    **TRAINED_MOE,
    "moe_router_bias_update_rate": 0.1,
    "window_size": "16,0",
    "window_attn_skip_freq": 2,
    "softmax_type": "learnable",
}


# ------------------------------------------------------------------ as the parser leaves flags


def megatron_args(**changes: object) -> Namespace:
    """Arguments of a small model without a kind of its own; ``changes`` override or add."""
    values = {
        "hidden_size": 32, "ffn_hidden_size": 128, "num_attention_heads": 4,
        "kv_channels": 8, "group_query_attention": True, "num_query_groups": 2,
        "padded_vocab_size": 128, "swiglu": True, "normalization": "RMSNorm",
        "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
        "transformer_impl": "local", "add_bias_linear": False, "hidden_dropout": 0.0,
        "tensor_model_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False,
        "pipeline_model_parallel_size": 2, "overlap_grad_reduce": False,
        "align_grad_reduce": True, "params_dtype": "torch.float32", "num_layers": 2,
        "num_experts": None, "moe_router_topk": 2, "moe_ffn_hidden_size": None,
        "moe_router_num_groups": None, "moe_router_group_topk": None,
        "moe_shared_expert_intermediate_size": None, "moe_layer_freq": 1, "moe_latent_size": None,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall", "window_size": None,
        "window_attn_skip_freq": None, "no_rope_freq": None, "multi_latent_attention": False,
        "hybrid_layer_pattern": None, "gradient_accumulation_fusion": False,
        "moe_grouped_gemm": False, "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None, "account_for_loss_in_pipeline_split": False,
        "account_for_embedding_in_pipeline_split": False,
    }  # fmt: skip
    return Namespace(**values | changes)
