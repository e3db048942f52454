"""One call of ``forward_backward_func``: its arguments, and why it may be left to Megatron's own.

The keywords are those of Megatron's two schedules without interleaving. A call that asks for what
elastic pipelines do not do is not an error: the schedule that was there before runs it.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCall:
    """The arguments, by Megatron's names; ``others``: those that this version does not know."""

    forward_step_func: Any
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int | None
    micro_batch_size: int | None
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Any = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False
    others: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, keywords: dict[str, Any]) -> "LoopCall":
        known = {name: value for name, value in keywords.items() if name in cls.__slots__}
        return cls(**known, others=tuple(sorted(set(keywords) - set(known))))

    @property
    def one_model(self) -> Any:
        return self.model[0] if isinstance(self.model, list) else self.model

    @property
    def one_iterator(self) -> Any:
        source = self.data_iterator
        return source[0] if isinstance(source, list) and source else source

    @property
    def config(self) -> Any:
        return get_model_config(self.one_model)


# Settings of the model's configuration that Megatron's schedules act on and ours do not.
_SETTINGS = {
    "overlap_moe_expert_parallel_comm": "experts' communication overlapped by two micro-batches",
    "hybrid_context_parallel": "context parallelism by sample",
    "moe_paged_stash": "a paged stash of experts' activations",
    "fine_grained_activation_offloading": "offloaded activations",
    "defer_embedding_wgrad_compute": "deferred weight gradients of the output layer",
    "num_microbatches_with_partial_activation_checkpoints": "recompute for some micro-batches only",
    "overlap_p2p_comm": "overlapped messages of an interleaved pipeline",
}


def not_ours(call: LoopCall, stages: int) -> str | None:
    """Why ``call`` is Megatron's to run, in a few words; None: it is ours."""
    if call.others:
        return f"unknown arguments {', '.join(call.others)}"
    if isinstance(call.model, list) and len(call.model) != 1:
        return f"{len(call.model)} model chunks on a rank"
    if isinstance(call.data_iterator, list) and len(call.data_iterator) != 1:
        return f"{len(call.data_iterator)} data iterators on a rank"
    if call.pg_collection is not None and not isinstance(
        call.pg_collection, ProcessGroupCollection
    ):
        return "several modules with grids of their own"
    if call.adjust_tensor_shapes_fn is not None:
        return "shapes that adjust_tensor_shapes_fn changes"
    if stages > 1 and (call.pg_collection is None) != (call.p2p_communicator is None):
        return "p2p_communicator without pg_collection"  # and its words on that
    config = call.config
    for name, what in _SETTINGS.items():
        if getattr(config, name, None):
            return f"{what} ({name})"
    if getattr(config, "cuda_graph_impl", "none") == "local":
        return "CUDA graphs (cuda_graph_impl local)"
    ddp = getattr(call.one_model, "ddp_config", None)
    if getattr(ddp, "use_megatron_fsdp", False):
        return "Megatron FSDP"
    if call.num_microbatches < 1:
        return "no micro-batch"
    return None


def process_groups(call: LoopCall) -> Any:
    """The groups that the call names, else Megatron's own."""
    if call.pg_collection is not None:
        return call.pg_collection
    return schedules._build_default_pg_collection()


def fixed_shape(call: LoopCall, groups: Any) -> tuple[int, ...] | None:
    """The shape of every message between stages; None where micro-batches differ in it."""
    (shape,) = schedules.get_tensor_shapes(
        seq_length=call.seq_length,
        micro_batch_size=call.micro_batch_size,
        decoder_seq_length=call.decoder_seq_length,
        config=call.config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return tuple(shape) or None
