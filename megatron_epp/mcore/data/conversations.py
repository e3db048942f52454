"""Conversion of chats (``.jsonl``) to a corpus: documents with loss masks.

A line is a JSON object with ``messages``, a list of {role, content}. As in Megatron's SFTDataset, a
line may contain several conversations, and each system message begins a new conversation. Each
conversation becomes a document. Megatron's SFTTokenizer formats the conversation, returns its
tokens, and marks the targets (tokens with a loss). Padding tokens and messages of weight 0 have no
targets.

    messages   system  user  assistant  user  assistant
    targets                  ^^^^^^^^^        ^^^^^^^^^     in a format with masks
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jinja2
import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_epp.corpus.loss_mask import SUFFIX
from megatron_epp.corpus.text_lengths import ROLES
from megatron_epp.safe_files import bounded_lines

# Chat formats of Megatron's SFTTokenizer, and those in which every token is a target.
FORMATS = ("nemotron-nano-v2", "nemotron-h-aligned", "identity", "default")
WITHOUT_MASKS = ("identity", "default")
READ_KEYS = ("role", "content", "weight")  # of a message
_IGNORED = -100  # SFTTokenizer's label of a token that is no target
_SHOWN = 200  # characters of another program's message
_SHOWN_KEYS, _SHOWN_KEY = 20, 40  # names, and characters of a name

Message = Mapping[str, Any]


class ChatTokenizer(Protocol):
    """Interface of Megatron's SFTTokenizer, which Megatron's build_tokenizer may have wrapped."""

    vocab_size: int
    pad_id: int | None

    def tokenize_conversation(
        self, conversation: list[Message], return_target: bool, add_generation_prompt: bool
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return two arrays [n]: the tokens of a conversation, and the labels (-100: no target)."""


@dataclass(frozen=True, slots=True)
class TokenizedChats:
    """Counts of a tokenized chat file.

    Attributes:
        lines: Number of lines.
        lengths: Number of tokens of each conversation: [conversations] int64.
        targets: Number of tokens with a loss.
        untargeted: Number of conversations without a target.
    """

    lines: int
    lengths: numpy.ndarray
    targets: int
    untargeted: int  # conversations without targets

    def __str__(self) -> str:
        tokens = int(self.lengths.sum())
        text = (
            f"{len(self.lengths)} conversations of {self.lines} lines, {tokens} tokens, "
            f"{self.targets} of them targets ({self.targets / max(tokens, 1):.0%})"
        )
        if self.untargeted:
            text += f"; {self.untargeted} conversations without a target, which training drops"
        return text


def read_lines(
    path: Path, unread: set[tuple[str, str]] | None = None
) -> Iterator[tuple[int, list[Message]]]:
    """Yield (line number, messages) for every line that is not blank; numbers start at 1.

    The function adds every key that it does not use to ``unread``: (key, "") for a key of the
    line's object, and (key, " of messages") for a key of a message.

    Raises:
        ValueError: A line is too long, is not JSON, has no messages with roles and texts, or has a
            message with a weight other than 0 and 1. The error text contains the line number.
        OSError: The file cannot be read.
    """
    unread = set() if unread is None else unread
    for number, raw in bounded_lines(path, "a line of JSON for each conversation"):
        if not raw.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: not a line of JSON: {_reason(error)}") from None
        messages = value.get("messages") if isinstance(value, dict) else None
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f'{where}: no conversation; expected {{"messages": [{{"role": "user", '
                '"content": "..."}, {"role": "assistant", "content": "..."}]}'
            )
        for place, message in enumerate(messages):
            for key in ("role", "content"):
                text = message.get(key) if isinstance(message, dict) else None
                if not isinstance(text, str):
                    raise ValueError(
                        f"{where}: message {place} has no text as its {key!r}; expected "
                        f"a role (one of {', '.join(ROLES)}) and a content"
                    )
            if (weight := message.get("weight")) not in (None, 0, 1):
                raise ValueError(
                    f"{where}: message {place} has the weight {str(weight)[:_SHOWN_KEY]!r}; "
                    "expected 1, or 0 where it is not to be learnt"
                )
            unread.update((key, " of messages") for key in message.keys() - {*READ_KEYS})
        unread.update((key, "") for key in value.keys() - {"messages"})
        yield number, messages


def unread_line(path: Path, unread: set[tuple[str, str]], chat_format: str) -> str | None:
    """Return a warning that names the unread keys collected by ``read_lines``, or None.

    With the chat format "default", the warning omits keys of messages, because the tokenizer's
    template may read these keys.
    """
    known = sorted((key, of) for key, of in unread if not of or chat_format != "default")
    if not known:
        return None
    names = [f"{key[:_SHOWN_KEY]!r}{of}" for key, of in known[:_SHOWN_KEYS]]
    more = f" and {len(known) - _SHOWN_KEYS} more" if len(known) > _SHOWN_KEYS else ""
    return f"{path}: keys that are not read: {', '.join(names)}{more}"


def conversations_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Split the messages of a line into conversations; each system message begins a new one."""
    conversations: list[list[Message]] = []
    for message in messages:
        if not conversations or message["role"] == "system":
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def encode(
    conversation: list[Message], tokenizer: ChatTokenizer, chat_format: str
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Tokenize a conversation of n tokens; return the tokens [n] int64 and the loss mask [n] uint8.

    Raises:
        ValueError: The chat format does not support the order of roles, or the tokenizer fails.
    """
    if chat_format not in WITHOUT_MASKS:
        _check_turns(conversation)
    try:
        tokens, targets = tokenizer.tokenize_conversation(
            conversation, return_target=True, add_generation_prompt=False
        )
    except (
        AssertionError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        jinja2.TemplateError,
    ) as error:
        raise ValueError(
            f"SFTTokenizer refuses it in the format {chat_format}: {_reason(error)}"
        ) from error
    tokens = numpy.asarray(tokens, numpy.int64)
    mask = numpy.asarray(targets) != _IGNORED
    if tokenizer.pad_id is not None:
        mask &= tokens != tokenizer.pad_id
    for place, message in enumerate(conversation):
        if message.get("weight") == 0:
            mask[_turn(place, conversation, tokens, tokenizer, chat_format)] = False
    mask[:1] = False  # nothing predicts the first token
    return tokens, mask.astype(numpy.uint8)


def _turn(
    place: int,
    conversation: list[Message],
    tokens: numpy.ndarray,
    tokenizer: ChatTokenizer,
    chat_format: str,
) -> slice:
    """Return the slice of ``tokens`` that belongs to message ``place`` of the conversation.

    Raises:
        ValueError: The tokens of the first messages are not a prefix of the conversation's tokens.
    """
    ends = []
    for count in (place, place + 1):
        before = conversation[:count]
        written = tokenizer.tokenize_conversation(before, False, False) if before else []
        if list(written) != tokens[: len(written)].tolist():
            raise ValueError(
                f"message {place} has the weight 0, and the format {chat_format} does not write "
                "it apart from the others; leave it out, or give another format"
            )
        ends.append(len(written))
    return slice(*ends)


def _check_turns(conversation: Sequence[Message]) -> None:
    """Raise a ValueError for an order of roles on which an assertion of SFTTokenizer would fail."""
    before = ""
    for place, message in enumerate(conversation):
        role = message["role"].lower()
        if role not in ROLES:
            raise ValueError(f"message {place}: role {role!r}; expected one of {', '.join(ROLES)}")
        if role == "assistant" and before not in ("user", "tool"):
            raise ValueError(
                f"message {place}: the assistant speaks after {before or 'no message'}; "
                "expected a message of the user or a tool before it"
            )
        if role == "assistant" and not message["content"]:
            raise ValueError(f"message {place}: the assistant says nothing; expected a text")
        before = role


def encode_line(
    numbered: tuple[int, list[Message]], path: Path, tokenizer: ChatTokenizer, chat_format: str
) -> list[tuple[numpy.ndarray, numpy.ndarray]]:
    """Return the results (tokens, mask) of :func:`encode` for all conversations of a line.

    Args:
        numbered: Line number, and messages of the line.
        path: The chat file, named in error messages.
        tokenizer: The tokenizer.
        chat_format: The tokenizer's chat format.

    Raises:
        ValueError: ``encode`` raises an error. This function adds file and line number.
    """
    number, messages = numbered
    try:
        return [encode(one, tokenizer, chat_format) for one in conversations_of(messages)]
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def write_encoded(
    lines: Iterable[list[tuple[numpy.ndarray, numpy.ndarray]]],
    source: Path,
    vocabulary: int,
    prefix: Path,
    beat: Callable[[], None] = lambda: None,
) -> TokenizedChats:
    """Write the corpus ``prefix.bin/.idx`` and the files of its loss masks; write none on errors.

    Args:
        lines: Result of ``encode_line`` for each line of ``source``.
        source: The chat file, named in error messages.
        vocabulary: Vocabulary size of the tokenizer, which determines the integer type.
        prefix: Path of the corpus without suffix.
        beat: Function called after every line, to signal progress.

    Returns:
        Counts of the lines, tokens and targets.

    Raises:
        ValueError: No line has a target.
        OSError: A file cannot be written.
    """
    lengths: list[int] = []
    count = targets = untargeted = 0
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # The files are written to a temporary folder and moved when complete, the index last. So if
    # the index exists, all four files are complete.
    with tempfile.TemporaryDirectory(prefix=f".{prefix.name}-", dir=prefix.parent) as folder:
        scratch = Path(folder, prefix.name)
        dtype = DType.optimal_dtype(vocabulary)
        tokens_to = IndexedDatasetBuilder(f"{scratch}.bin", dtype=dtype)
        masks_to = IndexedDatasetBuilder(f"{scratch}{SUFFIX}.bin", dtype=numpy.uint8)
        for conversations in lines:
            for tokens, mask in conversations:
                tokens_to.add_document(tokens, [len(tokens)])
                masks_to.add_document(mask, [len(mask)])
                here = int(mask.sum())
                lengths.append(len(tokens))
                targets += here
                untargeted += here == 0
            count += 1
            beat()
        tokens_to.finalize(f"{scratch}.idx")
        masks_to.finalize(f"{scratch}{SUFFIX}.idx")
        if not targets:
            raise ValueError(
                f"{source}: no token of its {count} lines is a target; expected at least one "
                "answer of an assistant"
            )
        for name in (f"{SUFFIX}.bin", f"{SUFFIX}.idx", ".bin", ".idx"):
            os.replace(f"{scratch}{name}", f"{prefix}{name}")
    return TokenizedChats(count, numpy.array(lengths, numpy.int64), targets, untargeted)


def _reason(error: BaseException) -> str:
    """Return the text of ``error`` as one short line, or its type if it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
