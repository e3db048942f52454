"""Whether a job's latent attention keeps latents or expanded K and V for later slices."""

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

from megatron_epp.cost.profile import Profile
from megatron_epp.ir import PlanError
from megatron_epp.layers.attention.cpu import PartsAttention
from megatron_epp.mcore.calibrate.profile_file import FILE_NAME
from megatron_epp.mcore.config import ANALYTIC, AUTO, EXPANDED, LATENTS, Config
from megatron_epp.mcore.job_cost import analytic, kept_budgets, training_cost
from megatron_epp.mcore.model.attention import Attention
from megatron_epp.mcore.model.latent_attention import can_keep_latents
from megatron_epp.runtime.consensus import broadcast_text
from megatron_epp.runtime.groups import Groups

logger = logging.getLogger(__name__)


def choose_mla_keeps(
    args: Any, model: Any, attention: Attention, layers: tuple[int, ...], groups: Groups
) -> None:
    """Decide for all ranks, and say so in ``args.epp_mla_keeps`` and to ``attention``. Collective.

    ``layers``: of every stage. ValueError: latents are asked for where they cannot be.
    """
    if not args.multi_latent_attention:
        return
    keeps, error = args.epp_mla_keeps, None
    if groups.control.rank() == 0:
        try:
            keeps = decided(args, model, attention, layers)
        except ValueError as refusal:
            error = str(refusal)
    args.epp_mla_keeps = broadcast_text(keeps, error, groups.control)
    attention.latents = args.epp_mla_keeps == LATENTS


def decided(args: Any, model: Any, attention: Attention, layers: tuple[int, ...]) -> str:
    """``latents`` or ``expanded``, of a model of this rank's layers."""
    wanted = args.epp_mla_keeps
    reason = _why_expanded(model, attention)
    if reason is not None and wanted == LATENTS:
        raise ValueError(f"--epp-mla-keeps latents: {reason}; leave the flag out")
    if reason is not None or wanted != AUTO:
        return EXPANDED if reason is not None else wanted
    return cheaper(args, layers)


def _why_expanded(model: Any, attention: Attention) -> str | None:
    """Why latents cannot be kept; None where they can."""
    if not isinstance(attention, PartsAttention):
        return "attention kernels of GPUs take K and V of a whole context only"
    if model.config.window_size:
        return "layers with windows keep the ends of slices, in K and V"
    for layer in model.decoder.layers:
        if not can_keep_latents(layer.self_attention):
            return (
                "the kv up-projection of a layer is not Megatron's own linear (adapters around it, "
                "or another class)"
            )
    return None


def cheaper(args: Any, layers: tuple[int, ...]) -> str:
    """By the cost model, for one document of --seq-length a replica, the longest that there may be.

    A cost-model file, given or beside the checkpoint that is resumed from, was measured with one of
    both, which it stays with. Without one the model is not measured yet: its shape on the device's
    name decides.
    """
    from megatron_epp.planner import Options, planner_of

    config = Config.of(args)
    file = config.epp_cost_model or str(Path(args.load or "") / FILE_NAME)
    if file != ANALYTIC and (config.epp_cost_model or args.load) and Path(file).exists():
        measured = Profile.load(file).kinds.values()
        return LATENTS if any(figures.kv_replicated for figures in measured) else EXPANDED
    seconds: dict[str, float] = {}
    for keeps in (EXPANDED, LATENTS):
        trial = copy.copy(args)
        trial.epp_mla_keeps = keeps
        cost = training_cost(trial, config, layers, analytic(trial))
        if config.epp_memory_budget_gib is None:  # those of the run that is resumed
            kept = kept_budgets(args, len(layers)) or cost.budget_bytes
            cost = dataclasses.replace(cost, budget_bytes=kept)
        try:
            options = Options(context=args.seq_length, effort=0)
            planned = planner_of(config.epp_planner)([args.seq_length], cost, options)
        except PlanError:  # there is no memory for it
            continue
        seconds[keeps] = planned.seconds
    chosen = min(seconds, key=lambda keeps: seconds[keeps], default=LATENTS)
    said = ", ".join(f"{keeps} {of:.4g} s" for keeps, of in seconds.items())
    logger.info(
        "latent attention keeps %s: a document of %d inputs takes %s by the cost model",
        chosen, args.seq_length, said or "too much memory either way",
    )  # fmt: skip
    return chosen
