"""Every row of the table of what --epp does not run, started: the page says what happens."""

import json
import re
from argparse import ArgumentParser
from pathlib import Path

from megatron_epp.mcore.capabilities.table import TABLE
from tests.mcore.runs import flags, trained

PROGRAM = str(Path(__file__).with_name("flag_starts.py"))

ROWS = {row.what: row for row in TABLE if row.epp is not None}
EXPERTS = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}
FP8 = {
    "fp8_format": "hybrid",
    "fp8_recipe": "blockwise",
    "transformer_impl": "transformer_engine",
    "bf16": True,
}
LATENTS = {"multi_latent_attention": True, "group_query_attention": None, "num_query_groups": None}
SPARSE = {
    **LATENTS,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}
TWO_STAGES = {"pipeline_model_parallel_size": 2, "ranks": 2}
SPLIT = {"tensor_model_parallel_size": 2, "ranks": 2}
MTP = {"mtp_num_layers": 1, **TWO_STAGES}
SPREAD = {**EXPERTS, "expert_model_parallel_size": 2, "ranks": 2}
HYBRID = {"num_layers": None, "mamba_num_groups": 1, "mamba_head_dim": 16, "mamba_state_dim": 16}

# What asks for a row on the command line, by the first words of the row.
STARTS: dict[str, dict[str, object]] = {
    "interleaved pipelines": {"num_layers_per_virtual_pipeline_stage": 1, **TWO_STAGES},
    "hybrid context": {"hybrid_context_parallel": True},
    "fully sharded": {"use_torch_fsdp2": True},
    "CUDA graphs": {"cuda_graph_impl": "local"},
    "fp4": {"fp4_format": "e2m1", "bf16": True},
    "fp8 whose scales": {**FP8, "fp8_recipe": "delayed"},
    "fp8 in Megatron's local": {**FP8, "transformer_impl": "local"},
    "fp8 beyond": {**FP8, "fp8_output_proj": True},
    "static recompute": {"recompute_granularity": "selective"},
    "offloading": {"cpu_offloading_num_layers": 2},
    "overlapped tensor": {"tp_comm_overlap": True, "sequence_parallel": True, **SPLIT},
    "deferred embedding": {"defer_embedding_wgrad_compute": True, **TWO_STAGES},
    "position embeddings": {"position_embedding_type": "relative"},
    "micro-batches of several": {"micro_batch_size": 4},
    "loss averaged": {"no_calculate_per_token_loss": True, "eod_mask_loss": True},
    "documents within": {"reset_position_ids": True},
    "fill-in-the-middle": {"fim_data": True, "fim_rate": 0.9},
    "Megatron's own reinforcement": {"perform_rl_step": True},
    "skipped iterations": {"iterations_to_skip": 3},
    "several validation": {"multiple_validation_sets": True},
    "frozen layers": {"freeze_all_layers": True},
    "another data loader": {"dataloader_type": "cyclic"},
    "heterogeneous": {"heterogeneous_layers_config_path": "x.json"},
    "other attention": {"experimental_attention_variant": "another"},
    "clipping": {"qk_clip": True},
    "dropout in attention": {"attention_dropout": 0.1},
    "one product for both": {**LATENTS, "mla_down_proj_fusion": True},
    "sparse attention over context": {**SPARSE, "context_parallel_size": 2, "ranks": 2},
    "sparse attention by kernels": {**SPARSE, "dsa_kernel_backend": "tilelang"},
    "keys chosen once": {**SPARSE, "dsa_indexer_topk_freq": 2},
    "sparse attention in fp8": {**SPARSE, **FP8},
    "further tokens predicted by sparse": {**SPARSE, **MTP},
    "sparse attention within": {**SPARSE, "window_size": "8,0"},
    "Mamba's scan": {
        **HYBRID,
        "disable_mamba_mem_eff_path": True,
        "hybrid_layer_pattern": "M*-*",
    },
    "gated delta nets": {"hybrid_layer_pattern": "G-*-", "num_layers": None, **SPLIT},
    "experts spread over parts": {
        **EXPERTS,
        **SPLIT,
        "num_experts": 6,
        "sequence_parallel": True,
        "expert_model_parallel_size": 3,
        "expert_tensor_parallel_size": 1,
        "ranks": 6,
    },
    "experts spread over replicas that": {**SPREAD, "moe_token_dispatcher_type": "allgather"},
    "experts spread over replicas whose": {
        **SPREAD,
        "use_tp_pp_dp_mapping": True,
        "pipeline_model_parallel_size": 2,
        "ranks": 4,
    },
    "experts over tensor": {**EXPERTS, **SPLIT},
    "biases of experts": {
        **EXPERTS,
        **SPLIT,
        "sequence_parallel": True,
        "disable_bias_linear": None,
    },
    "balancing that depends": {**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"},
    "experts of limited": {**EXPERTS, "moe_expert_capacity_factor": 1.0},
    "routing at random": {**EXPERTS, "moe_input_jitter_eps": 0.1},
    "routing replay": {**EXPERTS, "moe_enable_routing_replay": True},
    "other exchanges": {**EXPERTS, "moe_token_dispatcher_type": "flex"},
    "exchanges of tokens that overlap": {
        **EXPERTS,
        "moe_shared_expert_overlap": True,
        "moe_shared_expert_intermediate_size": 32,
    },
    "a dense model": {**EXPERTS, "moe_use_upcycling": True},
    "windows": {"window_size": "8,2"},
    "further tokens predicted with tied": {
        **MTP,
        "untie_embeddings_and_output_weights": None,
        "pipeline_model_parallel_size": 3,
        "num_layers": 6,
        "ranks": 3,
    },
    "further tokens predicted by experts": {**MTP, **EXPERTS, **FP8},
    "layers that predict": {
        **MTP,
        "pipeline_model_parallel_layout": "Ett|ttm|L",
        "pipeline_model_parallel_size": 3,
        "ranks": 3,
    },
    "further tokens whose": {**MTP, "mtp_detach_heads": True, "epp_vocab_parallel": "on"},
    "an odd number of rotary": {"kv_channels": 9},
    "several residual streams": {"enable_mhc_connections": True},
    "logits of another type": {"output_logit_dtype": "fp32"},
    "hidden states of several predictions": {**MTP, "mtp_hsm": True},
}
# Flags of Megatron's main, which 0.19 does not know.
OF_MAIN = {"--enable-mhc-connections", "--output-logit-dtype", "--mtp-hsm"}


def row_of(words: str) -> str:
    (what,) = (what for what in ROWS if what.startswith(words))
    return what


def test_every_row_can_be_started() -> None:
    assert sorted(map(row_of, STARTS)) == sorted(ROWS)


def test_the_table_is_what_starts_do(tmp_path: Path) -> None:
    """A row that is refused when typed ends with its line; another starts, with a warning."""
    starts = [("", {}), *STARTS.items()]
    cases = []
    for _, how in starts:
        common = {"epp": True, "pipeline_model_parallel_size": 1}
        changes = {name: value for name, value in how.items() if name != "ranks"}
        words = " ".join(map(str, flags("corpus", **{**common, **changes}))).split()
        cases.append((how.get("ranks", 1), words))
    (tmp_path / "cases").write_text(json.dumps(cases))
    program = (PROGRAM, str(tmp_path / "cases"), str(tmp_path / "answers"))
    trained([], processes=0, program=program)
    answers = json.loads((tmp_path / "answers").read_text())
    assert answers[0] == ["starts", None]
    for (words, _), (ended, line) in zip(starts[1:], answers[1:], strict=True):
        row = ROWS[row_of(words)]
        if not row.typed:
            assert ended == "starts" and line is not None, (words, line)
            assert any(flag in line for flag in re.findall(r"--[a-z-]+[a-z]", row.what)), line
        elif words == "other attention":  # Megatron 0.19 has no other; a framework's may
            assert ended == "refused" and "invalid choice: 'another'" in line
        elif line is not None and line.startswith("unrecognized arguments: "):
            assert line.split()[2] in OF_MAIN and line.split()[2] in row.what
        else:
            assert line == f"--epp does not run {row.what}: {row.instead}"


def test_rows_name_flags_that_are_there() -> None:

    from megatron.training.arguments import add_megatron_arguments

    from megatron_epp.mcore.job.read_flags import prepare_parser

    parser = prepare_parser(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
    there = {option for action in parser._actions for option in action.option_strings}
    for row in ROWS.values():
        for flag in re.findall(r"(?<![\w.-])--[a-z0-9-]+", f"{row.what} {row.instead}"):
            assert flag in there or flag in OF_MAIN, row.what
