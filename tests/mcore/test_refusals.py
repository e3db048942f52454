"""Bad input: one clear line, status 2 on every rank, nothing left running."""

import argparse
import json
import os
import re
import signal
from pathlib import Path

import pytest

from megatron_epp.control.accept import accept
from megatron_epp.control.step_source import SourcedStep
from megatron_epp.ir import Kind, Op, Plan, PlanError, Span, Step
from megatron_epp.ir.chunk import Chunk
from megatron_epp.ir.recompute import MODES
from megatron_epp.layers.recompute.wrap import EXECUTABLE, OF_EXPERTS, OF_MLA
from megatron_epp.mcore.capabilities.refusals import (
    refuse,
    refuse_gpu_flags,
)
from megatron_epp.mcore.capabilities.table import TABLE
from megatron_epp.mcore.flags.config import Config, add_arguments
from megatron_epp.mcore.kinds.limit import Limit, flag_of
from megatron_epp.mcore.trainer import entry
from tests.mcore import runs
from tests.mcore.models import megatron_args
from tests.mcore.runs import flags, train, trained
from tests.waiting import LAST_RESORT_SECONDS

LENGTHS = [30, 40, 50, 60] * 5
STARTER = str(Path(__file__).with_name("flag_starts.py"))


def refused(words: list[str], *said: str, processes: int = 1, program=None) -> str:
    """The one line with which a run is refused; ``said`` are parts of it."""
    extra = {} if program is None else {"program": program}
    run = train(words, processes=processes, **extra)
    assert run.status == (2 if processes == 1 else 1), run.output
    assert 2 in run.statuses, run.output
    assert len(run.errors) == 1, run.output
    assert "Traceback" not in run.output or processes > 1, run.output
    for part in said:
        assert part in run.errors[0], run.errors[0]
    return run.errors[0]


def test_every_letter_of_plans_runs() -> None:
    plan = Plan.parse(
        "plan v1\ndocuments 5\nlayers 3\nchunk 0: 0[0:5]\nrecompute 0: 1k2o\nstage 0: F0 B0\n"
    )
    step = Step.parse(str(plan))
    accept(SourcedStep(step, str(step)), [5], False, layers=(3,), replica=0, replicas=1)
    assert set(EXECUTABLE + OF_MLA + OF_EXPERTS) == set(MODES)
    with pytest.raises(PlanError, match="is for 1 data-parallel replicas; this job has 2"):
        accept(SourcedStep(step, str(step)), [5], False, layers=(3,), replica=0, replicas=2)


# ------------------------------------------------------------------ the table

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
HYBRID = {
    "hybrid": True,
    "num_layers": None,
    "mamba_num_groups": 1,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
}

# What asks for a row on the command line, by the first words of the row; words after a comma tell
# several starts of one row apart.
STARTS: dict[str, dict[str, object]] = {
    "interleaved pipelines": {"num_layers_per_virtual_pipeline_stage": 1, **TWO_STAGES},
    "hybrid context": {"hybrid_context_parallel": True},
    "fully sharded": {"use_torch_fsdp2": True},
    "fully sharded, by Megatron": {"use_megatron_fsdp": True},
    "CUDA graphs": {"cuda_graph_impl": "local"},
    "fp4": {"fp4_format": "e2m1", "bf16": True},
    "fp8 with scales": {**FP8, "fp8_recipe": "delayed"},
    "fp8 with scales, custom": {**FP8, "fp8_recipe": "custom"},
    "fp8 in Megatron's local": {**FP8, "transformer_impl": "local"},
    "fp8 outside": {**FP8, "fp8_output_proj": True},
    "static recompute": {"recompute_granularity": "selective"},
    "offloading": {"cpu_offloading_num_layers": 2},
    "overlapped tensor": {"tp_comm_overlap": True, "sequence_parallel": True, **SPLIT},
    "deferred embedding": {"defer_embedding_wgrad_compute": True, **TWO_STAGES},
    "position embeddings": {"position_embedding_type": "relative"},
    "position embeddings, of several axes": {"position_embedding_type": "mrope"},
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
    "clipping, its log": {"log_max_attention_logit": True},
    "dropout in attention": {"attention_dropout": 0.1},
    "MLA: one down-projection for both": {**LATENTS, "mla_down_proj_fusion": True},
    "MLA: one down-projection for both, latents cached": {**LATENTS, "cache_mla_latents": True},
    "DSA over context": {**SPARSE, "context_parallel_size": 2, "ranks": 2},
    "DSA with other kernels": {**SPARSE, "dsa_kernel_backend": "tilelang"},
    "DSA: several layers that share": {**SPARSE, "dsa_indexer_topk_freq": 2},
    "DSA in fp8": {**SPARSE, **FP8},
    "MTP with DSA": {**SPARSE, **MTP},
    "DSA within": {**SPARSE, "window_size": "8,0"},
    "Mamba's scan": {
        **HYBRID,
        "disable_mamba_mem_eff_path": True,
        "hybrid_layer_pattern": "M*-*",
    },
    "gated delta nets": {**HYBRID, "hybrid_layer_pattern": "G-*-", **SPLIT},
    "MoE: experts over parts": {
        **EXPERTS,
        **SPLIT,
        "num_experts": 6,
        "sequence_parallel": True,
        "expert_model_parallel_size": 3,
        "expert_tensor_parallel_size": 1,
        "ranks": 6,
    },
    "MoE: experts over several replicas with": {**SPREAD, "moe_token_dispatcher_type": "allgather"},
    "MoE: experts over several replicas whose": {
        **SPREAD,
        "use_tp_pp_dp_mapping": True,
        "pipeline_model_parallel_size": 2,
        "ranks": 4,
    },
    "MoE: tensor parallelism without": {**EXPERTS, **SPLIT},
    "MoE: biases of experts": {
        **EXPERTS,
        **SPLIT,
        "sequence_parallel": True,
        "disable_bias_linear": None,
    },
    "MoE: load balancing over": {**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"},
    "MoE: load balancing over, in part": {
        **EXPERTS,
        "moe_router_load_balancing_type": "aux_loss global_aux_loss",
        "moe_aux_loss_coeff": "0.1 0.1",
    },
    "MoE: experts of limited": {**EXPERTS, "moe_expert_capacity_factor": 1.0},
    "MoE: random routing": {**EXPERTS, "moe_input_jitter_eps": 0.1},
    "MoE: routing replay": {**EXPERTS, "moe_enable_routing_replay": True},
    "MoE: other token dispatchers": {**EXPERTS, "moe_token_dispatcher_type": "flex"},
    "MoE: token exchange overlapped": {
        **EXPERTS,
        "moe_shared_expert_overlap": True,
        "moe_shared_expert_intermediate_size": 32,
    },
    "MoE: upcycling": {**EXPERTS, "moe_use_upcycling": True},
    "windows": {"window_size": "8,2"},
    "windows, as long as the context": {"window_size": "128,0"},
    "MTP with tied": {
        **MTP,
        "untie_embeddings_and_output_weights": None,
        "pipeline_model_parallel_size": 3,
        "num_layers": 6,
        "ranks": 3,
    },
    "MTP with MoE in fp8": {**MTP, **EXPERTS, **FP8},
    "MTP layers that are not": {
        **MTP,
        "pipeline_model_parallel_layout": "Ett|ttm|L",
        "pipeline_model_parallel_size": 3,
        "ranks": 3,
    },
    "MTP losses without": {**MTP, "mtp_detach_heads": True, "epp_vocab_parallel": "on"},
    "an odd number of rotary": {"kv_channels": 9},
    "an odd number of rotary, of a part": {"kv_channels": 6, "rotary_percent": 0.5},
    "an odd number of rotary, of a width": {"hidden_size": 36},
    "several residual streams": {"enable_mhc_connections": True},
    "logits in a dtype other": {"output_logit_dtype": "fp32"},
    "residual connections in float32": {"fp32_residual_connection": True, "bf16": True},
    "MTP: hidden states of several predictions": {**MTP, "mtp_hsm": True},
}
# Other refusals of flags, with words of their lines.
OTHERS: list[tuple[dict[str, object], tuple[str, ...]]] = [
    ({"hybrid_layer_pattern": "*-"}, ("run megatron_epp.pretrain_hybrid with these",)),
    ({"hybrid": True}, ("--hybrid-layer-pattern is missing: pretrain_hybrid trains",)),
    (
        {"num_layers": 3, **TWO_STAGES},
        (
            "--num-layers 3: not divisible by --pipeline-model-parallel-size 2; expected a mult",
            "--decoder-last-pipeline-num-layers, or --pip",
        ),
    ),
]
# Flags of Megatron's main, which 0.19 does not know.
OF_MAIN = {"--enable-mhc-connections", "--output-logit-dtype", "--mtp-hsm"}


def row_of(words: str) -> Limit:
    (row,) = (row for row in TABLE if row.training and row.what.startswith(words.split(", ")[0]))
    return row


def test_refused_flags(tmp_path: Path) -> None:
    """Started in one process: a row that is refused when typed ends with its line; another starts,
    with a warning."""
    assert {row_of(words).what for words in STARTS} == {row.what for row in TABLE if row.training}
    cases = []
    for how in ({}, *STARTS.values(), *(how for how, _ in OTHERS)):
        changes = {"epp": True, "pipeline_model_parallel_size": 1, **how}
        ranks, hybrid = changes.pop("ranks", 1), changes.pop("hybrid", False)
        cases.append((ranks, hybrid, " ".join(map(str, flags(Path("corpus"), **changes))).split()))
    (tmp_path / "cases").write_text(json.dumps(cases))
    program = (STARTER, str(tmp_path / "cases"), str(tmp_path / "answers"))
    trained([], processes=0, program=program)
    first, *answers = json.loads((tmp_path / "answers").read_text())
    assert first == ["starts", None]
    for words, (ended, line) in zip(STARTS, answers, strict=False):
        row = row_of(words)
        if not row.typed:
            assert ended == "starts" and line is not None, (words, line)
            assert any(flag in line for flag in re.findall(r"--[a-z-]+[a-z]", row.what)), line
        elif words == "other attention":  # Megatron 0.19 has no other; a framework's may
            assert ended == "refused" and "invalid choice: 'another'" in line
        elif line is not None and line.startswith("unrecognized arguments: "):
            flag = line.split()[2].rstrip(";")
            assert flag in OF_MAIN and flag in row.what
        else:
            assert line == f"--epp does not run {row.what}: {row.instead}", words
    for (how, said), (ended, line) in zip(OTHERS, answers[len(STARTS) :], strict=True):
        assert ended == "refused" and all(part in line for part in said), (how, line)


def test_rows_name_flags_that_are_there() -> None:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_epp.mcore.job.read_flags import prepare_parser

    parser = prepare_parser(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    there = {option for action in parser._actions for option in action.option_strings}
    for row in filter(lambda row: row.training, TABLE):
        for flag in re.findall(r"(?<![\w.-])--[a-z0-9-]+", f"{row.what} {row.instead}"):
            assert flag in there or flag in OF_MAIN, row.what


# ------------------------------------------------------------------ what is no flag

MOE = {
    "num_experts": 4,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "allgather",
}

MTP_SEPARATOR = {
    "mtp_num_layers": 1,
    "untie_embeddings_and_output_weights": True,
    "pipeline_model_parallel_size": 3,
}


ENGINE_FP8 = {
    "fp8": "hybrid",
    "fp8_recipe": "blockwise",
    "transformer_impl": "transformer_engine",
}


def wanted(**changes: object) -> argparse.Namespace:
    """Flags as Megatron's parser leaves them, where a refusal is only a look at one of them."""
    given = {"attention_dropout": 0.0, "seq_length": 4096, "calculate_per_token_loss": True}
    return megatron_args(**{**given, "sft": False, "mock_data": False, **changes})


# What a script can set, and the command line cannot; by the first words of the row.
SET_BY_SCRIPTS = {
    "MoE: experts over several replicas with": {
        **MOE, "expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather",
    },
    "MoE: other token dispatchers": {**MOE, "moe_token_dispatcher_type": "flex"},
    "other attention": {"experimental_attention_variant": "gdn2"},
    "logits in a dtype other": {"logit_dtype": "fp32"},
    "several residual streams": {"enable_mhc_connections": True},
    "MTP: hidden states of several": {**MTP_SEPARATOR, "mtp_num_layers": 2, "mtp_hsm": True},
    "MoE: load balancing over": {**MOE, "moe_router_load_balancing_type": "quantile_balancing"},
}  # fmt: skip
FITS = (
    {},
    MOE,
    {"window_size": (128, 0), "softmax_type": "learnable"},
    {"kv_channels": 12, "rotary_percent": 0.5},
    {"kv_channels": 9, "position_embedding_type": "none"},
    *({**ENGINE_FP8, "fp8_recipe": recipe, "fp8_param_gather": True}
      for recipe in ("blockwise", "mxfp8", "tensorwise")),
    {**MOE, "moe_expert_capacity_factor": -1.0},  # none, to Megatron
    {**MTP_SEPARATOR, "mtp_hsm": False, "enable_mhc_connections": False, "logit_dtype": None},
)  # fmt: skip


def test_settings_of_scripts_are_refused_by_name() -> None:
    for fits in FITS:
        refuse(wanted(**fits))
    ignored = [row for row in TABLE if isinstance(row.training, str) and not row.typed]
    asked = {row.what: {row.training.split()[0]: 4} for row in ignored} | SET_BY_SCRIPTS
    assert all(row.what in asked or callable(row.training) for row in TABLE if not row.typed)
    for words, change in asked.items():
        row = row_of(words)
        with pytest.raises(ValueError) as refusal:
            refuse(wanted(**change))
        assert str(refusal.value) == f"--epp does not run {row.what}: {row.instead}"


def test_replicas_that_share_experts_divide_the_job() -> None:
    spread = {**MOE, "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 2}
    refuse(wanted(**spread, data_parallel_size=4))
    with pytest.raises(ValueError) as error:
        refuse(wanted(**spread, data_parallel_size=3))
    assert str(error.value) == (
        "--expert-model-parallel-size 2: with --expert-tensor-parallel-size 1 experts are sharded "
        "over 2 replicas; expected that to divide the 3 of the job"
    )


@pytest.mark.parametrize("variant", ["gated_delta_net", "gdn"])
def test_gated_delta_nets_by_both_names(variant):
    """Megatron's main calls them gdn, and takes the older name for it."""
    from megatron_epp.mcore.kinds.mla.kind import MLAKind
    from megatron_epp.mcore.kinds.registry import LAYER_KINDS
    from megatron_epp.mcore.kinds.ssm.kind import GatedDeltaNetKind

    nets = next(kind for kind in LAYER_KINDS if isinstance(kind, GatedDeltaNetKind))
    args = wanted(
        experimental_attention_variant=variant,
        num_layers=4,
        linear_attention_freq=2,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        multi_latent_attention=True,
    )
    assert nets.asked(args) and nets.layers(args) == (True, False, True, False)
    assert nets.in_layers(args, [True, False]) == {"linear_attention_freq": [1, 0]}
    nets.require(args, 2)
    with pytest.raises(ValueError, match="4 heads in 2 groups do not divide"):
        nets.require(args, 4)
    latents = next(kind for kind in LAYER_KINDS if isinstance(kind, MLAKind))
    assert latents.layers(args) == (False, True, False, True)
    args.linear_attention_freq = None
    with pytest.raises(ValueError, match=f"^--experimental-attention-variant {variant}: --linear"):
        nets.layers(args)


def test_scales_that_are_no_powers_of_two(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    refuse(wanted())
    with pytest.raises(ValueError, match=r"^NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1: .+; unset it$"):
        refuse(wanted(**ENGINE_FP8))


def test_a_context_without_a_token():
    with pytest.raises(ValueError, match=r"^--seq-length 0: expected .+ at least 1 token$"):
        refuse(wanted(seq_length=0))


GPU_ONLY = {
    "distributed_backend": "nccl",
    "transformer_impl": "transformer_engine",
    "cuda_graph_impl": "local",
    "enable_cuda_graph": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "fp16": True,
    "tp_comm_overlap": True,
    "use_megatron_fsdp": True,
    "use_torch_fsdp2": True,
    "use_flash_attn": True,
    "optimizer_cpu_offload": True,
    "use_precision_aware_optimizer": True,
    "ddp_average_in_collective": True,
    "async_save": True,
}


def test_what_needs_a_gpu_is_refused_without_one():
    cpu = {"distributed_backend": "gloo", "transformer_impl": "local"}
    refuse_gpu_flags(argparse.Namespace(**cpu))
    assert {*GPU_ONLY} == {name for row in TABLE for name in row.no_gpu}
    for name, value in GPU_ONLY.items():
        args = argparse.Namespace(**{**cpu, name: value})
        with pytest.raises(ValueError, match=r"^--.+: this host has no CUDA GPU; ") as refusal:
            refuse_gpu_flags(args)
        shown = flag_of(name) if value is True else f"{flag_of(name)} {value}: "
        assert str(refusal.value).startswith(shown)


def test_flags_are_the_fields_of_the_configuration():
    parser = add_arguments(argparse.ArgumentParser())
    assert Config.of(parser.parse_args([])) == Config()
    words = ["--epp", "--epp-memory-budget-gib", "1.5", "--no-epp-plan-ahead", "--epp-plan", "x"]
    expected = Config(epp=True, epp_memory_budget_gib=(1.5,), epp_plan_ahead=False, epp_plan="x")
    assert Config.of(parser.parse_args(words)) == expected


# ------------------------------------------------------------------ whole runs

# In the first tier one refused rank, two that disagree and one that is killed; the others start as
# the first one does.
everything = pytest.mark.everything
ONE = {"pipeline_model_parallel_size": 1, "epp": True}


def test_a_run_without_data_is_one_line(corpus):
    refused(flags(corpus, data_path="gone/nothing", **ONE), "nothing.idx")


@everything
@pytest.mark.parametrize(
    ("changes", "processes", "said"),
    [
        ({"epp_mla_keeps": "auto", **ONE}, 1, ["--epp-mla-keeps was removed; leave it out; multi"]),
        ({"epp_partition": "auto"}, 2, ["--epp-partition was removed; leave it out: --epp-pla"]),
        ({"vocab_size": 50, "make_vocab_size_divisible_by": 1, **ONE}, 1, ["vocab"]),
        ({"epp_planner": "pakcing", **ONE}, 1, ["pakcing", "packing"]),
        ({"epp_memory_budget_gib": 1e-6, **ONE}, 1, ["GiB"]),
    ],
)
def test_what_cannot_be_trained_is_one_line(corpus, changes, processes, said):
    refused(flags(corpus, **{"epp": True, **changes}), *said, processes=processes)


@everything
@pytest.mark.parametrize("flag", ["epp_plan", "epp_cost_model"])
def test_a_pipe_in_the_place_of_a_file(corpus, tmp_path, flag):
    """Nobody waits for somebody to write into it."""
    os.mkfifo(pipe := tmp_path / "pipe.json")
    refused(flags(corpus, **{flag: pipe}, **ONE), f"{pipe}: is a pipe; expected")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_iters": 0}, "--train-iters and --train-samples: neither is given, or it is 0"),
        ({"train_iters": None}, "--train-iters and --train-samples: neither is given, or it is 0"),
        ({"train_iters": -1}, "--train-iters -1: expected at least 1"),
        ({"eval_iters": -1}, "--eval-iters -1, --eval-interval 100: expected 0 or more"),
        ({"phase_transition_iterations": "2"}, "finds the length of a phase by --train-samples"),
    ],
)
def test_a_training_of_no_length(changes, said):
    good = {"train_iters": 3, "train_samples": None, "eval_iters": 2, "eval_interval": 100}
    good |= {"phase_transition_iterations": None}
    entry._require_iterations(argparse.Namespace(**good))
    with pytest.raises(ValueError, match=said):
        entry._require_iterations(argparse.Namespace(**{**good, **changes}))


@everything
@pytest.mark.parametrize("ours", [{"epp": True}, {"micro_batch_size": 1}])
def test_an_evaluation_on_nothing(corpus, ours):
    words = flags(corpus, pipeline_model_parallel_size=1, eval_iters=2, **ours)
    refused(words, "--eval-iters: there is nothing to evaluate on")


def one_chunk_each(lengths: list[int], layers: tuple[int, ...]) -> Plan:
    """Every document a chunk, forward and backward of one after the other."""
    order = tuple(
        Op(kind, chunk) for chunk in range(len(lengths)) for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    return Plan(
        documents=tuple(lengths),
        layers=layers,
        chunks=tuple(Chunk((Span(d, 0, length),)) for d, length in enumerate(lengths)),
        recompute=tuple(("k" * count,) * len(lengths) for count in layers),
        orders=(order,) * len(layers),
    )


@everything
@pytest.mark.parametrize(
    ("name", "layers", "said"),
    [
        ("plan", (4,), "7 inputs in document 0; the batch's document 0 has"),
        ("iteration-000001.step", (2, 2), "2 stages of 2 2 layers; this job has 1 stage of 4 laye"),
    ],
)
def test_a_plan_for_another_job(corpus, tmp_path, name, layers, said):
    """A file, or a folder of a file for each iteration."""
    step = Step.parse(str(one_chunk_each([7] * 6, layers)))
    (tmp_path / name).write_text(str(step))
    given = tmp_path / name if name == "plan" else tmp_path
    words = flags(corpus, epp_plan=given, **ONE)
    refused(words, f"--epp-plan {tmp_path / name}: the plan is for {said}")


def test_ranks_that_hold_different_plans(corpus, tmp_path, monkeypatch):
    for rank, length in enumerate((7, 8)):
        folder = tmp_path / str(rank)
        folder.mkdir()
        plan = one_chunk_each([length] * 6, (2, 2))
        (folder / "plans").write_text(str(Step.parse(str(plan))))
    monkeypatch.setenv("EPP_TEST_FOLDER", str(tmp_path))
    words = flags(corpus, epp_plan="plans", epp=True)
    elsewhere = (str(Path(__file__).with_name("elsewhere.py")),)
    refused(words, "digest", processes=2, program=elsewhere)


KILLED = """
import os, signal
from megatron_epp.mcore.patching import cpu_host
cpu_host.install_cpu_host()
from megatron_epp.mcore.model.stage import ModelStage
from megatron_epp.mcore.trainer import entry, hooks
made = []
class Killed(ModelStage):
    def forward(self, chunk, received):
        if os.environ["RANK"] == "1" and len(made) > 1 and chunk > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(chunk, received)
def make_stage(*arguments, **others):
    made.append(None)
    return Killed(*arguments, **others)
if __name__ == "__main__":
    entry.main(hooks=hooks.TrainerHooks(make_stage=make_stage))
"""


def test_a_killed_rank_ends_the_job_and_its_neighbour_says_what_it_waited_for(
    corpus, tmp_path, monkeypatch
):
    """In the midst of iteration 2; by itself, however long its launcher leaves it alone (that a
    launcher ends it: test_ending.py)."""
    monkeypatch.setattr(runs, "POLL_SECONDS", LAST_RESORT_SECONDS)
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    killed = train(flags(corpus, epp=True, epp_planner="packing"), program=(str(program),))
    assert killed.statuses == (1, -signal.SIGKILL), killed.output
    # As soon as the link is lost, and not when the groups' time is up.
    assert "given up" not in killed.output and "Timed out" not in killed.output
    said = r"pipeline rank 0, (stage 0, )?iteration 2: waited for "
    assert re.search(said, killed.output), killed.output[-3000:]
