"""Megatron's flags whose job a plan does: taken out with one warning, not refused.

Scripts written for Megatron's schedules say how to save memory and how to fill the pipeline. A plan
decides both, for every iteration anew, and computes the same loss. So with --epp such a flag is
read, set back to what Megatron takes without it before Megatron's own checks, and named once by
rank 0 together with what does its job. What would change results is refused (capabilities/).
"""

import argparse
import logging
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# On Megatron's args, not a flag: what was taken out, a line each, to be said by rank 0.
TAKEN = "epp_replaced"
NO_TOKEN_LOSS = "--no-calculate-per-token-loss"


@dataclass(frozen=True, slots=True)
class ReplacedFlags:
    """``names``: destinations of Megatron's parser, blanks between; those that a version lacks are
    passed over. ``by``: what does the job. ``neutral``: of ``args`` as they are given, values to
    set where they are not the parser's defaults. ``same``: whether ``args`` ask for what gives the
    same results. ``default_too``: whether the parser's own defaults are taken out; ``untyped``:
    they alone, where the user typed nothing."""

    names: str
    by: str
    neutral: Callable[[argparse.Namespace], Mapping[str, Any]] = lambda args: {}
    same: Callable[[argparse.Namespace], bool] = lambda args: True
    default_too: bool = False
    untyped: bool = False


REPLACED = (
    ReplacedFlags(
        "recompute_granularity recompute_activations recompute_method recompute_num_layers "
        "recompute_modules moe_layer_recompute distribute_saved_activations",
        "every plan recomputes what memory asks for, per stage, chunk and layer: "
        "--epp-memory-budget-gib",
    ),
    ReplacedFlags(
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
        "microbatch_group_size_per_vp_stage overlap_p2p_comm overlap_p2p_comm_warmup_flush "
        "overlap_param_gather_with_optimizer_step",
        "--epp-placement flags takes several stages a rank from them; messages go while ops "
        "compute",
    ),
    ReplacedFlags(
        "cuda_graph_impl enable_cuda_graph external_cuda_graph cuda_graph_modules "
        "cuda_graph_scope_deprecated cuda_graph_warmup_steps",
        "nothing is captured: chunks have new shapes in every iteration",
    ),
    ReplacedFlags(
        "tp_comm_overlap tp_comm_overlap_cfg tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_split_ag "
        "tp_comm_split_rs tp_comm_bootstrap_backend",
        "tensor-parallel communication goes without buffers of one fixed shape",
    ),
    ReplacedFlags(
        "cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers "
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
        "delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks "
        "activation_offload_fraction fine_grained_offloading_max_inflight_offloads",
        "plans recompute, or offload with the lever offload: --epp-memory-budget-gib",
    ),
    ReplacedFlags(
        "micro_batch_size eval_micro_batch_size",
        "a plan says what is computed together; --global-batch-size counts documents",
        neutral=lambda args: {"micro_batch_size": 1},
    ),
    ReplacedFlags(
        "calculate_per_token_loss",
        "the loss is the mean over all tokens of the batch, which the mean of micro-batches of "
        "equally many tokens is, too",
        neutral=lambda args: {"calculate_per_token_loss": True},
        # With masked tokens Megatron's micro-batches weigh them differently: refused.
        same=lambda args: not args.eod_mask_loss,
    ),
    ReplacedFlags(
        "defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute",
        "the output layer's gradients come with its forward, others where a plan puts its W ops: "
        "--epp-levers",
    ),
    ReplacedFlags(
        "moe_shared_expert_overlap overlap_moe_expert_parallel_comm "
        "overlap_dispatch_backward_with_experts_wgrad",
        "experts are exchanged and computed one after the other; chunks of other documents keep "
        "the other stages busy",
    ),
    ReplacedFlags(
        "cp_comm_type",
        "context-parallel ranks exchange rows for heads",
    ),
    ReplacedFlags(
        "use_flash_attn",
        "the attention of slices: --epp-attention",
    ),
    ReplacedFlags(
        "reset_position_ids reset_attention_mask dataloader_inter_document_masking",
        "positions start anew in every document, and each attends to itself alone",
    ),
    ReplacedFlags(
        "dataloader_type",
        "documents come in Megatron's order of samples, which single means, too",
        neutral=lambda args: {"dataloader_type": "external"},
        same=lambda args: args.dataloader_type == "single",
    ),
)


def watch(
    parser: argparse.ArgumentParser, rows: Sequence[ReplacedFlags] = REPLACED
) -> argparse.ArgumentParser:
    """Have ``parser`` take these flags out where --epp is among what it parses; the parser.

    It also learns to be told --no-calculate-per-token-loss, as frameworks around Megatron are.
    """
    known = {option for action in parser._actions for option in action.option_strings}
    if "--calculate-per-token-loss" in known and NO_TOKEN_LOSS not in known:
        parser.add_argument(
            NO_TOKEN_LOSS,
            action="store_false",
            dest="calculate_per_token_loss",
            default=parser.get_default("calculate_per_token_loss"),
            help="The loss is a mean of micro-batches: what Megatron does by default.",
        )
    parse = parser.parse_args

    def parse_args(words: Sequence[str] | None = None, namespace: Any = None) -> Any:
        args = parse(words, namespace)
        if args.epp:
            take_out(args, parser, sys.argv[1:] if words is None else words, rows)
        return args

    parser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    return parser


def take_out(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    rows: Sequence[ReplacedFlags],
) -> None:
    """Set these flags of ``args`` back; what was taken is noted there. ``words``: as typed."""
    options: dict[str, list[str]] = {}
    for action in parser._actions:
        options.setdefault(action.dest, []).extend(action.option_strings)
    typed = {word.split("=")[0] for word in words}
    taken = [*getattr(args, TAKEN, ())]
    for one in rows:
        known = [name for name in one.names.split() if name in options]
        instead = one.neutral(args)
        neutral = {name: instead.get(name, parser.get_default(name)) for name in known}
        default = {name: () if one.default_too else (parser.get_default(name),) for name in known}
        harmless = {name: (*default[name], neutral[name], None) for name in known}
        asked = [name for name in known if getattr(args, name) not in harmless[name]]
        if one.untyped:
            asked = [name for name in asked if typed.isdisjoint(options[name])]
        if not asked or not one.same(args):
            continue
        shown = (_as_typed(options[name], getattr(args, name), typed) for name in asked)
        taken.append(f"{', '.join(shown)} ({one.by})")
        vars(args).update((name, neutral[name]) for name in asked)
    setattr(args, TAKEN, taken)


def _as_typed(options: Sequence[str], value: Any, typed: Container[str]) -> str:
    """The flag as the user wrote it, with its value where it has one."""
    name = next((option for option in options if option in typed), options[0])
    if isinstance(value, bool):
        return name
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([name, *(str(getattr(one, "name", one)) for one in values)])


def warning(args: argparse.Namespace) -> str | None:
    """The one line about what was taken out of ``args``; None where nothing was."""
    taken = getattr(args, TAKEN, None)
    if not taken:
        return None
    return f"megatron_epp: with --epp these flags have no effect: {'; '.join(taken)}"


def warn(args: argparse.Namespace) -> None:
    """Say it, once in a job: on rank 0."""
    if args.rank == 0 and (line := warning(args)) is not None:
        logger.warning("%s", line)
