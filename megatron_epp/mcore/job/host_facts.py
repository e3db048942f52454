"""Facts that every rank reads from its own disk and acts on: compared before a rank waits for them.

A rank that sees no checkpoint where the others do, or another tokenizer, would wait in a collective
that they never join, or train on other tokens.
"""

import hashlib
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_epp.mcore.choose.kept import CHOICES_FILE, EARLIER_PARTITION, EARLIER_VOCABULARY

_BLOCK_BYTES = 1 << 20
# A tokenizer's folder may hold a model's weights as well.
TOKENIZER_SUFFIXES = {".jinja", ".json", ".model", ".tiktoken", ".txt", ".vocab"}
_FILE_FLAGS = (
    "data_args_path",
    "per_split_data_args_path",
    "epp_cost_model",
    "epp_placement",
    "vocab_file",
    "merge_file",
)


def require_same_facts(args: Any, group: dist.ProcessGroup) -> None:
    """Raise on every rank of ``group`` unless all see the same checkpoint, tokenizer and files.

    Collective, on the host. ValueError: which rank sees what of which folder.
    """
    require_same(
        facts_of(args), group, "the same on every host: a shared file system, or copies of it"
    )


def require_same(facts: Mapping[str, str], group: dist.ProcessGroup, expected: str) -> None:
    """Raise a ValueError on every rank of ``group`` unless all have the same ``facts``.

    Collective, on the host.

    ``facts``: what this rank sees, by flag and folder.
    """
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, (socket.gethostname(), dict(facts)), group=group)
    first_host, first = every[0]
    for where in dict.fromkeys(key for _, seen in every for key in seen):
        odd = [n for n, (_, seen) in enumerate(every) if seen.get(where) != first.get(where)]
        if odd:
            host, seen = every[odd[0]]
            ranks = f"rank{'s' * (len(odd) > 1)} {' '.join(map(str, odd[:8]))}"
            raise ValueError(
                f"{where}: {ranks}{' ...' * (len(odd) > 8)} on {host}: {seen.get(where)}; rank 0 "
                f"on {first_host}: {first.get(where)}; expected {expected}"
            )


def facts_of(args: Any) -> dict[str, str]:
    """Return what this rank sees of the files that ``args`` name, by flag and path."""
    facts = {}
    for name in ("load", "pretrained_checkpoint"):
        if folder := getattr(args, name, None):
            facts[f"--{name.replace('_', '-')} {folder}"] = _checkpoint(Path(folder))
    if path := getattr(args, "tokenizer_model", None):
        facts[f"--tokenizer-model {path}"] = _content(tokenizer_files(path))
    for name in _FILE_FLAGS:
        path = getattr(args, name, None)
        if isinstance(path, str):
            facts[f"--{name.replace('_', '-')} {path}"] = _content([Path(path)])
    return facts


def tokenizer_files(path: str) -> list[Path]:
    """Return the files that a tokenizer is read from; none where ``path`` is a name on a hub."""
    place = Path(path)
    if place.is_file():
        return [place]
    if not place.is_dir():
        return []
    return sorted(file for file in place.iterdir() if file.suffix in TOKENIZER_SUFFIXES)


def _checkpoint(folder: Path) -> str:
    tracker = folder / "latest_checkpointed_iteration.txt"
    try:
        with tracker.open(encoding="utf-8", errors="replace") as file:
            latest = file.read(80).strip()
    except OSError:
        return "no checkpoint"
    choices = [folder / name for name in (CHOICES_FILE, EARLIER_VOCABULARY, EARLIER_PARTITION)]
    return f"iteration {latest!r}, choices {_content(choices)}"


def _content(files: Iterable[Path]) -> str:
    """Return a digest of the files that are there, or that none is."""
    digest, there = hashlib.sha256(), False
    for file in files:
        if not file.is_file():
            continue
        there = True
        digest.update(f"\0{file.name}\0".encode())
        try:
            with file.open("rb") as opened:
                while block := opened.read(_BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
    return f"digest {digest.hexdigest()[:12]}" if there else "no file"
