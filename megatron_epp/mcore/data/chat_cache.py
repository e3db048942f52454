"""Cache of corpora converted from chat files (``--sft --data-path x.jsonl``).

Rank 0 converts each chat file once and writes the corpus to the data cache. The name of the corpus
contains a digest of all inputs of the conversion: the chat file's bytes, the tokenizer's files and
the chat format. The other ranks wait as long as rank 0 signals progress.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import print_rank_0

from megatron_epp.mcore.data.conversations import (
    FORMATS,
    ChatTokenizer,
    encode_line,
    read_lines,
    unread_line,
    write_encoded,
)
from megatron_epp.mcore.data.data_flags import blends_of
from megatron_epp.runtime.consensus import require_same
from megatron_epp.runtime.rank_zero_work import done_by_rank_zero

# Increase it when a code change alters the files that a conversation is converted to.
_VERSION = 2
_BLOCK_BYTES = 1 << 20
# A tokenizer's folder may also contain a model's weights.
_TOKENIZER_SUFFIXES = {".jinja", ".json", ".model", ".tiktoken", ".txt", ".vocab"}


def converted_chats(args: Any, group: dist.ProcessGroup) -> Mapping[str, str]:
    """Convert the chat files of all data flags; return {path: corpus prefix}.

    All ranks of ``group`` must call this function. Rank 0 tokenizes each chat file that has no
    corpus in the cache, writes the corpus, and prints its name. The cache is the folder
    --data-cache-path; by default, the folder ``cache`` next to the chat file. Every rank raises the
    same errors.

    Raises:
        PlanError: A file cannot be read, converted or written. If a line is not valid, the message
            contains its number.
        ValueError: A rank does not see the files that rank 0 has written.
    """
    paths = _chat_files(args)
    text = done_by_rank_zero(lambda beat: "\n".join(_convert(args, paths, beat)), group)
    prefixes = text.split("\n")
    seen = {f"{one}.idx": "there" if Path(f"{one}.idx").is_file() else "absent" for one in prefixes}
    require_same(seen, group, "a folder that all hosts share: name it with --data-cache-path")
    return dict(zip(paths, prefixes, strict=True))


@dataclass(frozen=True, slots=True)
class ChatFile:
    """Chat file of a job whose flags are ``args``."""

    path: str
    args: Any = field(compare=False)

    @property
    def encoded(self) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
        """Tokens and loss mask of every conversation."""
        # A copy: Megatron's function may set the vocabulary size.
        tokenizer, path = build_tokenizer(copy.copy(self.args)), Path(self.path)
        chat_format = self.args.sft_tokenizer_prompt_format
        for numbered in read_lines(path):
            yield from encode_line(numbered, path, tokenizer, chat_format)


@lru_cache(maxsize=8)
def first_documents(chats: ChatFile, count: int) -> list[numpy.ndarray]:
    """Return an int32 array of tokens for each of the first ``count`` conversations.

    Tokens after the last target, and conversations that have no target, are left out.

    Raises:
        ValueError: Flags are invalid, or a line contains no valid conversation.
    """
    check_chat_flags(chats.args)
    # A document ends at its last target; position 0 has none.
    return [
        tokens[: int(mask.nonzero()[0][-1]) + 1].astype(numpy.int32)
        for tokens, mask in islice(chats.encoded, count)
        if mask.any()
    ]


def check_chat_flags(args: Any) -> None:
    """Raise a ValueError for errors in ``--sft`` and its flags, without reading chat files."""
    if args.tokenizer_type != "SFTTokenizer" or not args.tokenizer_model:
        raise ValueError(
            "--sft needs --tokenizer-type SFTTokenizer and --tokenizer-model FOLDER; or give a "
            "corpus that scripts/prepare_corpus.py --chat made, without --sft"
        )
    if find_spec("transformers") is None:
        raise ValueError("--sft needs the package transformers: pip install it")
    if args.sft_tokenizer_prompt_format not in FORMATS:
        raise ValueError(
            f"--sft-tokenizer-prompt-format {args.sft_tokenizer_prompt_format}: expected one of "
            f"{', '.join(FORMATS)}"
        )
    folder = Path(args.tokenizer_model)
    if not folder.exists() and (folder.is_absolute() or len(folder.parts) > 2):
        raise ValueError(f"--tokenizer-model {folder}: no such folder")
    paths = _chat_files(args)
    if not paths:
        raise ValueError("--sft: no chats to train on: give --data-path FILE.jsonl")
    for path in paths:
        if not Path(path).is_file():
            is_corpus = Path(path + ".idx").is_file()
            remedy = "leave --sft out: it is a corpus already" if is_corpus else "check --data-path"
            raise ValueError(f"{path}: no such file; --sft expects a .jsonl of chats; {remedy}")


def _chat_files(args: Any) -> tuple[str, ...]:
    """Return the paths of all chat files in the data flags."""
    blend, blend_per_split = blends_of(args)
    blends = [one for one in (blend, *(blend_per_split or ())) if one is not None]
    return tuple(dict.fromkeys(path for prefixes, _ in blends for path in prefixes))


def _convert(args: Any, paths: Sequence[str], beat: Callable[[], None]) -> list[str]:
    """Return the corpus prefix of each path; convert the files without a corpus in the cache."""
    tokenizer: ChatTokenizer | None = None
    chat_format, prefixes = args.sft_tokenizer_prompt_format, []
    files = tokenizer_files(args.tokenizer_model)
    source = digest_of(files, beat) if files else args.tokenizer_model
    for path in map(Path, paths):
        digest = digest_of([path], beat, f"{_VERSION} {chat_format} {source}")
        folder = Path(args.data_cache_path) if args.data_cache_path else path.parent / "cache"
        prefix = folder / f"{path.stem}-{digest[:24]}"
        if not Path(f"{prefix}.idx").is_file():
            print_rank_0(f"> --sft: converting {path} ...")
            tokenizer = tokenizer or build_tokenizer(args)
            unread: set[tuple[str, str]] = set()
            encoded = map(
                partial(encode_line, path=path, tokenizer=tokenizer, chat_format=chat_format),
                read_lines(path, unread),
            )
            try:
                written = write_encoded(encoded, path, tokenizer.vocab_size, prefix, beat)
            except OSError as error:
                raise ValueError(
                    f"{prefix}.bin: cannot be written ({error.strerror}); name a folder that all "
                    "ranks share with --data-cache-path"
                ) from error
            print_rank_0(f"> {written}")
            if (line := unread_line(path, unread, chat_format)) is not None:
                print_rank_0(f"> {line}")
        print_rank_0(f"> --sft: {path} is {prefix}")
        prefixes.append(str(prefix))
    return prefixes


def tokenizer_files(path: str) -> list[Path]:
    """Return the files of the tokenizer at ``path``; empty if ``path`` is not a file or folder."""
    place = Path(path)
    if place.is_file():
        return [place]
    if not place.is_dir():
        return []
    return sorted(file for file in place.iterdir() if file.suffix in _TOKENIZER_SUFFIXES)


def digest_of(
    files: Sequence[Path], beat: Callable[[], None] = lambda: None, text: str = ""
) -> str:
    """Return the SHA-256 hex digest of ``text`` and of the names and bytes of ``files``.

    The function calls ``beat`` after every block that it reads.
    """
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(f"\0{file.name}\0".encode())
        with file.open("rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                digest.update(block)
                beat()
    return digest.hexdigest()
