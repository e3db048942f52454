"""Saved choices of a run, in a file next to its checkpoint, for runs that resume.

With the same choices, a run reads the documents in the same order, and can load optimizer states
that were saved by rank.
"""

import json
from pathlib import Path
from typing import Any

from megatron_epp.control.files import write_atomically
from megatron_epp.corpus.blend import BLENDS, TOKENS
from megatron_epp.ir.placement import Placement
from megatron_epp.mcore.flags.config import LAYOUT_KEY, OFF, ON
from megatron_epp.mcore.job.checkpoint_folders import TRACKER
from megatron_epp.mcore.model.shape import placement_of
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


def keep_choices(args: Any, models: list[Any]) -> list[Any]:
    """Write the choices to a file in the folder of --save, and return ``models``.

    The choices are placement, layers per stage, vocabulary parallelism, the unit of corpus weights
    (--epp-blend) and, with --epp-layouts, the layout. Megatron calls this function as a pre-wrap
    hook; --save must be set.

    Raises:
        OSError: The folder cannot be written.
    """
    placement = placement_of(args)
    choices = {VOCABULARY_KEY: args.epp_vocab_parallel, BLEND_KEY: args.epp_blend}
    choices |= {PLACE: placement.place, STAGE_LAYERS: placement.layers}
    if (layout := getattr(args, LAYOUT_KEY, None)) is not None:
        choices[LAYOUT_KEY] = layout
    write_atomically(Path(args.save) / CHOICES_FILE, json.dumps(choices) + "\n")
    return models


_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def resumable_line(args: Any) -> str:
    """Return a line on the parallel degrees with which a run can resume from --save."""
    more = ""
    if getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        degrees = f"the degrees of this run (--ckpt-format {args.ckpt_format})"
    elif loads_in_other_stages(args):
        degrees = "any tensor-, pipeline- and data-parallel degrees"
    else:
        degrees = (
            "the stages and the tensor-parallel degree of this run, with any data-parallel one"
        )
        if getattr(args, "non_persistent_ckpt_type", None) != "local":  # it does not support flag
            more = f"; with {_RESHARDABLE}, given now, they resume with any"
    return f"--save {args.save}: checkpoints resume with {degrees}{more}"


def loads_in_other_stages(args: Any) -> bool:
    """Return whether the checkpoints of this run load in any placement."""
    reshardable = getattr(args, _RESHARDABLE[2:].replace("-", "_"), False)
    by_parameter = not args.use_distributed_optimizer or reshardable
    return by_parameter and getattr(args, "ckpt_format", "torch_dist") == "torch_dist"


def kept_layout(args: Any) -> dict[str, Any] | None:
    """Return the saved layout of the resumed run (:attr:`.layouts.ChosenLayout.facts`).

    The result is None if --epp-layouts did not choose the layout of that run.

    Raises:
        ValueError: The file of choices is damaged.
    """
    path, choices = _kept(args, LAYOUT_KEY)
    layout = (choices or {}).get(LAYOUT_KEY)
    if layout is not None and not isinstance(layout, dict):
        raise _damaged(path, "expected an object", LAYOUT_KEY)
    return layout


def keeps_layout(args: Any) -> bool:
    """Return whether this run has the degrees (tp, pp, cp, ep) of the run that it resumes.

    Without --epp-layouts, the result is True without a comparison, because flags set the degrees.

    Raises:
        ValueError: The file of choices is damaged.
    """
    chosen, kept = getattr(args, LAYOUT_KEY, None), kept_layout(args)
    degrees = ("tp", "pp", "cp", "ep")
    return chosen is None or (
        kept is not None and all(chosen[name] == kept.get(name) for name in degrees)
    )


def kept_vocabulary(args: Any) -> bool:
    """Return whether the resumed run used vocabulary parallelism; False if it saved no choice.

    Raises:
        ValueError: The file of choices is damaged.
    """
    path, choices = _kept(args, VOCABULARY_KEY)
    choice = (choices or {}).get(VOCABULARY_KEY, OFF)
    if choice not in (ON, OFF):
        raise _damaged(path, 'expected "on" or "off"', VOCABULARY_KEY)
    return choice == ON


def kept_blend(args: Any) -> str:
    """Return the unit of the resumed run's corpus weights: tokens or documents.

    Without a file of choices, Megatron's own trainer made the checkpoint, whose unit is tokens.

    Raises:
        ValueError: The file of choices is damaged.
    """
    path, choices = _kept(args, BLEND_KEY)
    unit = TOKENS if choices is None else choices.get(BLEND_KEY)
    if unit not in BLENDS:
        raise _damaged(path, 'expected "tokens" or "documents"', BLEND_KEY)
    return str(unit)


def kept_placement(args: Any) -> Placement | None:
    """Return the placement of the resumed run, with layers; None if no placement was saved.

    Raises:
        ValueError: The file of choices is damaged.
    """
    path, choices = _kept(args, STAGE_LAYERS)
    if choices is None or STAGE_LAYERS not in choices:
        return None
    layers: Any = choices[STAGE_LAYERS]
    place: Any = choices.get(PLACE, list(range(len(layers))) if isinstance(layers, list) else [])
    for numbers, least in ((layers, 1), (place, 0)):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= least for n in numbers):
            raise _damaged(path, "no partition (expected layers by stage)", STAGE_LAYERS)
    if not place or len(layers) != len(place) or set(place) != set(range(1 + max(place))):
        raise _damaged(path, f"layers {layers} on ranks {place}", STAGE_LAYERS)
    return Placement(tuple(place), tuple(layers))


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
        raise _damaged(path, f"no choices ({error})", key) from error
    return path, choices


def _damaged(path: Path, what: str, key: str) -> ValueError:
    flag = "--epp-placement 'place ... layers ...'"
    if key in (VOCABULARY_KEY, BLEND_KEY):
        flag = f"--{key.replace('_', '-')}"
    return ValueError(
        f"{path}: {what}; delete the file, and say with {flag} what the checkpoint was made with"
    )
