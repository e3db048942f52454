"""Checks of checkpoint folders for incomplete checkpoints of killed jobs.

Megatron writes ``metadata.json`` to ``iter_N`` after all other files of the checkpoint. It then
writes N to the tracker file latest_checkpointed_iteration.txt. This module only reads the folders.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_epp.safe_files import bounded_text

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's
RELEASE = "release"  # in a tracker: weights without an iteration
# Last and first file that --ckpt-format torch_dist writes.
_LAST, _COMMON = "metadata.json", "common.pt"
_TORCH, _DCP = "mp_rank_*", ".metadata"  # other formats


def folders_of(args: Any) -> dict[str, Path]:
    """Return the checkpoint folders that a job reads at its start, by flag and its value.

    The result omits folders in object storage, and those of ``--non-persistent-ckpt-type local``,
    because each rank has a different folder.
    """
    load = getattr(args, "load", None)
    folders = {} if load is None or "://" in load else {f"--load {load}": Path(load)}
    if getattr(args, "non_persistent_ckpt_type", None) == "global":
        own = args.non_persistent_global_ckpt_dir
        if own is not None:
            folders[f"--non-persistent-global-ckpt-dir {own}"] = Path(own)
        elif load is not None and folders:
            folder = Path(load) / "non_persistent"
            folders[f"--non-persistent-ckpt-type global, {folder}"] = folder
    return folders


def require_local(args: Any) -> None:
    """Raise a ValueError if Megatron would refuse to save local checkpoints with these flags."""
    if getattr(args, "non_persistent_ckpt_type", None) != "local":
        return
    if getattr(args, "dist_ckpt_optim_fully_reshardable", False):
        raise ValueError(
            "--non-persistent-ckpt-type local with --dist-ckpt-optim-fully-reshardable: local "
            "checkpoints hold the optimizer's states by rank; leave the second flag out, or give "
            "--non-persistent-ckpt-type global"
        )


def require_complete(args: Any) -> None:
    """Raise a ValueError if the checkpoint that the job would load is missing or incomplete."""
    for flag, path in _to_load(args):
        folder = path.parent
        if not path.is_dir():
            raise ValueError(
                f"{flag}: {path} is not there; expected the folder of a checkpoint, of an "
                f"iteration that {folder} has: {_numbers(complete_iterations(folder))}"
            )
        if not _is_complete(path):
            raise ValueError(
                f"{flag}: {path} is half written, by a job that ended while it saved; give "
                f"--ckpt-step with one of the iterations that are complete: "
                f"{_numbers(complete_iterations(folder))}"
            )


def checkpoint_to_load(args: Any) -> Path | None:
    """Return the folder of the latest checkpoint that the job loads; None if it loads none.

    Raises:
        ValueError: A tracker file is damaged.
    """
    return max((path for _, path in _to_load(args)), key=lambda path: path.name, default=None)


def _to_load(args: Any) -> Iterator[tuple[str, Path]]:
    """Yield (flag, folder of the checkpoint to load) for the folders of :func:`folders_of`.

    Raises:
        ValueError: A tracker file is damaged.
    """
    step, elsewhere = getattr(args, "ckpt_step", None), getattr(args, "pretrained_checkpoint", None)
    for flag, folder in folders_of(args).items():
        tracked = tracked_iteration(folder)
        if tracked is not None and tracked != RELEASE and not _is_iteration(tracked):
            raise ValueError(
                f"{flag}: {folder / TRACKER} has {tracked!r}; expected the iteration of the "
                "checkpoint to load, a whole number"
            )
        if step and flag.startswith("--load"):
            flag, tracked = f"--ckpt-step {step}", str(step)
        if tracked is None or tracked == RELEASE or (elsewhere and step):
            continue
        yield flag, folder / f"iter_{int(tracked):07d}"


def leftover_lines(args: Any) -> Iterator[str]:
    """Yield lines about incomplete or unused checkpoints in the folders of :func:`folders_of`."""
    for flag, folder in folders_of(args).items():
        tracked = tracked_iteration(folder)
        latest = int(tracked) if tracked is not None and _is_iteration(tracked) else -1
        half = [number for number, path in _iterations(folder) if not _is_complete(path)]
        if half:
            yield (
                f"{flag}: half written, by a job that ended while it saved: {_names(half)}; they "
                "are not loaded, and nothing removes them"
            )
        later = [number for number in complete_iterations(folder) if number > latest]
        if later and latest >= 0:
            yield (
                f"{flag}: {_names(later)} after iteration {latest}, to which {TRACKER} points; "
                f"--ckpt-step {later[-1]} would load the last"
            )


def tracked_iteration(folder: Path) -> str | None:
    """Return the first 80 characters of the tracker file in ``folder``; None if unreadable."""
    try:
        return bounded_text(folder / TRACKER, "a checkpoint's tracker", "replace").strip()[:80]
    except (OSError, ValueError):
        return None


def complete_iterations(folder: Path) -> list[int]:
    """Return the iterations with complete checkpoints in ``folder``, in ascending order."""
    return [number for number, path in _iterations(folder) if _is_complete(path)]


def _is_iteration(tracked: str) -> bool:
    return tracked.isascii() and tracked.isdecimal() and len(tracked) < 19


def _iterations(folder: Path) -> list[tuple[int, Path]]:
    paths = [path for path in folder.glob("iter_*") if path.is_dir()]
    return sorted((int(p.name[5:]), p) for p in paths if p.name[5:].isdecimal())


def _is_complete(path: Path) -> bool:
    if (path / _LAST).is_file() or any(path.glob(_TORCH)):
        return True
    return (path / _DCP).is_file() and not (path / _COMMON).is_file()


def _names(iterations: list[int]) -> str:
    return ", ".join(f"iter_{number:07d}" for number in iterations)


def _numbers(iterations: list[int]) -> str:
    return ", ".join(map(str, iterations)) or "none"
