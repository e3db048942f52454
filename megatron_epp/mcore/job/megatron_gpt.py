"""Datasets, batches, forward step and loss of Megatron's own GPT training, without ``--epp``.

The megatron-core wheel contains the trainer, but not Megatron-LM's script pretrain_gpt.py, which
defines these functions. This module and that script have the same results, bit for bit.

Shapes: B samples of a micro-batch, S tokens of a sample (the context), C document boundaries of a
packed batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_epp.corpus.idx_file import examine
from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.data.data_flags import blends_of
from megatron_epp.mcore.data.documents import dataset_fields
from megatron_epp.mcore.placing.requested import place_of
from megatron_epp.safe_files import bounded_text

# All keys of a batch; a dataset omits those that it does not produce.
BATCH_TENSORS = (
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "hybrid_cp_group",
    "labels",
    "local_cp_size",
    "loss_mask",
    "max_seqlen",
    "position_ids",
    "tokens",
)
# --check-for-spiky-loss: a loss more than this many times the largest earlier loss is a spike.
SPIKE_FACTOR = 10


# ------------------------------------------------------------------ forward step and loss


def forward_step(
    data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """Run one micro-batch through this stage; return the stage's output and the loss function.

    With ``return_schedule_plan`` (Megatron's overlap of expert communication), the function returns
    the model's schedule plan instead of the output. Only the last stage calls the loss function.
    """
    args, timers, straggler = get_args(), get_timers(), StragglerDetector()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
        packed = packed_sequences(batch, args.seq_length)
    timers("batch-generator").stop()

    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with straggler:
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, **targets)
        else:
            output = model(*inputs, **targets, packed_seq_params=packed)
    return output, partial(loss, batch["loss_mask"])


def loss(
    loss_mask_BS: torch.Tensor, token_losses_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum of the losses of unmasked tokens, number of these tokens, values to log)."""
    args = get_args()
    mask = loss_mask_BS.view(-1).float()
    total = torch.sum(token_losses_BS.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    validate(total, args)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.view(1)])}


def validate(total: torch.Tensor, args: argparse.Namespace) -> None:
    """Validate the loss with Megatron's re-run machine, which repeats a rejected iteration.

    ``total`` is the summed loss. Flags select checks for NaN, infinity and spikes. The forward pass
    is deterministic, so the tolerance between an iteration and its repeat is 0.
    """
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for rejection, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=total,
                rejection_func=rejection,
                message=f"found {what} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=total,
            rejection_func=partial(
                machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


# ------------------------------------------------------------------ batches


def next_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """Return the tensors of the next micro-batch by name; None for those not needed on this rank.

    Tensor-parallel rank 0 reads the batch and broadcasts it. Stages between the first and the last
    need only the boundaries of packed documents, unless they have MTP layers. Each context-parallel
    rank gets its shard of the tokens.
    """
    args = get_args()
    at_an_end = is_first_or_last_pipeline_stage(vp_stage)
    has_mtp = _holds_mtp(args, vp_stage)
    has_boundaries = args.sft or args.dataloader_inter_document_masking
    if not (at_an_end or has_mtp or has_boundaries):
        return dict.fromkeys(BATCH_TENSORS)

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        batch = next(data_iterator)
        for name in BATCH_TENSORS:
            tensor = batch.get(name)
            batch[name] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=has_boundaries,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if not (at_an_end or has_mtp):
        boundaries = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        return dict.fromkeys(BATCH_TENSORS) | {name: batch[name] for name in boundaries}
    return get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=args.hybrid_context_parallel,
        cp_group=parallel_state.get_context_parallel_group(),
        hybrid_cp_group_func=parallel_state.get_hybrid_data_context_parallel_groups,
        use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
    )


def packed_sequences(batch: dict[str, Any], tokens_per_sample: int) -> PackedSeqParams | None:
    """Return the document boundaries of a packed batch; None if the batch is not packed.

    Megatron's count of floating-point operations uses the boundaries without padding. The attention
    uses the padded boundaries, if there are any, because Megatron 0.19's attention accepts only one
    kind.
    """
    if batch["cu_seqlens"] is None:
        return None
    boundaries_C = batch["cu_seqlens"].squeeze(0)
    padded_C = batch["cu_seqlens_padded"]
    padded_C = None if padded_C is None else padded_C.squeeze(0)
    update_seqlen_stats_from_cu_seqlens(boundaries_C)
    used_C = boundaries_C if padded_C is None else padded_C
    longest = int(batch["max_seqlen"].item())
    cp_size = batch["local_cp_size"]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=used_C,
        cu_seqlens_kv=used_C,
        cu_seqlens_q_padded=padded_C,
        cu_seqlens_kv_padded=padded_C,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None if cp_size is None else int(cp_size.item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=tokens_per_sample,
    )


def _holds_mtp(args: argparse.Namespace, vp_stage: int | None) -> bool:
    """Return whether this stage has MTP layers."""
    config = core_transformer_config_from_args(args)
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


# ------------------------------------------------------------------ datasets


def datasets(samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return the training, validation and test sets.

    ``samples`` are the minimum numbers of samples of the three sets; None means one epoch.
    ``vp_stage`` is the virtual pipeline stage for which the sets are built; None without virtual
    stages.

    Raises:
        ValueError: The data flags are invalid, a corpus file is missing or damaged, or the job
            evaluates without validation data.
    """
    args = get_args()
    _examine_corpus(args)
    print_rank_0("> building the training, validation and test sets ...")
    config = dataset_config(args)
    per_split = config.blend_per_split
    require_validation(args, bool(config.split_matrix[1] if per_split is None else per_split[1]))
    built = BlendedMegatronDatasetBuilder(
        _kind_of_dataset(args), samples, partial(_reads_data, vp_stage), config
    ).build()
    print_rank_0("> the sets are built")
    return tuple(built)


# Megatron reads this attribute: every rank calls ``datasets``, and builds what it needs.
datasets.is_distributed = True  # type: ignore[attr-defined]


def require_validation(args: argparse.Namespace, there: bool) -> None:
    """Refuse a job that evaluates without validation data, before Megatron fails at evaluation.

    Raises:
        ValueError: The job evaluates, but there is no validation data (``there`` is False).
    """
    if not there and (args.eval_iters or args.full_validation):
        raise ValueError(
            "--eval-iters: there is nothing to evaluate on, as no part of the corpus is for "
            "validation; give one (--split 99,1,0, or --valid-data-path), or --eval-iters 0"
        )


def _examine_corpus(args: argparse.Namespace) -> None:
    """Refuse a damaged corpus before Megatron opens it.

    Megatron opens the corpus on some ranks while the other ranks wait at a barrier, where an error
    would leave them blocked. In this function, every rank finds the error.

    Raises:
        ValueError: A corpus file is missing or damaged; the message names the file.
    """
    if args.mock_data or args.sft or args.object_storage_cache_path is not None:
        return
    blend, blend_per_split = blends_of(args)
    for prefixes, _ in filter(None, [blend, *(blend_per_split or ())]):
        for prefix in prefixes:
            if not prefix.startswith(("s3://", "msc://")):
                examine(prefix)


def _kind_of_dataset(args: argparse.Namespace) -> type:
    if args.sft:
        return SFTDataset
    return MockGPTDataset if args.mock_data else GPTDataset


def _reads_data(vp_stage: int | None = None) -> bool:
    """Return whether this rank builds the datasets.

    On stages that need data, tensor-parallel rank 0 builds the datasets.
    """
    args = get_args()
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    return args.sft or is_first_or_last_pipeline_stage(vp_stage) or _holds_mtp(args, vp_stage)


def _sequences_of(path: str) -> Any:
    """Return the parsed JSON file of --per-dataset-sequences-path.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        return json.loads(bounded_text(path, "a number of sequences for every corpus, in JSON"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--per-dataset-sequences-path {path}: {error}") from error


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Return the dataset configuration that Megatron's flags describe."""
    blend, blend_per_split = blends_of(args)
    path = args.per_dataset_sequences_path
    fields: dict[str, Any] = {
        **dataset_fields(args, build_tokenizer(args)),
        "blend": blend,
        "blend_per_split": blend_per_split,
        "sequences_per_dataset": None if path is None else _sequences_of(path),
        # contents of a sample
        "reset_position_ids": args.reset_position_ids,
        "reset_attention_mask": args.reset_attention_mask,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "inter_document_masking": args.dataloader_inter_document_masking,
        # sharding of its tokens
        "context_parallel_size": args.context_parallel_size,
        "data_parallel_size": args.data_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "hybrid_context_parallel": args.hybrid_context_parallel,
        # reading of files
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
    }
    return GPTDatasetConfig(**fields)


# ------------------------------------------------------------------ placement


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold a word embedding.

    These are the rank of the first stage and the ranks with MTP layers. With tied embeddings, the
    rank of the last stage holds an embedding too, except with vocabulary parallelism.
    """
    args = get_args()
    first, *_ = place_of(args) or (0,)
    holders = {pipeline_ranks[first]}
    if len(pipeline_ranks) > 1:
        # With vocabulary parallelism, lm_head/tied.py keeps the copies equal.
        tied = not args.untie_embeddings_and_output_weights
        if tied and not vocabulary_parallel(args):
            holders.add(pipeline_ranks[-1])
        holders.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(holders)


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Refuse features of Megatron-LM's script that this module does not support.

    Raises:
        ValueError: --logits-load-dir is given, or --fim-data without --epp.
    """
    asked = {
        "--logits-load-dir: distillation from cached logits": args.logits_load_dir is not None,
        "--fim-data: fill-in-the-middle": args.fim_data and not args.epp,  # else by the table
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise ValueError(f"{what} is not supported here; use Megatron-LM's own script for it")
