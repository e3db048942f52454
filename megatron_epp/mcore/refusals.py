"""What of Megatron's features cannot run through elastic pipelines: refused at start, by name."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from megatron_epp.layers.attention.ulysses import refuse_heads


@dataclass(frozen=True, slots=True)
class Refusal:
    """``asked(args)`` tells whether the user wants ``what``; ``instead`` says what to do."""

    what: str
    instead: str
    asked: Callable[[argparse.Namespace], bool]


def _given(name: str, *harmless: object) -> Callable[[argparse.Namespace], bool]:
    """Whether flag ``name`` has a value other than None, False and the harmless ones."""

    def asked(args: argparse.Namespace) -> bool:
        value = getattr(args, name, None)
        return value is not None and value is not False and value not in harmless

    return asked


REFUSALS = (
    Refusal(
        "interleaved pipelines (--virtual-pipeline-model-parallel-size and its kin)",
        "leave them out: slices of long documents shrink the warm-up instead",
        lambda args: bool(
            args.virtual_pipeline_model_parallel_size
            or args.num_layers_per_virtual_pipeline_stage
            or args.num_virtual_stages_per_pipeline_rank
        ),
    ),
    Refusal(
        "mixture of experts (--num-experts)",
        "train a dense model, or run without --epp: expert groups span replicas, plans do not",
        _given("num_experts"),
    ),
    Refusal(
        "multi-token prediction (--mtp-num-layers)",
        "leave it out: it reads tokens behind the end of a slice",
        _given("mtp_num_layers", 0),
    ),
    Refusal(
        "multi-latent attention (--multi-latent-attention)",
        "use grouped-query attention, or run without --epp",
        _given("multi_latent_attention"),
    ),
    Refusal(
        "sliding-window attention (--window-size)",
        "leave it out: a slice attends to its whole context",
        _given("window_size"),
    ),
    Refusal(
        "other attention variants (--experimental-attention-variant, --softmax-type)",
        "use plain softmax attention, or run without --epp",
        lambda args: (
            _given("experimental_attention_variant")(args)
            or getattr(args, "softmax_type", "vanilla") != "vanilla"
        ),
    ),
    Refusal(
        "dropout in attention (--attention-dropout above 0)",
        "give --attention-dropout 0: how a document is cut must not change its loss",
        lambda args: args.attention_dropout > 0,
    ),
    Refusal(
        "hybrid context parallelism (--hybrid-context-parallel)",
        "leave it out: the plan cuts long documents; --context-parallel-size N spreads each chunk",
        _given("hybrid_context_parallel"),
    ),
    Refusal(
        "fully sharded data parallelism (--use-megatron-fsdp, --use-torch-fsdp2)",
        "give --use-distributed-optimizer, which shards the optimizer's state",
        lambda args: bool(args.use_megatron_fsdp or args.use_torch_fsdp2),
    ),
    Refusal(
        "CUDA graphs (--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph)",
        "leave them out: chunks have a new shape in every iteration",
        lambda args: (
            getattr(args, "cuda_graph_impl", "none") not in (None, "none")
            or bool(getattr(args, "enable_cuda_graph", False))
            or bool(getattr(args, "external_cuda_graph", False))
        ),
    ),
    Refusal(
        "fp8 and fp4 (--fp8-format, --fp4-format)",
        "train in bf16",
        lambda args: bool(getattr(args, "fp8", None) or getattr(args, "fp4", None)),
    ),
    Refusal(
        "batch-size ramp-up (--rampup-batch-size, --step-batch-size-schedule)",
        "give one --global-batch-size: the number of documents in every iteration",
        lambda args: bool(
            getattr(args, "rampup_batch_size", None)
            or getattr(args, "step_batch_size_schedule", None)
        ),
    ),
    Refusal(
        "static recompute (--recompute-granularity, --recompute-activations)",
        "give --epp-memory-budget-gib: the plan says what each stage recomputes for each chunk",
        lambda args: bool(args.recompute_granularity),
    ),
    Refusal(
        "offloading of activations (--cpu-offloading-num-layers, --fine-grained-...-offloading)",
        "leave it out and give --epp-memory-budget-gib",
        lambda args: bool(
            getattr(args, "cpu_offloading", False)
            or getattr(args, "cpu_offloading_num_layers", 0)
            or getattr(args, "fine_grained_activation_offloading", False)
        ),
    ),
    Refusal(
        "overlapped tensor-parallel communication (--tp-comm-overlap)",
        "leave it out: its buffers have one fixed shape",
        _given("tp_comm_overlap"),
    ),
    Refusal(
        "deferred embedding gradients (--defer-embedding-wgrad-compute)",
        "leave it out",
        _given("defer_embedding_wgrad_compute"),
    ),
    Refusal(
        "position embeddings other than rope, learned_absolute, none (--position-embedding-type)",
        "use one of these three",
        lambda args: args.position_embedding_type not in ("rope", "learned_absolute", "none"),
    ),
    Refusal(
        "micro-batches of several samples (--micro-batch-size above 1)",
        "leave --micro-batch-size out: the planner decides what is computed together",
        lambda args: args.micro_batch_size not in (None, 1),
    ),
    Refusal(
        "loss averaged per micro-batch (--no-calculate-per-token-loss)",
        "leave it out: chunks of different sizes must weigh by their tokens",
        lambda args: not args.calculate_per_token_loss,
    ),
    Refusal(
        "data paths with a layout of their own (--fim-data, --mock-data, ...)",
        "give --data-path with a .bin/.idx corpus (scripts/prepare_corpus.py makes one)",
        lambda args: bool(
            getattr(args, "fim_data", False)
            or args.mock_data
            or getattr(args, "dataloader_inter_document_masking", False)
            or getattr(args, "reset_position_ids", False)
            or getattr(args, "reset_attention_mask", False)
        ),
    ),
    Refusal(
        "skipped iterations and saved data loaders (--iterations-to-skip, --dataloader-save)",
        "leave them out: the documents of an iteration follow from the samples consumed",
        lambda args: bool(
            getattr(args, "iterations_to_skip", None) or getattr(args, "dataloader_save", None)
        ),
    ),
    Refusal(
        "another data loader (--dataloader-type)",
        "leave it out: documents come in Megatron's order of samples",
        lambda args: args.dataloader_type not in (None, "external"),
    ),
    Refusal(
        "hybrid, heterogeneous and multi-module models",
        "use a GPT model",
        lambda args: bool(
            getattr(args, "hybrid_layer_pattern", None)
            or getattr(args, "is_hybrid_model", False)
            or getattr(args, "heterogeneous_layers_config_path", None)
            or getattr(args, "heterogeneous_layers_config_encoded_json", None)
        ),
    ),
)


def refuse(args: argparse.Namespace) -> None:
    """Raise a ValueError that names the first feature ``args`` ask for and EPP cannot run."""
    for refusal in REFUSALS:
        if refusal.asked(args):
            raise ValueError(f"--epp does not run {refusal.what}: {refusal.instead}")
    if args.context_parallel_size > 1:
        ranks = args.tensor_model_parallel_size
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        try:
            refuse_heads(
                args.num_attention_heads // ranks,
                max(1, groups // ranks),
                args.context_parallel_size,
            )
        except ValueError as refusal:
            raise ValueError(
                f"--context-parallel-size {args.context_parallel_size}: {refusal}"
            ) from refusal
