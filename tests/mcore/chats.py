"""A file of chats for tests, and a tokenizer for them, made by scripts/prepare_corpus.py."""

import json
from functools import cache
from pathlib import Path
from types import ModuleType

from tests.programs import loaded

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_corpus.py"
VOCABULARY = 300


def turns(*texts: str, system: str | None = "Be brief.") -> list[dict[str, str]]:
    """A conversation: user and assistant in turn, behind a message of the system if any."""
    said = zip(("user", "assistant") * len(texts), texts, strict=False)
    first = [] if system is None else [("system", system)]
    return [{"role": role, "content": text} for role, text in (*first, *said)]


CHATS = [
    turns("What is a token?", "A piece of text."),
    turns("Name a colour.", "Red.", "Another one?", "Green, as grass is."),
    turns("1 + 1", "2", system="Answer with a number."),
    turns("Say something longer, please.", "The quick brown fox jumps over the lazy dog. " * 2),
    turns("Hello", "Hello", "Hello again", "Hello again and again", "And now?", "Good-bye."),
    turns("Why?", "Because."),
]


def write_chats(path: Path, chats: list[list[dict[str, str]]] = CHATS) -> Path:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@cache
def script() -> ModuleType:
    return loaded(SCRIPT)


def prepare(chats: Path, prefix: Path, *more: object) -> int:
    """What the script returns for ``--chat``; a tokenizer of VOCABULARY unless one is given."""
    words = ["--chat", chats, "-o", prefix, "--workers", "1", "--quiet"]
    words += ["--vocab-size", VOCABULARY, *more]
    return script().main([str(word) for word in words])
