"""Schedule that replaces Megatron's forward-backward function.

A step contains the plans of one iteration. ``control.accept`` provides the step, stage_runner.py
runs it, ``control.retry`` repeats it after an out-of-memory error, and ``control.observe`` reports
the outcome.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import _build_default_pg_collection
from megatron.core.utils import get_model_config
from megatron.training import get_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_epp.control.accept import AcceptedSteps
from megatron_epp.control.observe import Observer
from megatron_epp.control.retry import Attempt, Retry
from megatron_epp.mcore.data.global_batches import Batch, GlobalBatches, progress_of
from megatron_epp.mcore.data.shared_tokens import SharedTokens
from megatron_epp.mcore.job.emergency_exit import SAVES
from megatron_epp.mcore.kinds.modules import changed_tensors
from megatron_epp.mcore.lm_head.tied import add_up_tied_gradients
from megatron_epp.mcore.model.attention import this_device
from megatron_epp.mcore.model.rng import random_states, restore_random_states
from megatron_epp.mcore.model.stage import ForwardStep
from megatron_epp.mcore.patching.uneven_batches import SampleCount, UnevenMicroBatches
from megatron_epp.mcore.placing.embedding_copies import add_up_embedding_gradients
from megatron_epp.mcore.trainer.stage_runner import StageRun, StageRunner
from megatron_epp.runtime.executor import OutsidePhase


class ElasticSchedule:
    """Replacement of Megatron's ``forward_backward_func``: one call runs one global batch.

    Attributes:
        steps: Source of the accepted steps.
        runner: Runner of this rank's part of a step.
        retry: Component that repeats an iteration after an out-of-memory error.
        observer: Component that logs and records iterations.
        validate: Function that passes the iteration's summed loss to Megatron's re-run machine.
        shared: Finder of prefixes that documents share; None without --epp-share-from.
        ran: Results of the latest attempt on this rank.
    """

    def __init__(
        self,
        steps: AcceptedSteps,
        runner: StageRunner,
        retry: Retry,
        observer: Observer,
        validate: Callable[[torch.Tensor], None],
        shared: SharedTokens | None = None,
    ):
        self.steps, self.runner, self.retry, self.observer = steps, runner, retry, observer
        self.validate, self.current_op = validate, runner.programs.current_op
        self.shared = shared
        self.ran: StageRun
        self._samples = SampleCount()

    def __call__(
        self,
        *,
        forward_step_func: ForwardStep,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Any = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> list[dict[str, torch.Tensor]]:
        """Run one iteration over the next global batch of documents, and reduce the gradients.

        ``data_iterator`` yields one :class:`Batch` per call. If an iteration runs out of memory, it
        is planned and run again. Megatron passes ``num_microbatches``, ``micro_batch_size`` and
        sequence lengths, which do not affect the results.

        Returns:
            On the last stage, a list with one report, summed over the tokens of this replica. On
            other stages, an empty list.
        """
        if collect_non_loss_data:
            raise NotImplementedError("--epp collects no data other than the loss in evaluation")
        models = model if isinstance(model, list) else [model]
        data_iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        config = get_model_config(models[0])
        if pg_collection is None:
            pg_collection = _build_default_pg_collection()
        batch: Batch = next(data_iterator)
        source = _batches(data_iterator)
        iteration = _iteration()
        if isinstance(num_microbatches, UnevenMicroBatches) and not forward_only:
            began = source.consumed - len(batch.samples)
            self._samples.check(source, began, progress_of(get_args()).consumed_train_samples)
        self.current_op.iteration = iteration
        self.observer.resume(iteration)
        if config.timers is not None:
            timer = config.timers("forward-backward", log_level=1)
            timer.start(barrier=config.barrier_with_L1_time)
        random = random_states()
        changed = [pair for model in models for pair in changed_tensors(model)]

        def lengths_of(one: Batch) -> list[int]:
            if self.shared is None:
                return one.lengths.tolist()
            return self.shared.lengths(source.documents, one)

        def following(later: int) -> list[int] | None:
            ahead = source.peek(later - 1)
            return None if ahead is None else lengths_of(ahead)

        def attempt() -> Attempt:
            later = None if forward_only else following
            step = self.steps.step(iteration, lengths_of(batch), later, forward_only)
            self.ran = ran = self.runner.run(
                step, batch, source.documents, models, config, forward_step_func
            )
            self.current_op.enter("the gradients and the report of all ranks")
            if not forward_only and config.finalize_model_grads_func is not None:
                tokens = torch.zeros([], dtype=torch.int, device=this_device()) + ran.tokens
                config.finalize_model_grads_func(
                    models,
                    tokens,
                    pg_collection=pg_collection,
                    force_all_reduce=force_all_reduce,
                )
                add_up_tied_gradients(models)
                add_up_embedding_gradients(models)
            report = self.observer.gather(step, ran.records, ran.failure, ran.host_peak_bytes)
            between = "optimizer and what else Megatron does between iterations"
            self.current_op.enter(OutsidePhase(between))
            SAVES.look()
            return Attempt(step, ran.records, report)

        def undo() -> None:
            """Discard the attempt: restore random states and changed tensors, and drop gradients.

            Megatron updates expert biases before a failure is known. The next attempt must draw the
            same random numbers.
            """
            restore_random_states(random)
            for tensor, before in changed:
                tensor.copy_(before)
            for model in [] if forward_only else models:
                for parameter in model.parameters():
                    parameter.grad = None
                if hasattr(model, "zero_grad_buffer"):
                    model.zero_grad_buffer()

        done = self.retry.run(iteration, forward_only, attempt, undo)
        if not forward_only:
            self.observer.after(iteration, done, partial(source.documents.header, batch.samples[0]))
        if config.timers is not None:
            config.timers("forward-backward").stop()
        if not forward_only:
            # Every rank passes its replica's documents once per iteration, so that Megatron's log
            # line shows true tokens and TFLOP/s.
            update_seqlen_stats_from_cu_seqlens(self.runner.flop_boundaries(self.ran.plan))
            if self.ran.reports:
                self.validate(next(iter(self.ran.reports[0].values()))[0])
        return self.ran.reports


def _batches(data_iterator: Any) -> GlobalBatches:
    """Return the global batches that Megatron's iterator wraps.

    In training, Megatron wraps the global batches in a RerunDataIterator, so that its re-run
    machine can replay an iteration (megatron/core/rerun_state_machine.py). The wrapper's attribute
    ``iterable`` is the GlobalBatches object, which can look ahead and read tokens. The certificate
    passes the global batches unwrapped.
    """
    return getattr(data_iterator, "iterable", data_iterator)


def _iteration() -> int:
    """Return the number of the current iteration, from 1; in evaluation, of the next iteration.

    Before each iteration, Megatron's ``train`` sets ``args.curr_iteration`` to the number of
    finished iterations. If it is 0 or missing, the number is ``args.iteration``, which is the
    iteration of the loaded checkpoint.
    """
    args = get_args()
    return (getattr(args, "curr_iteration", None) or args.iteration or 0) + 1
