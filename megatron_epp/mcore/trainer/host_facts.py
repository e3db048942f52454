"""Comparison of the files that ranks read from their hosts' disks, before training starts.

If only some ranks found the checkpoint, ranks would block in collectives that others never enter.
A rank with a different tokenizer would train on different tokens.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_epp.mcore.choose.kept import (
    CHOICES_FILE,
)
from megatron_epp.mcore.data.chat_cache import digest_of, tokenizer_files
from megatron_epp.mcore.job.checkpoint_folders import folders_of, tracked_iteration
from megatron_epp.runtime.consensus import require_same

_FILE_FLAGS = (
    "data_args_path",
    "per_split_data_args_path",
    "epp_cost_model",
    "epp_placement",
    "vocab_file",
    "merge_file",
)


def require_same_facts(args: Any, group: dist.ProcessGroup) -> None:
    """Compare the checkpoint, tokenizer and files that the ranks of ``group`` see.

    All ranks of ``group`` must call this function.

    Raises:
        ValueError: Ranks see different files; raised on every rank. The message names ranks and
            paths.
    """
    require_same(
        facts_of(args), group, "the same on every host: a shared file system, or copies of it"
    )


def facts_of(args: Any) -> dict[str, str]:
    """Return {flag and its path: text} for each flag that names a file or checkpoint.

    The text contains a digest of the files, or the checkpoint's iteration.
    """
    folders = folders_of(args)
    if pretrained := getattr(args, "pretrained_checkpoint", None):
        folders[f"--pretrained-checkpoint {pretrained}"] = Path(pretrained)
    facts = {flag: _checkpoint(folder) for flag, folder in folders.items()}
    if path := getattr(args, "tokenizer_model", None):
        facts[f"--tokenizer-model {path}"] = _content(tokenizer_files(path))
    for name in _FILE_FLAGS:
        path = getattr(args, name, None)
        if isinstance(path, str):
            facts[f"--{name.replace('_', '-')} {path}"] = _content([Path(path)])
    return facts


def _checkpoint(folder: Path) -> str:
    latest = tracked_iteration(folder)
    if latest is None:
        return "no checkpoint"
    return f"iteration {latest!r}, choices {_content([folder / CHOICES_FILE])}"


def _content(paths: Iterable[Path]) -> str:
    """Return a text with the digest of the existing files, or "no file"."""
    try:
        files = [path for path in paths if path.is_file()]  # fails if a placement is a long name
        return f"digest {digest_of(files)[:12]}" if files else "no file"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
