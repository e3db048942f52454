"""Where the trainer's steps come from: a planner on rank 0, or plans that somebody else made."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from megatron_epp.cost.analytic import profile as analytic_profile
from megatron_epp.cost.analytic import without_states
from megatron_epp.cost.cost import Cost
from megatron_epp.cost.devices import GIB, device
from megatron_epp.cost.models import Model
from megatron_epp.cost.profile import Profile
from megatron_epp.ir import PlanError, Step
from megatron_epp.layers.attention import PartsAttention
from megatron_epp.layers.varlen import VarlenAttention
from megatron_epp.mcore import host
from megatron_epp.mcore.ahead import PlannerFailed, PlannerProcess, PlannerRefused
from megatron_epp.mcore.budget import Budget
from megatron_epp.mcore.config import Config
from megatron_epp.mcore.fallbacks import Fallbacks
from megatron_epp.mcore.fixed import FixedSteps
from megatron_epp.mcore.groups import Groups
from megatron_epp.mcore.head import block_tokens, early_head
from megatron_epp.runtime.agree import share

logger = logging.getLogger(__name__)

DEFAULT_BUDGETS = "epp-default-budgets.json"  # bytes by stage, beside the checkpoint
CPU_SHARE = 0.8  # of the available memory, for chunks
FALLBACK = "packing"  # whole documents side by side: needs no search
_ROUNDING = 1e-9  # of a promise in GiB


class PlannedSteps:
    """Rank 0 plans, all ranks get its text; a refusal on rank 0 is refused everywhere.

    With ``ahead`` a process of its own plans, asked one iteration early. When it fails, training
    goes on with the fallback planner for that iteration, which is logged and kept: ``fallbacks``
    (on rank 0) also names those of a run that is resumed. Plans stay within ``budget``; whoever
    changes it calls :meth:`narrow`.
    """

    source = "the plan"

    def __init__(
        self,
        cost: Cost,
        options: Any,
        planner: str,
        groups: Groups,
        ahead: bool,
        fallbacks: Fallbacks | None = None,
    ):
        self.cost, self.options, self.planner, self.groups = cost, options, planner, groups
        self.fallbacks = fallbacks or Fallbacks(())
        self.budget = Budget(cost.budget_bytes, cost.states_bytes)
        self._ahead = ahead and groups.control.rank() == 0
        self.ahead: PlannerProcess | None = None
        self._evaluation_tokens: int | None = None
        self._start_ahead()

    def _start_ahead(self):
        if self.ahead is not None:
            self.ahead.close()
        if self._ahead:
            replicas = self.groups.replicas
            self.ahead = PlannerProcess(self.cost, self.options, self.planner, replicas)

    def narrow(self):
        """Plan with the budget as it is now; what was planned ahead is forgotten."""
        self.cost = replace(self.cost, budget_bytes=self.budget.stage_bytes)
        self._start_ahead()

    def shrink_evaluation(self, tokens: int):
        """Evaluate in chunks of at most ``tokens`` from now on. Not kept for a resumed run: the
        loss is the same, however it is computed."""
        self._evaluation_tokens = tokens

    def adopt(self, profile: Profile):
        """Plan with another cost model from now on."""
        self.cost = replace(self.cost, profile=profile)
        self._start_ahead()

    def step(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> Step:
        text = error = None
        if self.groups.control.rank() == 0:
            try:
                step = self._plan(iteration, lengths, forward_only)
                self._require_fit(step)
                text = str(step)
            except ValueError as refusal:
                error = str(refusal)
        return Step.parse(share(text, error, self.groups.control))

    def _plan(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> Step:
        planner, replicas = self.planner, self.groups.replicas
        if forward_only and self._evaluation_tokens is not None:
            from megatron_epp.planner import evaluation_step

            most = self._evaluation_tokens
            return evaluation_step(lengths, self.cost, self.options, replicas, most)
        before = None if forward_only else self.fallbacks.of(iteration)
        if before is not None:
            planner = before
            logger.warning("iteration %d: planned by %s, as before the resume", iteration, planner)
        elif self.ahead is not None:
            try:
                return self._asked(iteration, lengths, forward_only)
            except PlannerFailed as failure:
                if not forward_only:
                    return self._stand_in(iteration, lengths, failure)
                # Evaluations are planned alike by everybody.
                logger.warning("an evaluation: the planner failed (%s)", failure)
        return make_step(lengths, self.cost, self.options, planner, replicas, forward_only)

    def _asked(self, iteration: int, lengths: Sequence[int], forward_only: bool) -> Step:
        """The planner process's step. PlannerFailed: it gave none; PlanError: there can be none."""
        assert self.ahead is not None
        name = _request_name(iteration, lengths, forward_only)
        try:
            self.ahead.ask(name, lengths, forward_only)
            return Step.parse(self.ahead.reply(name)["step"])
        except PlannerRefused as refusal:
            raise PlanError(str(refusal)) from refusal

    def _stand_in(self, iteration: int, lengths: Sequence[int], failure: PlannerFailed) -> Step:
        """The fallback's step, which is kept; where that does not fit, the planner's after all."""
        said = f"iteration {iteration}: the planner failed ({failure})"
        try:
            step = make_step(
                lengths, self.cost, self.options, FALLBACK, self.groups.replicas, False
            )
            self._require_fit(step)
        except ValueError as excess:
            logger.warning("%s, and %s does not fit; asking once more", said, FALLBACK)
            try:
                return self._asked(iteration, lengths, False)
            except PlannerFailed as again:
                raise PlanError(f"{said}, and again ({again}); by {FALLBACK}: {excess}") from again
        logger.warning("%s; using %s", said, FALLBACK)
        self.fallbacks.add(iteration, FALLBACK, str(failure))
        return step

    def _require_fit(self, step: Step):
        """The promise of every stage is within its budget, or nobody trains."""
        for plan in step.plans:
            if plan.predicted is None:
                continue
            for stage, (peak, budget) in enumerate(
                zip(plan.predicted.peak_gib, self.cost.budget_bytes, strict=True)
            ):
                if peak * GIB > budget * (1 + _ROUNDING):
                    longest = max(plan.documents)
                    raise PlanError(
                        f"stage {stage} needs {peak:.4g} GiB in the best plan found "
                        f"({plan.predicted.planner}) for documents of up to {longest} tokens; the "
                        f"budget is {budget / GIB:.4g} GiB: raise --epp-memory-budget-gib, use "
                        "more stages, or a shorter --seq-length"
                    )

    def look_ahead(self, iteration: int, lengths: Sequence[int]) -> None:
        if self.ahead is not None:
            self.ahead.ask(_request_name(iteration, lengths, False), lengths, False)


def _request_name(iteration: int, lengths: Sequence[int], forward_only: bool) -> str:
    """Names what a plan depends on, so that a reply is never used for another batch."""
    digest = hashlib.sha256(repr(list(map(int, lengths))).encode()).hexdigest()[:16]
    return f"{'evaluation' if forward_only else 'iteration'} {iteration} {digest}"


def make_step(
    lengths: Sequence[int],
    cost: Cost,
    options: Any,
    planner: str,
    replicas: int,
    forward_only: bool,
) -> Step:
    """The step that ``planner`` makes, or for ``forward_only`` one of forwards alone."""
    # Imported where plans are made, on rank 0: solver and compiler take seconds to load.
    from megatron_epp.planner import evaluation_step, plan_step

    if forward_only:
        return evaluation_step(lengths, cost, options, replicas)
    return plan_step(lengths, cost, options, planner, replicas).step


def make_planning(
    args: Any,
    config: Config,
    layers: tuple[int, ...],
    multiple: int,
    groups: Groups,
    profile: Profile,
) -> FixedSteps | PlannedSteps:
    if config.epp_plan is not None:
        return FixedSteps(config.epp_plan)
    from megatron_epp.planner import Options, planner_of

    planner_of(config.epp_planner)  # refuses what no pipeline can run
    options = Options(
        context=args.seq_length,
        levers=training_levers(config.epp_levers, args),
        effort=config.epp_effort,
        multiple=multiple,
    )
    cost = training_cost(args, config, layers, profile)
    # What is available differs between hosts and moments: rank 0's is everybody's.
    budgets, error, fallbacks = json.dumps(cost.budget_bytes), None, None
    if groups.control.rank() == 0:
        if config.epp_memory_budget_gib is None:
            budgets = _kept_budgets(args, cost.stages) or budgets
            if args.save:
                Path(args.save).mkdir(parents=True, exist_ok=True)
                (Path(args.save) / DEFAULT_BUDGETS).write_text(budgets)
        try:
            places = [folder for folder in (args.save, config.epp_record) if folder]
            fallbacks = Fallbacks(places, None if args.finetune else args.load)
        except ValueError as refusal:
            error = str(refusal)
    budgets = share(budgets, error, groups.control)
    cost = replace(cost, budget_bytes=tuple(json.loads(budgets)))
    ahead = config.epp_plan_ahead
    return PlannedSteps(cost, options, config.epp_planner, groups, ahead, fallbacks)


def training_levers(text: str, args: Any) -> frozenset[str]:
    """The levers that --epp-levers ``text`` stands for in this job.

    What the job cannot run is left out of default and all; a ValueError where it is named itself.
    Left out, too, but run where it is named: the split backward of Transformer Engine's linears,
    which no GPU has run yet.
    """
    from megatron_epp.planner.options import SIMULATION_ONLY, parse_levers

    levers = parse_levers(text)
    unusable = dict.fromkeys(SIMULATION_ONLY, "only simulation can do that")
    unusable |= unusable_levers(args)
    named = {word.strip() for word in text.split(",")}
    for name in sorted(named & unusable.keys()):
        raise ValueError(f"--epp-levers {name}: {unusable[name]}; leave it out")
    unproven = set() if args.transformer_impl == "local" else {"wsplit"}
    return frozenset(levers - unusable.keys() - (unproven - named))


def unusable_levers(args: Any) -> dict[str, str]:
    """Levers that plans of this job's layers must do without, each with the reason: fused gradient
    accumulation of Megatron's linears has no W (mcore/deferred.py)."""
    if args.transformer_impl == "local" and args.gradient_accumulation_fusion:
        return {"wsplit": "fused gradient accumulation runs no I and W"}
    return {}


# ------------------------------------------------------------------ cost


def model_shape(args: Any) -> Model:
    """The shape of the model that Megatron's flags describe."""
    return Model(
        name="megatron",
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn_hidden=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        kv_heads=args.num_query_groups or args.num_attention_heads,
        head_size=args.kv_channels,
        vocabulary=args.padded_vocab_size,
        gated=bool(args.swiglu),
        tied=not args.untie_embeddings_and_output_weights,
    )


def analytic(args: Any) -> Profile:
    """What --epp-cost-model analytic stands for: the model's shape on the device's name."""
    early = early_head(args)
    made = analytic_profile(model_shape(args), device(device_name()), logits_held=not early)
    attention = VarlenAttention if host.has_gpu() else PartsAttention
    return replace(
        made,
        keeps_last=attention.keeps_last,
        last_workspace_tokens=float(block_tokens(args)) if early else 0.0,
    )


def training_cost(args: Any, config: Config, layers: tuple[int, ...], profile: Profile) -> Cost:
    """The cost of this job's chunks; on a CPU the budget covers what chunks hold and no states."""
    if not host.has_gpu():
        profile = without_states(profile)
    budget = config.epp_memory_budget_gib
    budget_bytes = default_budget_bytes(args) if budget is None else budget * GIB
    return Cost(
        profile,
        layers,
        (budget_bytes,) * len(layers),
        tp=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        dp=args.data_parallel_size,
        zero=1,
    )


def device_name() -> str:
    """The planner's name of the device that this process trains on."""
    if not host.has_gpu():
        return "cpu"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    if properties.total_memory > 100 * GIB:
        return "h200-141g"
    if properties.major >= 9:
        return "h100-80g"
    return "a100-80g" if properties.total_memory > 50 * GIB else "a100-40g"


def default_budget_bytes(args: Any) -> float:
    """On a GPU what its name's budget is; on a CPU a share of the memory, for a rank's chunks."""
    if host.has_gpu():
        return device(device_name()).budget_bytes
    available = psutil.virtual_memory().available
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text))
    return CPU_SHARE * available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _kept_budgets(args: Any, stages: int) -> str | None:
    """The default budgets of the run that is resumed: its plans were made within them."""
    path = Path(args.load or "") / DEFAULT_BUDGETS
    if not args.load or not path.exists():
        return None
    text = path.read_text()
    return text if len(json.loads(text)) == stages else None
