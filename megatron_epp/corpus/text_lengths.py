"""Lengths of texts and chats in ``.jsonl`` or ``.parquet``, counted by a tokenizer or by bytes.

The document in a line or row is one of:

    text            a string
    messages        a chat of {role, content}, as OpenAI writes them
    conversations   a chat of {from, value}, as ShareGPT does
    prompt          with completion or response
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp.ir.errors import printable, quoted, shortened
from megatron_epp.safe_files import MOST_TEXT_BYTES, bounded_lines

SUFFIXES = (".jsonl", ".parquet")
ROLES = ("system", "user", "tool", "assistant")  # of a chat's messages
# Largest number of documents that are counted; in a longer file these are evenly spaced.
MOST_DRAWN = 20_000
BYTES_PER_TOKEN = 4  # without a tokenizer
MARKUP_TOKENS = 4  # of a chat's message: its role, start and end
# Stand for tokens in text_tokens: the end of a document, markup, the first role (others below it)
_END, _MARKUP, _FIRST_ROLE = -2, -3, -4
_KEYS = ("text", "messages", "conversations", "prompt")
_EXPECTED = f"an object with {', '.join(_KEYS[:-1])} or {_KEYS[-1]}"
_AT_ONCE = 256  # documents per call of the tokenizer, which uses threads

Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]
Document = tuple[list[str], list[str]]  # its texts, and the roles of a chat's messages


def text_lengths(
    path: Path, tokenizer: str | None = None, progress: Progress | None = None
) -> tuple[str, np.ndarray]:
    """Count the input tokens of each document of a file.

    Return a note on how tokens were counted, and the numbers of input tokens: [documents] int64.
    If a file has more than MOST_DRAWN documents, only MOST_DRAWN evenly spaced ones are counted.

    Args:
        path: ``.jsonl`` or ``.parquet`` file.
        tokenizer: ``tokenizer.json`` or its folder; None: four bytes are a token.
        progress: function that is called with the items, their number and their name. It returns an
            iterator over the items that shows a progress bar.

    Raises:
        ValueError: the file or the tokenizer cannot be read, a line or row is not a document, or no
            document has a token.
        ModuleNotFoundError: pyarrow or tokenizers is needed and not installed.
    """
    total, rows = _rows(path)
    if progress is not None:
        rows = iter(progress(rows, min(total, MOST_DRAWN), "documents"))
    documents = (_document(where, row) for where, row in rows)
    lengths = np.array([*_counted(documents, tokenizer)], np.int64)
    how = f"tokens by {printable(tokenizer)}" if tokenizer else f"{BYTES_PER_TOKEN} bytes a token"
    if total > len(lengths):
        how = f"{len(lengths)} of {total} documents, evenly drawn; {how}"
    if not lengths.any():
        raise ValueError(f"{path}: holds no document with a token; expected {_EXPECTED} on a line")
    return how, lengths


def text_tokens(path: Path, tokenizer: str, chosen: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the tokens of some documents, by their numbers in the result of :func:`text_lengths`.

    ``chosen`` are the numbers of the documents, and ``tokenizer`` is a ``tokenizer.json`` or its
    folder. Each array is [inputs + 1] int64. Negative numbers stand for tokens that are counted
    without their text, as in ChatML: the start, the role and the line end before a message, and the
    end after it. One more such token ends the document.

    Raises:
        ValueError: a document is invalid, or the file or the tokenizer cannot be read.
        ModuleNotFoundError: pyarrow or tokenizers is needed and not installed.
    """
    numbers = sorted({*chosen})
    _, rows = _rows(path, numbers)
    known, tokens, roles = open_tokenizer(tokenizer), {}, dict[str, int]()
    for number, (where, row) in zip(numbers, rows, strict=True):
        texts, speakers = _document(where, row)
        words: list[int] = []
        encoded = known.encode_batch_fast([*map(_valid, texts)], add_special_tokens=False)
        for role, text in zip_longest(speakers, encoded):
            if role is None:
                words += text.ids
            else:
                role_token = roles.setdefault(role, _FIRST_ROLE - len(roles))
                words += [_MARKUP, role_token, _MARKUP, *text.ids, _MARKUP]
        tokens[number] = np.array([*words, _END], np.int64)
    return tokens


def _rows(path: Path, chosen: Sequence[int] | None = None) -> tuple[int, Iterator[tuple[str, Any]]]:
    """Return the number of documents, and (place, value) of those to count, or ``chosen`` ones."""
    return (_parquet_rows if path.suffix == ".parquet" else _json_lines)(path, chosen)


def _drawn(total: int, chosen: Sequence[int] | None) -> np.ndarray:
    """Return the indices of the rows to count: evenly spaced, at most MOST_DRAWN of ``total``.

    With ``chosen``, return these of them.
    """
    drawn = np.unique(np.linspace(0, total - 1, min(total, MOST_DRAWN)).astype(np.int64))
    return drawn if chosen is None else drawn[chosen]


def _json_lines(path: Path, chosen: Sequence[int] | None) -> tuple[int, Iterator[tuple[str, Any]]]:
    """Return the number of nonblank lines, and (place, JSON value) of the lines to count."""

    def filled() -> Iterator[tuple[int, bytes]]:
        lines = bounded_lines(path, "a JSON object on each line")
        return ((number, line) for number, line in lines if not line.isspace())

    total = sum(1 for _ in filled())

    def rows() -> Iterator[tuple[str, Any]]:
        wanted = set(_drawn(total, chosen).tolist()) if total else set()
        for at, (number, line) in enumerate(filled()):
            if at in wanted:
                where = f"{path}, line {number}"
                try:
                    yield where, json.loads(line)
                except (ValueError, RecursionError) as error:
                    reason = shortened(str(error).split("\n")[0], 200)
                    raise ValueError(f"{where}: no JSON ({reason}); expected {_EXPECTED}") from None

    return total, rows()


def _parquet_rows(
    path: Path, chosen: Sequence[int] | None
) -> tuple[int, Iterator[tuple[str, Any]]]:
    """Return the number of rows, and (place, document columns) of the rows to count."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = printable(shortened(str(error).split("\n")[0], 200))
        raise ValueError(f"{path}: cannot be read as parquet ({reason})") from error
    names = file.schema_arrow.names
    wanted = [name for name in (*_KEYS, "completion", "response") if name in names]
    if not set(wanted) & set(_KEYS):
        raise ValueError(f"{path}: has the columns {_names(names)}; expected {_EXPECTED}")
    total = file.metadata.num_rows

    def rows() -> Iterator[tuple[str, Any]]:
        begin, drawn = 0, _drawn(total, chosen) if total else np.empty(0, np.int64)
        try:
            for batch in file.iter_batches(1024, columns=wanted):
                inside = drawn[(drawn >= begin) & (drawn < begin + len(batch))] - begin
                for at, row in zip(inside, batch.take(inside).to_pylist(), strict=True):
                    yield f"{path}, row {begin + at + 1}", row
                begin += len(batch)
        except (pyarrow.ArrowException, OSError) as error:
            reason = printable(shortened(str(error).split("\n")[0], 200))
            raise ValueError(f"{path}: cannot be read as parquet ({reason})") from error

    return total, rows()


def _names(names: Iterable[object]) -> str:
    every = [printable(shortened(str(name), 40)) for name in names]
    return ", ".join(every[:10] + ["..."] * (len(every) > 10)) or "nothing"


def _document(where: str, row: Any) -> Document:
    """Return the texts of a row, and the role of each if they are the messages of a chat.

    Raises:
        ValueError: the row is not a document.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{where}: {quoted(row)}: expected {_EXPECTED}")
    key = next((key for key in _KEYS if row.get(key) is not None), None)
    if key is None:
        raise ValueError(f"{where}: has {_names(row)}; expected {_EXPECTED}")
    value = row[key]
    if key == "prompt":
        answer = row.get("completion") or row.get("response") or ""
        value = [*_messages(value), *_messages(answer)]
    messages = _messages(value)
    if key in ("messages", "conversations") and isinstance(value, str):
        raise ValueError(f"{where}: {key} {quoted(value)}: expected a list of messages")
    texts: list[str] = []
    roles: list[str] = []
    for message in messages:
        text = _text(message)
        if text is None:
            raise ValueError(
                f"{where}: {key}: {quoted(message)}: expected a text, or a message with content"
            )
        role = message.get("role") if isinstance(message, Mapping) else None
        if key == "messages" and role is not None and str(role).lower() not in ROLES:
            raise ValueError(f"{where}: role {quoted(role)}: expected one of {', '.join(ROLES)}")
        texts.append(text)
        roles.append(str(role or (isinstance(message, Mapping) and message.get("from"))))
    return texts, [] if key == "text" else roles


def _messages(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _text(message: Any) -> str | None:
    """Return the text of a message, with tool calls as JSON; None if it is not a message."""
    if isinstance(message, str):
        return message
    if not isinstance(message, Mapping) or not {"content", "value"} & set(message):
        return None
    content = message["content"] if "content" in message else message["value"]
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if calls := message.get("tool_calls"):
        texts.append(json.dumps(calls, default=str))
    if any(not isinstance(text, str | None) for text in texts):
        return None
    return "".join(filter(None, texts))


def _counted(documents: Iterable[Document], tokenizer: str | None) -> Iterator[int]:
    """Yield the tokens of every document."""
    if tokenizer is None:
        for texts, roles in documents:
            size = sum(len(text.encode("utf-8", "replace")) for text in texts)
            yield -(-size // BYTES_PER_TOKEN) + MARKUP_TOKENS * len(roles)
        return
    known = open_tokenizer(tokenizer)
    waiting: list[Document] = []

    def count() -> Iterator[int]:
        every = [_valid(text) for texts, _ in waiting for text in texts]
        encoded = iter(known.encode_batch_fast(every, add_special_tokens=False))
        for texts, roles in waiting:
            yield sum(len(next(encoded)) for _ in texts) + MARKUP_TOKENS * len(roles)
        waiting.clear()

    for document in documents:
        waiting.append(document)
        if len(waiting) == _AT_ONCE:
            yield from count()
    yield from count()


def _valid(text: str) -> str:
    """Return ``text`` without halves of surrogate pairs, which JSON can contain."""
    return text.encode("utf-8", "replace").decode()


def open_tokenizer(tokenizer: str) -> Any:
    """Return the tokenizer of the package ``tokenizers`` in a ``tokenizer.json`` or its folder.

    Raises:
        ValueError: there is no such file, or it cannot be read.
        ModuleNotFoundError: tokenizers is not installed.
    """
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"tokenizer {quoted(tokenizer)}: no such file, or no tokenizer.json in it; expected "
            "one that transformers' save_pretrained writes"
        )
    if file.stat().st_size > 8 * MOST_TEXT_BYTES:
        raise ValueError(f"tokenizer {file}: longer than 128 MiB; expected a tokenizer.json")
    # Set explicitly, because the tokenizer warns at a later fork; no text is counted there.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no exception class of its own
        reason = printable(shortened(str(error).split("\n")[0], 200))
        raise ValueError(f"tokenizer {file}: cannot be read ({reason})") from error
