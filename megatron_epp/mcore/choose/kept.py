"""Saved choices of a run, in a file next to its checkpoint, for runs that resume.

Checkpoints store weights and optimizer states by stage, so they depend on the choices.
"""

import json
from pathlib import Path
from typing import Any

from megatron_epp.control.files import write_atomically
from megatron_epp.corpus.blend import BLENDS, TOKENS
from megatron_epp.ir.placement import Placement
from megatron_epp.mcore.flags.config import LAYOUT_KEY, OFF, ON, placement_by_time
from megatron_epp.mcore.job.checkpoint_folders import TRACKER
from megatron_epp.mcore.placing.requested import PLACE, STAGE_LAYERS
from megatron_epp.safe_files import bounded_text

CHOICES_FILE = "epp-choices.json"  # {"epp_vocab_parallel": ..., "epp_place": ..., ...}
# Files of versions before CHOICES_FILE, which are refused.
VOCABULARY_KEY, BLEND_KEY = "epp_vocab_parallel", "epp_blend"


def resumes(args: Any) -> bool:
    """Return whether this run resumes another run; a run with --finetune only loads weights.

    With non-persistent checkpoints, the function returns True if the folder of --load has a file of
    choices, because the checkpoint itself may be on local disks of the nodes.
    """
    if not args.load or args.finetune:
        return False
    folder = Path(args.load)
    if getattr(args, "non_persistent_ckpt_type", None) and (folder / CHOICES_FILE).exists():
        return True
    return (folder / TRACKER).exists()


def keep_choices(args: Any, placement: Placement | None, models: list[Any]) -> list[Any]:
    """Write the choices to the folder of --save and return ``models`` (Megatron's pre-wrap hook).

    ``placement`` is the chosen placement with its layers, or None.

    Raises:
        OSError: The folder cannot be written.
    """
    choices = {VOCABULARY_KEY: args.epp_vocab_parallel, BLEND_KEY: args.epp_blend}
    if placement is not None:
        choices |= {PLACE: placement.place, STAGE_LAYERS: placement.layers}
    if (layout := getattr(args, LAYOUT_KEY, None)) is not None:
        choices[LAYOUT_KEY] = layout
    write_atomically(Path(args.save) / CHOICES_FILE, json.dumps(choices) + "\n")
    return models


def resumable_line(args: Any) -> str:
    """Return a line on the parallel degrees with which a run can resume from --save."""
    flag, more = "--dist-ckpt-optim-fully-reshardable", ""
    if getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        degrees = f"the degrees of this run (--ckpt-format {args.ckpt_format})"
    elif not args.use_distributed_optimizer or getattr(args, flag[2:].replace("-", "_"), False):
        degrees = "any tensor-, pipeline- and data-parallel degrees"
    else:
        degrees = (
            "the stages and the tensor-parallel degree of this run, with any data-parallel one"
        )
        if getattr(args, "non_persistent_ckpt_type", None) != "local":  # it does not support flag
            more = f"; with {flag}, given now, they resume with any"
    return f"--save {args.save}: checkpoints resume with {degrees}{more}"


def kept_layout(args: Any) -> dict[str, Any] | None:
    """Return the saved layout of the resumed run; None if --epp-layouts did not choose it.

    Raises:
        ValueError: The file is damaged.
    """
    path, choices = _kept(args, LAYOUT_KEY)
    layout = (choices or {}).get(LAYOUT_KEY)
    if layout is not None and not isinstance(layout, dict):
        raise _damaged(path, "expected an object", LAYOUT_KEY, args)
    return layout


def keeps_layout(args: Any) -> bool:
    """Return whether this run has the layout of the run that it resumes.

    Without --epp-layouts, the result is True, because the flags set the layout. The saved
    choices must then suit the flags.
    """
    chosen, kept = getattr(args, LAYOUT_KEY, None), kept_layout(args)
    degrees = ("tp", "pp", "cp", "ep")
    return chosen is None or (
        kept is not None and all(chosen[name] == kept.get(name) for name in degrees)
    )


def kept_vocabulary(args: Any) -> bool:
    """Return whether the resumed run used vocabulary parallelism; False if it saved no choice.

    Raises:
        ValueError: The file is damaged.
    """
    path, choices = _kept(args, VOCABULARY_KEY)
    choice = (choices or {}).get(VOCABULARY_KEY, OFF)
    if choice not in (ON, OFF):
        raise _damaged(path, 'expected "on" or "off"', VOCABULARY_KEY, args)
    return choice == ON


def kept_blend(args: Any) -> str:
    """Return the unit of the resumed run's corpus weights: tokens or documents.

    Without a file of choices, Megatron's own trainer made the checkpoint, whose unit is tokens.

    Raises:
        ValueError: The file is damaged.
    """
    path, choices = _kept(args, BLEND_KEY)
    unit = TOKENS if choices is None else choices.get(BLEND_KEY)
    if unit not in BLENDS:
        raise _damaged(path, 'expected "tokens" or "documents"', BLEND_KEY, args)
    return str(unit)


def kept_placement(args: Any) -> Placement | None:
    """Return the placement and layers of the resumed run; None if nothing was saved.

    Raises:
        ValueError: The file is damaged, or does not fit this job's layers, ranks or flags.
    """
    path, choices = _kept(args, STAGE_LAYERS)
    if choices is None or STAGE_LAYERS not in choices:
        return None
    ranks = args.pipeline_model_parallel_size
    place: Any = choices.get(PLACE, list(range(ranks)))
    layers: Any = choices.get(STAGE_LAYERS)
    for numbers, least in ((layers, 1), (place, 0)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= least for n in numbers):
            raise _damaged(path, "no partition (expected layers by stage)", STAGE_LAYERS, args)
    kept = Placement(tuple(place), tuple(layers))
    unfit = len(layers) != len(place) or sum(layers) != args.num_layers
    if unfit or set(place) != set(range(ranks)):
        raise ValueError(
            f"{path}: layers {layers} are not {args.num_layers} on {ranks} stages; leave "
            f"--epp-{'partition' if kept.is_even else 'placement'} auto out "
            "to load this checkpoint into another pipeline"
        )
    if not kept.is_even and not placement_by_time(args):
        raise ValueError(
            f"{path}: stages are on ranks {kept}; expected --epp-placement auto as the run began, "
            "or leave --epp-partition auto out"
        )
    return kept


def _kept(args: Any, key: str) -> tuple[Path, dict[str, Any] | None]:
    """Return (path, choices) of the file of choices; ``choices`` is None if there is no file.

    Raises:
        ValueError: The file is damaged. The message names the flag that says ``key`` instead.
    """
    path = Path(args.load) / CHOICES_FILE
    if not path.exists():
        return path, None
    try:
        choices = json.loads(bounded_text(path, "a run's choices", "replace"))
        if not isinstance(choices, dict):
            raise ValueError("expected an object")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no choices ({error})", key, args) from error
    return path, choices


def _damaged(path: Path, what: str, key: str, args: Any) -> ValueError:
    flag = "--pipeline-model-parallel-layout"
    if key in (VOCABULARY_KEY, BLEND_KEY):
        flag = f"--{key.replace('_', '-')}"
    elif args.hybrid_layer_pattern is not None:
        flag = "| in --hybrid-layer-pattern"
    return ValueError(
        f"{path}: {what}; delete the file, and say with {flag} what the checkpoint was made with"
    )
