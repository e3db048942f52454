"""Check that the optimizer states of a checkpoint belong to the stages of this job.

Without --dist-ckpt-optim-fully-reshardable, Megatron's distributed optimizer saves its states by
rank, in the order of the rank's weights. A rank with other layers would load states of other
weights. Megatron compares the degrees, but not the layers of the ranks.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint import CheckpointException

from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.flags.config import OFF, ON
from megatron_epp.mcore.job.checkpoint_folders import checkpoint_to_load
from megatron_epp.mcore.model.shape import placement_of


def saved_state(args: Any) -> dict[str, Any] | None:
    """Return the checkpoint's state without tensors, if the job loads its optimizer states.

    Otherwise, the result is None. It is also None for formats other than torch_dist, and for a
    damaged checkpoint, which Megatron reports later.

    Raises:
        ValueError: A tracker file is damaged.
    """
    loads = not (args.finetune or args.no_load_optim) and args.ckpt_format == "torch_dist"
    path = checkpoint_to_load(args) if loads else None
    if path is None:
        return None
    from megatron.core.dist_checkpointing import serialization

    try:
        common: dict[str, Any] = serialization.load_common_state_dict(path)
    except (Exception, CheckpointException):
        return None
    return None if getattr(common.get("args"), "no_save_optim", True) else common


def require_same_stages(args: Any, common: Mapping[str, Any]) -> None:
    """Raise a ValueError if the checkpoint's optimizer states are not those of this job.

    The states may be of another kind of optimizer or dtype, or of other stages.

    ``common`` is the result of :func:`saved_state`.
    """
    _require_same_kind(args, common["args"])
    if not args.use_distributed_optimizer:
        return
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    metadata = serialization.load_content_metadata(preloaded_state_dict=common) or {}
    try:
        sharding, saved_stages = (
            metadata["distrib_optim_sharding_type"],
            _stages_text(common["args"]),
        )
    except Exception:  # an older version: Megatron reports it later
        return
    reshardable = sharding in DistributedOptimizer.checkpoint_fully_reshardable_formats
    if reshardable or saved_stages == (stages := _stages_text(args)):
        return
    raise ValueError(
        f"--load {args.load}: its optimizer states, saved without "
        f"--dist-ckpt-optim-fully-reshardable, belong to {saved_stages}; this run has {stages}; "
        "give the flags that it was saved with, or --no-load-optim"
    )


def _require_same_kind(args: Any, saved: Any) -> None:
    """Raise a ValueError if the ``saved`` args have an optimizer with other states than ``args``.

    The distributed optimizer saves its states in float32 for every number format.
    """
    names = ["use_distributed_optimizer"]
    names += [] if args.use_distributed_optimizer else ["bf16", "fp16"]
    for name in names:
        was, now = bool(getattr(saved, name, None)), bool(getattr(args, name))
        if was != now:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"--load {args.load}: its optimizer states, saved {'with' if was else 'without'} "
                f"{flag}, do not load {'with' if now else 'without'} it; "
                f"{'omit' if now else 'give'} the flag, or give --no-load-optim"
            )


def _stages_text(args: Any) -> str:
    """Return a text on what lies on which rank, by ``args`` that Megatron has validated."""
    placed = placement_of(args)
    return (
        f"stages on ranks {placed} with layers {' '.join(map(str, placed.layers))}, "
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size}, "
        f"--epp-vocab-parallel {ON if vocabulary_parallel(args) else OFF}"
    )
