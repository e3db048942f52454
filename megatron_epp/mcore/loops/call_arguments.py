"""Arguments of a call of ``forward_backward_func``, and reasons why Megatron must run the call.

The keywords are those of Megatron's three schedules. If a call requires an unsupported feature,
Megatron's own schedule runs the call; no error is raised.
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
    """Arguments of a call by Megatron's names; ``others`` lists the names of unknown arguments."""

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
        """Return the call with ``keywords``, the keyword arguments of Megatron's schedule."""
        known = {name: value for name, value in keywords.items() if name in cls.__slots__}
        return cls(**known, others=tuple(sorted(set(keywords) - set(known))))

    @property
    def one_model(self) -> Any:
        """The first model chunk of this rank."""
        return self.model[0] if isinstance(self.model, list) else self.model

    @property
    def one_iterator(self) -> Any:
        """The first data iterator of this rank."""
        source = self.data_iterator
        return source[0] if isinstance(source, list) and source else source

    @property
    def models(self) -> list[Any]:
        """Model chunks of this rank: several in an interleaved pipeline."""
        return self.model if isinstance(self.model, list) else [self.model]

    @property
    def config(self) -> Any:
        """Megatron's configuration of the first model chunk."""
        return get_model_config(self.one_model)


def megatron_only(call: LoopCall, stages: int) -> str | None:
    """Return the reason why Megatron's schedule must run ``call``; None if a plan can run it.

    ``stages`` is the number of pipeline ranks.
    """
    if call.others:
        return f"unknown arguments {', '.join(call.others)}"
    if len(call.models) > 1:
        return "several model chunks on a rank: slices run one"
    iterators = call.data_iterator if isinstance(call.data_iterator, list) else [None]
    if len(iterators) != 1:
        return f"one model chunk and {len(iterators)} data iterators on a rank"
    if stages > 1 and getattr(call.config, "overlap_p2p_comm", False):
        return "overlap_p2p_comm of one model chunk a rank"  # Megatron reports it
    if call.pg_collection is not None and not isinstance(
        call.pg_collection, ProcessGroupCollection
    ):
        return "several modules with grids of their own"
    if call.adjust_tensor_shapes_fn is not None:
        return "shapes that adjust_tensor_shapes_fn changes"
    if stages > 1 and (call.pg_collection is None) != (call.p2p_communicator is None):
        return "p2p_communicator without pg_collection"  # Megatron reports it
    if (reason := limit_for("slices", call, of_call=True)) is not None:
        return reason
    if call.num_microbatches < 1:
        return "no micro-batch"
    return None


def process_groups(call: LoopCall) -> Any:
    """Return the call's ``pg_collection``, or else Megatron's default process groups."""
    if call.pg_collection is not None:
        return call.pg_collection
    build = getattr(schedules, "_build_default_pg_collection", default_groups)
    return build()


def default_groups() -> ProcessGroupCollection:
    """Return the default process groups on Megatron before 0.19, which cannot build them itself."""
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
