"""Megatron's flags that have no effect under a plan: --epp resets these flags with a warning.

Scripts for Megatron's schedules contain flags for methods to save memory and fill the pipeline.
With --epp, the plan of each iteration determines both, and the loss is the same. So the parser
resets such a flag to a value without effect, before Megatron's own checks. Rank 0 prints one
warning that names the flags and their replacements. Flags that would change results are refused
(capabilities/).
"""

import argparse
import logging
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# Attribute of Megatron's args, not a flag: one text per reset flag, for rank 0's warning.
TAKEN = "epp_replaced"
NO_TOKEN_LOSS = "--no-calculate-per-token-loss"


@dataclass(frozen=True, slots=True)
class ReplacedFlags:
    """Flags of Megatron that have no effect under a plan.

    Attributes:
        names: Attributes of the parsed args, separated by blanks. Names that this version of
            Megatron does not have are skipped.
        by: Text for the warning, which says what replaces the flags.
        neutral: Function (args) -> values without effect, by name. A name that is not in the
            result is reset to the parser's default.
        same: Function (args) -> whether results are equal without the flags. If not, the parser
            keeps the flags, and the table of unsupported features refuses them.
        default_too: Whether the parser's default values are also reset, with a warning.
        untyped: Whether the parser resets the flags only if the user has not typed them.
    """

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
        "the planner chooses which layers to recompute for each stage and chunk, within "
        "--epp-memory-budget-gib",
    ),
    ReplacedFlags(
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
        "microbatch_group_size_per_vp_stage overlap_p2p_comm overlap_p2p_comm_warmup_flush "
        "overlap_param_gather_with_optimizer_step",
        "--epp-placement auto reads the number of stages per rank from these flags; messages "
        "overlap ops",
    ),
    ReplacedFlags(
        "cuda_graph_impl enable_cuda_graph external_cuda_graph cuda_graph_modules "
        "cuda_graph_scope_deprecated cuda_graph_warmup_steps",
        "graphs cannot be captured, because chunks have new shapes in every iteration",
    ),
    ReplacedFlags(
        "tp_comm_overlap tp_comm_overlap_cfg tp_comm_overlap_ag tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_split_ag "
        "tp_comm_split_rs tp_comm_bootstrap_backend",
        "chunks differ in shape, but the buffers of this overlap have a fixed shape",
    ),
    ReplacedFlags(
        "cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers "
        "fine_grained_activation_offloading offload_modules min_offloaded_tensor_size "
        "delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks "
        "activation_offload_fraction fine_grained_offloading_max_inflight_offloads",
        "plans recompute layers, or offload them with lever offload, as --epp-memory-budget-gib "
        "requires",
    ),
    ReplacedFlags(
        "micro_batch_size eval_micro_batch_size",
        "the planner forms the chunks; --global-batch-size counts documents",
        neutral=lambda args: {"micro_batch_size": 1},
    ),
    ReplacedFlags(
        "calculate_per_token_loss",
        "the loss is the mean over all tokens of the batch",
        neutral=lambda args: {"calculate_per_token_loss": True},
        # With masked tokens, Megatron's micro-batches weight them differently: refused.
        same=lambda args: not args.eod_mask_loss,
    ),
    ReplacedFlags(
        "defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute",
        "weight gradients of the LM head are computed in its forward, others in the plan's W ops",
    ),
    ReplacedFlags(
        "moe_shared_expert_overlap overlap_moe_expert_parallel_comm "
        "overlap_dispatch_backward_with_experts_wgrad",
        "the token exchange of one half of a large chunk overlaps the computation of the other "
        "half",
    ),
    ReplacedFlags(
        "cp_comm_type",
        "context-parallel ranks exchange rows for heads (Ulysses)",
    ),
    ReplacedFlags(
        "use_flash_attn",
        "--epp-attention selects the attention kernels",
    ),
    ReplacedFlags(
        "reset_position_ids reset_attention_mask dataloader_inter_document_masking",
        "in every document, positions start at 0, and tokens attend only to this document",
    ),
    ReplacedFlags(
        "dataloader_type",
        "documents are read in the order of single in any case; other values are refused",
        neutral=lambda args: {"dataloader_type": "external"},
        same=lambda args: args.dataloader_type == "single",
    ),
)


def watch(
    parser: argparse.ArgumentParser, rows: Sequence[ReplacedFlags] = REPLACED
) -> argparse.ArgumentParser:
    """Make ``parser`` reset the flags of ``rows`` if --epp is given, and return ``parser``.

    The parser also accepts --no-calculate-per-token-loss, which frameworks around Megatron pass.
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
    """Reset flags in ``args``; append one text for each of ``rows`` to ``args.epp_replaced``.

    Rows without a flag to reset are skipped.

    Args:
        args: The parsed flags.
        parser: Megatron's parser.
        words: The user's command line.
        rows: Flags to reset.
    """
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
    """Return a flag in the user's spelling, followed by its value unless that is a bool.

    ``options`` are the spellings of the flag; ``typed`` are the flags on the command line.
    """
    name = next((option for option in options if option in typed), options[0])
    if isinstance(value, bool):
        return name
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join([name, *(str(getattr(one, "name", one)) for one in values)])


def warning(args: argparse.Namespace) -> str | None:
    """Return a warning that names the flags that the parser has reset in ``args``, or None."""
    taken = getattr(args, TAKEN, None)
    if not taken:
        return None
    return f"megatron_epp: with --epp these flags have no effect: {'; '.join(taken)}"


def warn(args: argparse.Namespace) -> None:
    """Log the text of :func:`warning` on rank 0."""
    if args.rank == 0 and (line := warning(args)) is not None:
        logger.warning("%s", line)
