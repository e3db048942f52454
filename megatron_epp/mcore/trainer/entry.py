"""Entry point of training: calls Megatron's ``pretrain``, with or without ``--epp``.

The megatron-core wheel contains the trainer but not the script that calls it. This module replaces
the script: it reads the flags, builds the configuration, and calls the trainer with data, forward
step and loss. With --epp these come from setup.py, otherwise from megatron_gpt.py. Without --epp,
results equal those of Megatron-LM's own script bit for bit (scripts/upstream/compare_upstream.py).

After an error in the user's input, one rank prints one line and every rank exits with status 2
(job_exit.py).
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_epp.ir.errors import escape_output
from megatron_epp.mcore.job import job_exit
from megatron_epp.mcore.job.launch_environment import lone_copies, require_interface
from megatron_epp.mcore.job.read_flags import (
    be_the_only_process,
    rank,
    read_flags,
    refusals_as_value_errors,
)
from megatron_epp.mcore.patching import cpu_host, cuda_host, emulated_engine, patch_points

if TYPE_CHECKING:  # cpu_host and cuda_host must run before Megatron is imported
    from megatron_epp.mcore.trainer.hooks import TrainerHooks


def main(
    program_start: float | None = None,
    hooks: TrainerHooks | None = None,
    datasets: Callable[..., Any] | None = None,
    hybrid: bool = False,
) -> None:
    """Train with the flags of the command line, and end the job.

    After an error in the user's input, a message is printed and the process exits with status 2. If
    another rank is lost, the exit status is 1. Other exceptions are raised.

    Args:
        program_start: Time when the program started, in seconds since the epoch; None: now.
        hooks: Components of the trainer with --epp; None: the default components.
        datasets: Data provider for jobs without --epp; None: Megatron's own.
        hybrid: Whether the model is a HybridModel; otherwise it is a GPTModel.

    Example:
        >>> from megatron_epp.mcore.trainer.entry import main
        >>> main(hybrid=True)  # in a process started by torchrun; the flags are in sys.argv
    """
    escape_output()
    try:
        train(time.time() if program_start is None else program_start, hooks, datasets, hybrid)
    except job_exit.ENDINGS as error:
        # A LinkLost is an error of this package: it ends the job as a mistake does, with status 1.
        ending = job_exit.refused_by_megatron(error) or job_exit.lost_rank(error)
        if ending is None and not job_exit.is_users_mistake(error):
            raise
        job_exit.refuse_and_exit(ending or error)
    job_exit.finish()


def train(
    program_start: float,
    hooks: TrainerHooks | None = None,
    datasets: Callable[..., Any] | None = None,
    hybrid: bool = False,
    change: Callable[[Any], None] = lambda args: None,
) -> None:
    """Install the patches of Megatron, read the command line, and train; see :func:`main`.

    Args:
        program_start: Time when the program started, in seconds since the epoch.
        hooks: Components of the trainer with --epp; None: the default components.
        datasets: Data provider for jobs without --epp; None: Megatron's own.
        hybrid: Whether the model is a HybridModel; otherwise it is a GPTModel.
        change: Function that changes the validated arguments, before a model is built from them.

    Raises:
        ValueError: The command line, or a file named in it, is not valid.
    """
    require_interface()
    if "RANK" not in os.environ:
        if (line := lone_copies()) is not None:
            print(f"megatron_epp: {line}", file=sys.stderr, flush=True)
        be_the_only_process()
    if rank() != 0:
        # Only rank 0 warns, as in Megatron-LM's script.
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    cuda_host.prepare(sys.argv[1:])
    cpu_host.install_cpu_host()
    if emulated_engine.is_started() and rank() == 0:
        print(emulated_engine.in_words(), flush=True)
    patch_points.install(patch_points.ALWAYS_PATCH_POINTS)
    patch_points.check_patch_points()

    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_epp.mcore.choose.choices import choose
    from megatron_epp.mcore.choose.start import (
        choose_allowed_layout,
        release_spares,
        wait_as_spare,
    )
    from megatron_epp.mcore.job import megatron_gpt, resumed_schedule
    from megatron_epp.mcore.model.layer_spec import described, fix_layer_spec

    resumed_schedule.install()
    job_exit.require_launcher()
    set_startup_timestamps(program_start=program_start, main_entry=time.time())
    store = None
    layout = choose_allowed_layout()
    if layout is not None and rank() >= layout.ranks:
        return wait_as_spare(layout)
    args = read_flags() if layout is None else read_flags(layout.watch)
    change(args)
    _require_kind(args.hybrid_layer_pattern, hybrid)
    _require_iterations(args)
    if args.inprocess_restart:
        pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    for line in choose(args, hooks):
        if rank() == 0:
            print(line, flush=True)
    with refusals_as_value_errors():
        model = described(args)
    forward_step, datasets = megatron_gpt.forward_step, datasets or megatron_gpt.datasets
    if args.epp:
        from megatron_epp.mcore.trainer import setup

        patch_points.install(patch_points.EPP_PATCH_POINTS)
        forward_step, datasets = setup.setup(args, model, hooks)
    elif cpu_host.is_cpu_host():
        fix_layer_spec(model)
    with refusals_as_value_errors():
        configuration = pretrain_cfg_container_from_args(args, model)
    try:
        pretrain(
            configuration,
            datasets,
            ModelType.encoder_or_decoder,
            forward_step,
            store=store,
            get_embedding_ranks=megatron_gpt.embedding_ranks,
        )
    finally:
        release_spares(layout)


def _require_iterations(args: Any) -> None:
    """Raise a ValueError unless the flags determine the length of training.

    Megatron's learning-rate schedule needs the length, even with --skip-train.
    """
    for name in ("train_iters", "train_samples"):
        wanted = getattr(args, name) or 0
        if wanted < 0:
            raise ValueError(f"--{name.replace('_', '-')} {wanted}: expected at least 1")
    if args.phase_transition_iterations and not args.train_samples:
        raise ValueError(
            "--phase-transition-iterations: Megatron finds the length of a phase by "
            "--train-samples, which is not given; give it in the place of --train-iters"
        )
    if (args.eval_iters or 0) < 0 or (args.eval_interval or 0) < 1:
        raise ValueError(
            f"--eval-iters {args.eval_iters}, --eval-interval {args.eval_interval}: expected 0 or "
            "more iterations of evaluation after every 1 or more of training"
        )
    if not (args.train_iters or args.train_samples):
        raise ValueError(
            "--train-iters and --train-samples: neither is given, or it is 0; expected one of them "
            "(to evaluate without training, give the length of the training and --skip-train)"
        )


def _require_kind(pattern: str | None, hybrid: bool) -> None:
    """Raise a ValueError if a GPTModel has a layer pattern, or if a HybridModel has none.

    ``hybrid`` is whether the program trains a HybridModel.
    """
    if pattern is not None and not hybrid:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: pretrain_gpt trains Megatron's GPTModel; run "
            "megatron_epp.pretrain_hybrid with these flags, or leave the pattern out"
        )
    if pattern is None and hybrid:
        raise ValueError(
            "--hybrid-layer-pattern is missing: pretrain_hybrid trains Megatron's HybridModel; "
            "expected a letter for each layer, as in '*-*E*-', or run megatron_epp.pretrain_gpt"
        )
