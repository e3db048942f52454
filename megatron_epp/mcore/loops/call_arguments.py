"""One call of ``forward_backward_func``: its arguments, and why it may be left to Megatron's own.

The keywords are those of Megatron's two schedules without interleaving. A call that asks for what
elastic pipelines do not do is not an error: the schedule that was there before runs it.
"""

from dataclasses import dataclass, field
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron_epp.mcore.capabilities.table import limit_for


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
    if (reason := limit_for("calls", call)) is not None:
        return reason
    if call.num_microbatches < 1:
        return "no micro-batch"
    return None


def process_groups(call: LoopCall) -> Any:
    """The groups that the call names, else Megatron's own."""
    if call.pg_collection is not None:
        return call.pg_collection
    build = getattr(schedules, "_build_default_pg_collection", default_groups)
    return build()


def default_groups() -> ProcessGroupCollection:
    """Megatron's groups, as its schedules before 0.19 collect them for themselves."""
    groups = ProcessGroupCollection()
    groups.tp = mpu.get_tensor_model_parallel_group()
    groups.cp = mpu.get_context_parallel_group()
    groups.pp = mpu.get_pipeline_model_parallel_group()
    groups.embd = mpu.get_embedding_group(check_initialized=False)
    groups.pos_embd = mpu.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = mpu.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    groups.tp_dp_cp = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def fixed_shape(call: LoopCall, groups: Any) -> tuple[int, ...] | None:
    """The shape of every message between stages; None where micro-batches differ in it."""
    config = call.config
    if config.variable_seq_lengths:  # which get_tensor_shapes of 0.16 does not look at
        return None
    (shape,) = schedules.get_tensor_shapes(
        seq_length=call.seq_length,
        micro_batch_size=call.micro_batch_size,
        decoder_seq_length=call.decoder_seq_length,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return tuple(shape) or None
