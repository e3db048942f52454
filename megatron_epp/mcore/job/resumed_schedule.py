"""Learning rates, weight decay and counters of a resumed job, before Megatron loads its checkpoint.

Megatron finds the saved state of a parameter group by the group's settings, and the learning rates
are among them. So a job with another ``--lr`` would not find the saved state. Two flags choose
between the command line's rates and the checkpoint's, but Megatron's scheduler reads these flags
only after the optimizer has loaded. The functions of this module apply the choice to the groups
earlier. Moments and step counts are loaded unchanged.

A checkpoint of a job without --epp counts samples of --seq-length; a job with --epp counts
documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.training import get_args, print_rank_0

from megatron_epp.mcore.data.global_batches import ScheduledSizes, progress_of
from megatron_epp.mcore.job.job_exit import SCHEDULE_REMEDY
from megatron_epp.mcore.patching import patch_points

# Settings of a parameter group that a schedule changes. The others say which weights it has.
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
_DECAY = ("start_wd", "end_wd", "wd_incr_steps", "wd_incr_style")  # of the scheduler
# Attribute of Megatron's args: (iteration, validation samples per batch) of such a checkpoint.
_COUNTS_SAMPLES = "epp_counts_samples"
_Group = dict[str, Any]


def install() -> None:
    """Make Megatron call these functions before it loads an optimizer and its scheduler."""
    patch_points.call_before_load(patch_points.RATES, match_groups)
    patch_points.call_before_load(patch_points.SCHEDULE_STATE, prepare_schedule)


def match_groups(optimizer: Any, state_dict: Mapping[Any, Any]) -> None:
    """Make the learning rates and weight decays of parameter groups and of saved groups equal.

    With --override-opt-param-scheduler, the saved groups get the flags' rates, and with
    --use-checkpoint-opt-param-scheduler the optimizer's groups get the saved rates.

    Args:
        optimizer: Megatron's ChainedOptimizer, which is about to load ``state_dict``.
        state_dict: State of its only optimizer, or state of each optimizer by number.

    Raises:
        ValueError: Rates differ and neither flag is given, or the saved parameter groups are not
            those of this run.
    """
    args = get_args()
    parts = optimizer.chained_optimizers
    states = [state_dict] if len(parts) == 1 else [state_dict[key] for key in sorted(state_dict)]
    differences: dict[str, None] = {}  # in order, each once
    for part, state in zip(parts, states, strict=False):
        saved_groups = state.get("optimizer", state).get("param_groups")
        if saved_groups is None or getattr(part, "is_stub_optimizer", False):
            continue
        for group, saved in _pairs(part.param_groups, saved_groups):
            if args.override_opt_param_scheduler:
                saved.update(_rates(group))
            elif args.use_checkpoint_opt_param_scheduler:
                group.update(_rates(saved))
            else:
                differences |= dict.fromkeys(_differences(args, group, saved))
    if differences:
        raise ValueError(f"--load {args.load}: {'; '.join(differences)}; {SCHEDULE_REMEDY}")


def note_samples(args: Any, common: Mapping[str, Any]) -> None:
    """Store in ``args`` the iteration and validation batch size of a checkpoint without --epp.

    A checkpoint of a job without --epp counts samples instead of documents. ``common`` is the
    checkpoint's state without tensors. For other checkpoints, the function does nothing.
    """
    saved = common["args"]
    if not getattr(saved, "epp", False):
        batch = getattr(saved, "eval_global_batch_size", None) or saved.global_batch_size
        setattr(args, _COUNTS_SAMPLES, (common["iteration"], batch))


def prepare_schedule(scheduler: Any, state_dict: dict[str, Any]) -> None:
    """Set the weight decay of a scheduler, and the counters of a job that counted samples.

    With --use-checkpoint-opt-param-scheduler, the function sets the checkpoint's weight decay,
    because Megatron's scheduler computes the next iteration's weight decay before it reads the
    checkpoint's.

    Args:
        scheduler: Megatron's scheduler, which is about to load ``state_dict``.
        state_dict: State of the scheduler in the checkpoint.

    Raises:
        ValueError: The checkpoint counts samples, their number differs from that of the documents,
            and --override-opt-param-scheduler is not given.
    """
    if scheduler.use_checkpoint_opt_param_scheduler:
        vars(scheduler).update({name: state_dict[name] for name in _DECAY if name in state_dict})
    args = get_args()
    if (counted := vars(args).pop(_COUNTS_SAMPLES, None)) is None:
        return
    iteration, evaluated = counted
    samples, documents = state_dict["num_steps"], ScheduledSizes().samples(iteration)
    if samples == documents:
        return
    said = (
        f"--load {args.load}: saved without --epp after {samples} samples of --seq-length; --epp "
        f"counts documents, {documents} in {iteration} iterations of --global-batch-size "
        f"{args.global_batch_size}"
    )
    if not scheduler.override_opt_param_scheduler:
        raise ValueError(f"{said}; give --override-opt-param-scheduler to continue there")
    print_rank_0(f"> {said}: the schedule and the data continue there")
    state_dict["num_steps"] = documents
    progress = progress_of(args)
    progress.consumed_train_samples = documents
    passes = progress.consumed_valid_samples // evaluated
    progress.consumed_valid_samples = passes * args.eval_global_batch_size


def _pairs(groups: Sequence[_Group], saved: Sequence[_Group]) -> Iterator[tuple[_Group, _Group]]:
    """Yield each parameter group with its saved group: the one with the same weights.

    Groups that differ only in their rates are paired in ascending order of the rates.

    Raises:
        ValueError: The groups of the checkpoint have other weights.
    """
    names = [name for name in param_group_identifier_keys if name not in _RATES]
    if all("default_config" in group for group in saved):
        names.append("default_config")  # whether its rates are those of all weights
    groups_of, saved_of = _by_weights(groups, names), _by_weights(saved, names)
    if {key: len(same) for key, same in groups_of.items()} != {
        k: len(s) for k, s in saved_of.items()
    }:
        raise ValueError(
            f"--load {get_args().load}: the optimizer's parameter groups are others than this "
            "run's (--decoupled-lr and its kin give weights groups of their own); give the flags "
            "that it was saved with, or --no-load-optim"
        )
    for key, same in groups_of.items():
        yield from zip(same, saved_of[key], strict=True)


def _by_weights(groups: Sequence[_Group], names: Sequence[str]) -> dict[tuple[Any, ...], list]:
    by_key: dict[tuple[Any, ...], list[_Group]] = {}
    for group in sorted(groups, key=lambda group: group.get("max_lr") or 0.0):
        # NeMo saves some names with this prefix, as Megatron's own comparison knows.
        key = tuple(group.get(name, group.get(f"pre_{name}")) for name in names)
        by_key.setdefault(key, []).append(group)
    return by_key


def _rates(group: _Group) -> _Group:
    return {name: group[name] for name in _RATES if name in group}


def _differences(args: Any, group: _Group, saved: _Group) -> Iterator[str]:
    """Yield "flag and its value: the checkpoint's value" for each rate that differs."""
    usual = group.get("default_config", True)
    for name in ("max_lr", "min_lr"):
        flag = name.removeprefix("max_")
        if not usual and getattr(args, f"decoupled_{flag}") is not None:
            flag = f"decoupled_{flag}"
        if saved.get(name) != group.get(name):
            shown = f"--{flag.replace('_', '-')} {group.get(name)}"
            yield f"{shown}: the checkpoint has {saved.get(name)}"
