"""Schedule function with Megatron's signature, which external training loops call.

One :class:`LoopSchedule` replaces Megatron's schedules, and plans each call of an attached model.
Between calls it caches the process groups of this replica, the measured op times, and the plans.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.mcore.kinds.registry import lockstep_of
from megatron_epp.mcore.loops.attached import attached, say
from megatron_epp.mcore.loops.call_arguments import LoopCall, megatron_only
from megatron_epp.mcore.loops.pipelines import ModelPipeline, Pipelines
from megatron_epp.mcore.loops.planned_call import PlannedCall
from megatron_epp.mcore.loops.settings import Settings
from megatron_epp.runtime.executor import OutsidePhase

NO_PIPELINE, PIPELINE = "no pipeline", "pipeline"


class LoopSchedule:
    """Replacement of Megatron's schedule functions for external training loops.

    Attributes:
        settings: Settings of :func:`megatron_epp.attach`.
        stock: Megatron's own schedule functions, by kind: NO_PIPELINE and PIPELINE.
    """

    def __init__(self, settings: Settings, stock: dict[str, Callable[..., Any]]):
        self.settings, self.stock = settings, stock
        self._pipelines = Pipelines(settings)
        self._logged: set[str] = set()

    def __call__(self, kind: str, keywords: dict[str, Any]) -> list[Any]:
        """Run a call by a plan, or else by Megatron's own schedule; return forward_data_store.

        Megatron's schedule runs the calls of models that are not attached. It also runs calls that
        no plan supports; a line says so once.
        """
        call = LoopCall.of(keywords)
        if not any(attached(model) is not None for model in call.models):
            return self.stock[kind](**keywords)
        pipeline = self._known_pipeline(call, kind)
        if not isinstance(pipeline, ModelPipeline):
            if pipeline not in self._logged:
                self._logged.add(pipeline)
                say(f"Megatron's own schedule runs calls with {pipeline}")
            return self.stock[kind](**keywords)
        try:
            return PlannedCall(self.settings, call, pipeline).result()
        finally:
            pipeline.current_op.enter(OutsidePhase("what the loop does between two calls"))

    def _known_pipeline(self, call: LoopCall, kind: str) -> ModelPipeline | str:
        """Return the pipeline that runs the call, or the reason why Megatron runs the call."""
        pipelined, together = kind != NO_PIPELINE, lockstep_of(call.config) > 1
        if pipelined or together:
            if not mpu.model_parallel_is_initialized():
                return "pipelines without Megatron's global groups"
            if dist.distributed_c10d._get_default_group().bound_device_id is not None:
                return "torch.distributed initialised with a device_id"  # messages would block
        ranks = mpu.get_pipeline_model_parallel_world_size() if pipelined else 1
        reason = megatron_only(call, ranks)
        if reason is None and pipelined:
            reason = _unsupported_groups(call.pg_collection)
        if together:
            reason = self._pipelines.agreed(call, reason)
        return self._pipelines.of(call, ranks) if reason is None else reason


def _unsupported_groups(collection: Any) -> str | None:
    """Return the reason why the process groups of a call cannot carry a plan's messages, or None.

    ``collection`` is the call's ``pg_collection``.
    """
    if collection is None:
        return None
    call_ranks = dist.get_process_group_ranks(collection.pp)
    group_ranks = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    return (
        None if call_ranks == group_ranks else "pipelines other than Megatron's global groups say"
    )
