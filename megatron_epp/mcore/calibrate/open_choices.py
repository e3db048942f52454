"""Choice of values for layer kinds' flags that are ``auto``, made after the model is built.

In this module, a ``choice`` (from KindModule.CHOICES) is such a flag with its possible values.
"""

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_epp.cost.profile import Profile
from megatron_epp.ir import PlanError
from megatron_epp.mcore.calibrate.profile_file import FILE_NAME
from megatron_epp.mcore.flags.config import ANALYTIC, AUTO, Config
from megatron_epp.mcore.job.job_cost import analytic, saved_budgets, training_cost
from megatron_epp.mcore.kinds.base import OpenChoice
from megatron_epp.mcore.kinds.modules import KIND_MODULES
from megatron_epp.mcore.model.attention import Attention
from megatron_epp.runtime.consensus import broadcast_result
from megatron_epp.runtime.groups import Groups
from megatron_epp.show.units import seconds_text

logger = logging.getLogger(__name__)

Chooser = Callable[[OpenChoice, Any, tuple[int, ...]], str]


def cheaper(choice: OpenChoice, args: Any, layers: tuple[int, ...]) -> str:
    """Return the value of ``choice`` whose plan takes the least time by the analytic cost model.

    The function plans one document of the maximum length (--seq-length) with each value. ``layers``
    are the numbers of layers of the stages. If a cost-model file exists (--epp-cost-model, or next
    to the resumed checkpoint), the function returns the value with which that file was measured.
    """
    from megatron_epp.planner.options import Options
    from megatron_epp.planner.registry import planner_of

    config = Config.of(args)
    file = config.epp_cost_model or str(Path(args.load or "") / FILE_NAME)
    if file != ANALYTIC and (config.epp_cost_model or args.load) and Path(file).exists():
        return choice.measured_with(Profile.load(file).kinds.values())
    seconds: dict[str, float] = {}
    for value in choice.values:
        trial = copy.copy(args)
        setattr(trial, choice.flag, value)
        cost = training_cost(trial, config, layers, analytic(trial))
        if config.epp_memory_budget_gib is None:  # use the budgets of the resumed run
            kept = saved_budgets(args, cost.layout.placement.ranks) or cost.device_budget_bytes
            cost = cost.replace(device_budget_bytes=kept)
        try:
            options = Options(context=args.seq_length, effort=0)
            planned = planner_of(config.epp_planner)([args.seq_length], cost, options)
        except PlanError:  # the plan would not fit into the memory budget
            continue
        seconds[value] = planned.seconds
    chosen = min(seconds, key=lambda value: seconds[value], default=choice.values[-1])
    alternatives = ", ".join(f"{value} {seconds_text(of)}" for value, of in seconds.items())
    logger.info(
        "%s %s: a document of %d inputs takes %s by the cost model",
        _flag(choice), chosen, args.seq_length, alternatives or "too much memory either way",
    )  # fmt: skip
    return chosen


def settle_choices(
    args: Any,
    model: Any,
    attention: Attention,
    layers: tuple[int, ...],
    groups: Groups,
    choose: Chooser = cheaper,
) -> None:
    """Choose a value for every choice on rank 0, and set it in ``args`` and ``attention``.

    Collective.

    Args:
        args: Megatron's arguments. A choice that the user leaves open has the value ``auto``.
        model: The model of this rank.
        attention: The attention of the job.
        layers: Number of layers of every stage.
        groups: The job's process groups.
        choose: Function that returns a value if flags and model allow several values.

    Raises:
        ValueError: A flag selects a value that this model or attention excludes.
    """
    kinds = (kind for kind in KIND_MODULES if any(kind.KIND.layers(args)))
    for choice in [choice for kind in kinds for choice in kind.CHOICES]:
        settled = partial(_settled, choice, args, model, attention, layers, choose)
        value = broadcast_result(settled, groups.control)
        setattr(args, choice.flag, value)
        choice.settle(attention, value)


def _settled(
    choice: OpenChoice,
    args: Any,
    model: Any,
    attention: Attention,
    layers: tuple[int, ...],
    choose: Chooser,
) -> str:
    wanted, excluded = str(getattr(args, choice.flag)), choice.excluded(model, attention)
    if wanted in excluded:
        raise ValueError(f"{_flag(choice)} {wanted}: {excluded[wanted]}; leave the flag out")
    left = [value for value in choice.values if value not in excluded]
    if wanted != AUTO or len(left) == 1:
        return wanted if wanted != AUTO else left[0]
    return choose(choice, args, layers)


def _flag(choice: OpenChoice) -> str:
    return "--" + choice.flag.replace("_", "-")
