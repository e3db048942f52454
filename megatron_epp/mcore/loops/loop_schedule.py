"""Schedule function with Megatron's signature, which external training loops call.

One :class:`LoopSchedule` replaces all of Megatron's schedules, and plans each call. Between
calls it caches the process groups of this replica, the measured op times, and the plans.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_epp.autoload import NO_PIPELINE, PIPELINE, first_line, say
from megatron_epp.mcore.loops.call_arguments import LoopCall, megatron_only
from megatron_epp.mcore.loops.pipelines import ModelPipeline, Pipelines
from megatron_epp.mcore.loops.planned_call import PlannedCall
from megatron_epp.mcore.loops.replica.rank_status import LoopRefusal
from megatron_epp.mcore.loops.replica.redone_call import MisreadCall
from megatron_epp.mcore.loops.settings import Settings
from megatron_epp.runtime.executor import OutsidePhase


class LoopSchedule:
    """Replacement of Megatron's schedule functions for external training loops.

    Attributes:
        settings: Settings of :func:`megatron_epp.install_schedule`.
        stock: Megatron's own schedule functions, by the keys of ``autoload.TARGETS``.
    """

    def __init__(self, settings: Settings, stock: dict[str, Callable[..., Any]]):
        self.settings, self.stock = settings, stock
        self._pipelines = Pipelines(settings)
        self._logged: set[str] = set()
        self._calls = 0  # run by plans
        self._gave_up = False  # after a failure before the first op of a call

    def __call__(self, kind: str, keywords: dict[str, Any]) -> list[Any]:
        """Run a call by a plan, or else by Megatron's own schedule; return forward_data_store.

        After an unexpected failure before the first op, Megatron's schedule runs this call and all
        later calls. After a misread shape, Megatron's schedule repeats the call. Errors of the
        forward step, of ``lengths`` and of calls with an attached model are raised.
        """
        if self._gave_up:
            return self.stock[kind](**keywords)
        planned: PlannedCall | None = None
        speaker = 0
        try:
            call = LoopCall.of(keywords)
            pipeline = self._known_pipeline(call, kind)
            if isinstance(pipeline, ModelPipeline):
                planned = PlannedCall(self.settings, call, pipeline, self._count)
                try:
                    result = planned.result(keywords, self.stock[PIPELINE])
                finally:
                    between = OutsidePhase("what the loop does between two calls")
                    pipeline.current_op.enter(between)
                if result is not None:
                    return result
                unknown = "micro-batches of several lengths that nobody tells"
                reason = f"calls with {pipeline.unlike or unknown} (install_schedule(lengths=))"
            else:
                reason = f"calls with {pipeline}"
        except LoopRefusal:
            raise
        except MisreadCall as misread:  # on all ranks of the replica
            assert planned is not None, "a planned call was misread"
            planned.undo()
            speaker = planned.first_rank  # other replicas may have read their shapes correctly
            reason = f"calls with {misread} (install_schedule(lengths=))"
        except Exception as error:
            if planned is not None and planned.committed:
                raise
            self._gave_up = True
            reason = (
                f"all calls from here on, as a plan failed before it began: {first_line(error)}"
            )
        if planned is not None:
            keywords = planned.with_batches_from_the_start(keywords)
        return self._leave(reason, kind, keywords, speaker)

    def _count(self) -> int:
        """Count a call that a plan runs; return the number of such calls so far."""
        self._calls += 1
        return self._calls

    def _leave(self, reason: str, kind: str, keywords: dict[str, Any], by: int) -> list[Any]:
        """Run the call with Megatron's own schedule; rank ``by`` logs each reason once."""
        if reason not in self._logged:
            self._logged.add(reason)
            say(f"Megatron's own schedule runs {reason}", by)
        return self.stock[kind](**keywords)

    def _known_pipeline(self, call: LoopCall, kind: str) -> ModelPipeline | str:
        """Return the pipeline that runs the call, or the reason why Megatron runs the call."""
        pipelined = kind != NO_PIPELINE
        if pipelined and not mpu.model_parallel_is_initialized():
            return "pipelines without Megatron's global groups"
        ranks = mpu.get_pipeline_model_parallel_world_size() if pipelined else 1
        reason = megatron_only(call, ranks)
        if reason is None and pipelined and call.pg_collection is not None:
            reason = _other_pipeline(call.pg_collection)
        if reason is not None:
            return reason
        try:
            return self._pipelines.of(call, ranks)
        except ValueError as refusal:  # messages would block with these process groups
            return str(refusal)


def _other_pipeline(collection: Any) -> str | None:
    call_ranks = dist.get_process_group_ranks(collection.pp)
    group_ranks = dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group())
    return (
        None if call_ranks == group_ranks else "pipelines other than Megatron's global groups say"
    )
