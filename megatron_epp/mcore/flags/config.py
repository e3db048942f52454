"""The ``--epp`` flags, as fields of a dataclass with type, default and help text."""

import argparse
import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from math import lcm
from typing import Any, ClassVar

from megatron_epp.corpus.blend import BLENDS
from megatron_epp.flag_fields import (
    add_flags,
    flag,
    positive,
    refuse_removed,
    whole_number,
)
from megatron_epp.mcore.flags import replaced
from megatron_epp.mcore.patching import modelopt_flags
from megatron_epp.planner.padding import FEWER_GPU_ROWS, GPU_ROWS, MOST_PADDING, MOST_ROWS
from megatron_epp.planner.settings import shared_setting

# Attribute of Megatron's args, not a flag: whether Transformer Engine's linears accumulate weight
# gradients in their GEMMs, although gradient_accumulation_fusion is off.
FUSED_LINEARS = "epp_fused_linears"
# Attribute of Megatron's args, also saved next to the checkpoint: the layout chosen by
# --epp-layouts.
LAYOUT_KEY = "epp_layout"
# Attribute of Megatron's args, not a flag: why --epp-placement auto does not choose, for example
# because a flag places layers. It is missing if there is no reason.
PLACED_BY = "epp_placed_by"
PLACEMENT_AUTO = "auto"  # --epp-placement by document lengths, together with the layers
ANALYTIC = "analytic"  # --epp-cost-model from the model's shape, without measurement
# Megatron's flags that place layers on stages, by destination, with their neutral values.
PLACING_FLAGS: dict[str, Any] = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
MOST_CORES = 4096  # limit of --epp-plan-cores
# Flags of earlier versions, and what to do instead.
_REMOVED = {
    **dict.fromkeys(
        ("--epp-search-ahead", "--no-epp-search-ahead"),
        "leave it out; layouts for fewer devices are lines of the file of --epp-layouts",
    ),
    "--epp-mla-keeps": "leave it out; multi-latent attention caches K and V, as GPUs always did",
    "--epp-partition": "leave it out: --epp-placement auto, the default, chooses layers, too; "
    "--epp-placement even takes those of Megatron's flags",
}
DIVISIBLE_BY = 128  # Megatron's default of --make-vocab-size-divisible-by


ON, OFF = "on", "off"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Config:
    """The user's settings of elastic pipelines.

    Megatron's args hold the values as plain types, such as lists, so checkpoints can save them.

    Raises:
        ValueError: A number is outside its range.
    """

    TITLE: ClassVar = "elastic pipeline parallelism"

    epp: bool = flag(False, "Train with elastic pipelines; without it Megatron is unchanged.")
    epp_planner: str = shared_setting("planner")
    epp_levers: str = shared_setting("levers")
    epp_plan: str | None = flag(
        None,
        "Run these plans instead of planning: a file (the same plan in every iteration, refused "
        "if the document lengths differ) or a folder that --epp-record wrote.",
        metavar="PATH",
    )
    epp_layouts: str | None = flag(
        None,
        "File of allowed layouts, one per line (tp 1 pp 2 cp 1 ep 1 layers 4 4). Each start "
        "chooses the fastest of the layouts that use the most devices, in place of the degree "
        "flags; other ranks wait as spares. A resume on the same number of devices keeps its "
        "layout.",
        metavar="FILE",
    )
    epp_memory_budget_gib: tuple[float, ...] | None = shared_setting(
        "memory_budget_gib",
        " Default: on a GPU its budget in the catalogue, but at most 0.97 of the free memory; on a "
        "CPU 0.8 of the memory that is available after 400 MiB are subtracted for each planner "
        "process, divided by the number of local ranks.",
    )
    epp_memory_limit_gib: float | None = flag(
        None,
        "On a CPU-only host, the size in GiB at which the chunks of a rank run out of memory, to "
        "test how training reacts. Training continues with plans that need less (default: none).",
        ("GIB", positive("GiB")),
    )
    epp_host_memory_gib: float | None = shared_setting(
        "host_memory_gib",
        " On a GPU host it is pinned. Default: half of the available memory (0.15 of it on a "
        "CPU-only host), divided by the number of local ranks.",
    )
    epp_attention: str = flag(
        "auto",
        "Attention kernels on a GPU: te (Transformer Engine), torch, or auto, which takes the "
        "first of the two that passes a test on this device at startup. CPUs use torch.",
        choices=("auto", "te", "torch"),
    )
    epp_cost_model: str | None = shared_setting(
        "cost_model",
        " `analytic` computes the cost model from the model's shape and the device's name. "
        "Default: the file next to the loaded checkpoint. If there is none, the job measures the "
        "cost model at startup, in seconds to minutes, and saves it with --save.",
    )
    epp_effort: int | None = shared_setting("effort")
    epp_overlong: str = shared_setting("overlong", " The context is --seq-length.")
    epp_blend: str = flag(
        AUTO,
        "Unit of the weights of --data-path and similar flags: tokens, as in Megatron, or "
        "documents. auto means tokens, but a resumed run keeps its unit.",
        choices=(AUTO, *BLENDS),
    )
    epp_share_from: int = flag(
        0,
        "Compute a prefix of at least N tokens that documents of a batch share, such as a system "
        "prompt, once per replica. Losses and gradients stay the same (default: 0, off).",
        ("N", whole_number(0)),
    )
    epp_record: str | None = flag(
        None,
        "Folder for the plan and the timed ops of every iteration, and for a table of predicted "
        "and measured seconds.",
        metavar="DIR",
    )
    epp_placement: str = shared_setting(
        "placement",
        " auto (default) simulates with --epp-cost-model or, without it, with the coefficients of "
        "the device. --epp-plan, the placement of a resumed run, and flags that place layers or "
        "create virtual stages take precedence over auto. Checkpoints saved with "
        "--dist-ckpt-optim-fully-reshardable load in any placement.",
    )
    epp_vocab_parallel: str = shared_setting(
        "vocab_parallel",
        " It is off on CPU-only hosts, and a resumed run keeps its choice. Checkpoints "
        "saved with --dist-ckpt-optim-fully-reshardable load either way.",
    )
    epp_row_multiple: int | None = flag(
        None,
        "Pad the rows of a chunk on each rank to a multiple of N, because other sizes run slower "
        f"kernels. Default: {GPU_ROWS} with Transformer Engine's layers on a GPU, or "
        f"{FEWER_GPU_ROWS} if {GPU_ROWS} would add more than {MOST_PADDING:.0%}% to a batch's "
        "tokens; otherwise 1.",
        ("N", whole_number(1, MOST_ROWS)),
    )
    epp_plan_ahead: bool = flag(
        True,
        "Plan in separate processes, ahead of training. With --no-epp-plan-ahead, the training "
        "process plans, and waits for every plan.",
        action=argparse.BooleanOptionalAction,
    )
    epp_plan_cores: int | None = flag(
        None,
        "Number of cores of each host for planner processes. The replicas that are planned on the "
        "host share them, with at least one process each. If planning takes longer than an "
        "iteration, a replica uses several processes, each for a different iteration. Default: "
        "half of the cores that the host's ranks leave idle.",
        ("N", whole_number(1, MOST_CORES)),
    )

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Config":
        """Return the settings in Megatron's ``args``."""
        values = {field.name: getattr(args, field.name) for field in dataclasses.fields(cls)}
        several = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | several)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of :class:`Config` to Megatron's parser, and return the parser.

    With --epp, the parser resets Megatron's flags that have no effect under a plan (replaced.py).
    """
    add_flags(parser, Config)
    refuse_removed(parser, _REMOVED)
    modelopt_flags.add_arguments(parser)
    _fix_help(parser)
    replaced.watch(parser)
    return parser


def placement_by_time(args: Any) -> bool:
    """Return whether the planner chooses the ranks of the stages and their layers."""
    return getattr(args, "epp_placement", None) == PLACEMENT_AUTO


def _fix_help(parser: argparse.ArgumentParser) -> None:
    """Escape % in help texts of Megatron 0.19, because an unescaped % makes --help fail."""
    for action in parser._actions:
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")


def elastic_defaults(wanted: argparse.Namespace) -> dict[str, Any]:
    """Return the defaults that Megatron's flags have with ``--epp``, by name.

    The defaults depend on ``wanted``, the flags as parsed without these defaults. With these
    defaults, Megatron counts each document as a micro-batch, so a global batch contains
    --global-batch-size documents. The loss is the mean over the tokens of the global batch.
    """
    defaults = {
        "calculate_per_token_loss": True,
        "micro_batch_size": 1,
        "dataloader_type": "external",
    }
    if wanted.transformer_impl != "transformer_engine":  # it contains the fused kernel
        defaults["apply_rope_fusion"] = False
    if find_spec("fused_weight_gradient_mlp_cuda") is None:
        # With the flag, Megatron cannot build an output layer without apex, which contains the
        # fused kernel. Transformer Engine's linears have their own kernels
        # (elastic_layers.fuse_weight_gradients).
        defaults["gradient_accumulation_fusion"] = False
        defaults[FUSED_LINEARS] = (
            wanted.transformer_impl == "transformer_engine" and wanted.gradient_accumulation_fusion
        )
    if getattr(wanted, "epp_vocab_parallel", OFF) == ON:
        # All stages need equal numbers of vocabulary rows. With auto, none are added.
        stages = max(1, wanted.pipeline_model_parallel_size)
        defaults["make_vocab_size_divisible_by"] = lcm(DIVISIBLE_BY, stages)
    if wanted.distributed_backend == "nccl":
        # With many hardware queues, Transformer Engine's gathers and reductions beside a product
        # would wait for its thread blocks.
        defaults["high_priority_stream_groups"] = ["tp", "cp", "ep"]
    if wanted.max_position_embeddings is None:
        defaults["max_position_embeddings"] = wanted.seq_length
    return defaults
