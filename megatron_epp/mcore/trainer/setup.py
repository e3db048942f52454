"""Setup of ``--epp`` in a process that runs Megatron's trainer."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_epp.cost.catalogue.devices import GIB
from megatron_epp.ir.placement import EVENLY
from megatron_epp.mcore.capabilities import refusals
from megatron_epp.mcore.choose.choices import choose_blend
from megatron_epp.mcore.choose.kept import keep_choices, resumable_line
from megatron_epp.mcore.data.chat_cache import check_chat_flags
from megatron_epp.mcore.flags import replaced
from megatron_epp.mcore.flags.config import AUTO, OFF, Config, placement_by_time
from megatron_epp.mcore.job.checkpoint_folders import leftover_lines
from megatron_epp.mcore.job.emergency_exit import SAVES
from megatron_epp.mcore.job.job_cost import host_budget_bytes
from megatron_epp.mcore.job.read_flags import rank
from megatron_epp.mcore.job.resumed_schedule import note_samples
from megatron_epp.mcore.job.saved_stages import require_same_stages, saved_state
from megatron_epp.mcore.kinds.registry import draws_by_default_generator, require_shared
from megatron_epp.mcore.model.forward import chunk_forward_step
from megatron_epp.mcore.model.layer_spec import fix_layer_spec
from megatron_epp.mcore.model.quantisation import warn_of_scales
from megatron_epp.mcore.patching import patch_points
from megatron_epp.mcore.placing.parts import place_parts
from megatron_epp.mcore.placing.requested import (
    PLACE,
    STAGE_LAYERS,
    asked_placement,
    layers_of_placement,
    place_of,
)
from megatron_epp.mcore.trainer.hooks import TrainerHooks
from megatron_epp.mcore.trainer.job import Job
from megatron_epp.mcore.trainer.launcher import end_with_launcher

_MOST_WARM_UP_BYTES = GIB  # of activations in Megatron's warm-up of fused functions


def setup(
    args: Any,
    model_config: Any,
    hooks: TrainerHooks | None = None,
) -> tuple[Any, Any]:
    """Install elastic pipeline parallelism in this process.

    The function patches Megatron, adds hooks to ``model_config``, replaces the value ``auto`` of
    flags in ``args``, and starts a thread that watches torchrun. Rank 0 prints the chosen values.

    Args:
        args: Megatron's arguments, including those of :mod:`megatron_epp.mcore.flags.config`.
        model_config: The configuration from which ``pretrain`` builds the model.
        hooks: Components of the trainer; None: the default components.

    Returns:
        The forward step and the data provider for Megatron's ``pretrain``.

    Raises:
        ValueError: The flags or the model are not supported; the message is one line.
    """
    lines = [*_leave_model_alone(args), *_limit_fusion_warm_up(args)]
    if args.epp_blend == AUTO and (line := choose_blend(args)) is not None:
        lines.append(line)
    if rank() == 0:
        for line in (*lines, *leftover_lines(args)):
            print(line, flush=True)
    config = Config.of(args)
    hooks = hooks or TrainerHooks()
    _refuse(args, config)
    end_with_launcher()
    place_parts(model_config, args)
    if hooks.pre_wrap is not None:
        if refusals.vocabulary_parallel(args):
            raise ValueError(
                "--epp-vocab-parallel on does not run a model that a script changes before it is "
                "wrapped, as adapters do; give --epp-vocab-parallel off"
            )
        model_config.pre_wrap_hooks.append(hooks.pre_wrap)
    job = Job(args, config, hooks)
    fix_layer_spec(model_config)
    job.install(model_config)
    if args.save and rank() == 0:  # after the hook that locks the folder
        SAVES.first_line = resumable_line(args)
        print(SAVES.first_line, flush=True)
        model_config.pre_wrap_hooks.append(partial(keep_choices, args))
    patch_points.apply_schedule_patch(job.choose_schedule)

    def datasets(samples: Sequence[int], vp_stage: int | None = None) -> Any:
        return job.datasets(samples)

    datasets.is_distributed = True  # type: ignore[attr-defined]  # every rank reads its own tokens
    return chunk_forward_step, datasets


def _leave_model_alone(args: Any) -> list[str]:
    """Set flags in ``args`` that are still ``auto``, and return lines to print.

    They are ``auto`` in a user's own script, which has described the model, and may change it. If
    the script has its own parser, the function also places the stages of --epp-placement.
    """
    lines, ranks = [], args.pipeline_model_parallel_size
    if args.epp_vocab_parallel == AUTO:
        args.epp_vocab_parallel = OFF
        lines.append("--epp-vocab-parallel auto: off; a script of your own says on")
    if placement_by_time(args):
        args.epp_placement = EVENLY
        lines.append("--epp-placement auto: one stage a rank; a script of your own says another")
    if not place_of(args) and args.pipeline_model_parallel_layout is None:
        named = asked_placement(args, ranks)
        if named is not None and not named.is_even:
            layers = layers_of_placement(named, args.num_layers)
            vars(args).update({PLACE: list(named.place), STAGE_LAYERS: list(layers)})
    return lines if ranks > 1 else []


def _limit_fusion_warm_up(args: Any) -> list[str]:
    """Set whether Megatron warms up its fused functions, and return lines to print.

    The warm-up draws from the generator from which routers and attention sinks are then drawn. So a
    job runs it, to begin with the weights of Megatron's own, unless its activations are large.
    """
    shards = args.context_parallel_size * args.tensor_model_parallel_size
    values = max(2 * args.ffn_hidden_size, 3 * args.hidden_size) * args.seq_length // shards
    size = values * (2 if args.bf16 or args.fp16 else 4)
    setattr(args, patch_points.NO_FUSION_WARM_UP, size >= _MOST_WARM_UP_BYTES)
    if size < _MOST_WARM_UP_BYTES or not draws_by_default_generator(args):
        return []
    return [
        f"Megatron's warm-up of fused functions is left out ({size / GIB:.1f} GiB at --seq-length "
        f"{args.seq_length}): first weights of routers and attention sinks are others than those "
        "of the same --seed without --epp"
    ]


def _require_sharing(args: Any, config: Config) -> None:
    """Raise a ValueError if documents cannot share prefixes, or plans would not use them."""
    from megatron_epp.planner.registry import planner_of

    require_shared(args, "--epp-share-from", ahead=True)
    if args.hidden_dropout:
        raise ValueError(
            f"--epp-share-from: with --hidden-dropout {args.hidden_dropout} documents draw masks "
            "of their own, also for tokens that they share; give --hidden-dropout 0"
        )
    if config.epp_plan is None and not planner_of(config.epp_planner).takes_prefixes:
        raise ValueError(
            f"--epp-share-from: --epp-planner {config.epp_planner} computes documents whole; give "
            "--epp-planner epp"
        )


def _refuse(args: Any, config: Config) -> None:
    """Refuse unsupported flags before any slow work, and warn about flags without effect."""
    refusals.refuse(args)
    replaced.warn(args)
    warn_of_scales(args)
    host_budget_bytes(config)
    if config.epp_share_from:
        _require_sharing(args, config)
    if (saved := saved_state(args)) is not None:
        require_same_stages(args, saved)
        note_samples(args, saved)
    if args.sft:
        check_chat_flags(args)
    if args.num_layers is not None and args.pipeline_model_parallel_size > args.num_layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: more stages "
            f"than the {args.num_layers} layers; expected at most one stage per layer"
        )
