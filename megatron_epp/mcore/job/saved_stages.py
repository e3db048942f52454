"""Check that the optimizer states of a checkpoint belong to the stages of this job.

Without --dist-ckpt-optim-fully-reshardable, Megatron's distributed optimizer saves its states by
rank, in the order of the rank's weights. A rank with other layers would load states of other
weights. Megatron compares the degrees, but not the layers of the ranks.
"""

from typing import Any

from torch.distributed.checkpoint import CheckpointException

from megatron_epp.mcore.capabilities.refusals import vocabulary_parallel
from megatron_epp.mcore.flags.config import OFF, ON
from megatron_epp.mcore.job.checkpoint_folders import checkpoint_to_load
from megatron_epp.mcore.model.shape import placement_of


def require_same_stages(args: Any) -> None:
    """Raise a ValueError if the job would load optimizer states that belong to other stages."""
    loads = args.use_distributed_optimizer and not (args.finetune or args.no_load_optim)
    path = checkpoint_to_load(args) if loads and args.ckpt_format == "torch_dist" else None
    if path is None:
        return
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    try:
        common = serialization.load_common_state_dict(path)
        metadata = serialization.load_content_metadata(preloaded_state_dict=common) or {}
        saved, sharding = common["args"], metadata["distrib_optim_sharding_type"]
        saved_stages = _stages_text(saved)
    except (Exception, CheckpointException):  # damaged, or older: Megatron reports it later
        return
    reshardable = sharding in DistributedOptimizer.checkpoint_fully_reshardable_formats
    if reshardable or saved.no_save_optim or saved_stages == (stages := _stages_text(args)):
        return
    raise ValueError(
        f"--load {args.load}: its optimizer states, saved without "
        f"--dist-ckpt-optim-fully-reshardable, belong to {saved_stages}; this run has {stages}; "
        "give the flags that it was saved with, or --no-load-optim"
    )


def _stages_text(args: Any) -> str:
    """Return a text on what lies on which rank, by ``args`` that Megatron has validated."""
    placed = placement_of(args)
    return (
        f"stages on ranks {placed} with layers {' '.join(map(str, placed.layers))}, "
        f"--tensor-model-parallel-size {args.tensor_model_parallel_size}, "
        f"--epp-vocab-parallel {ON if vocabulary_parallel(args) else OFF}"
    )
