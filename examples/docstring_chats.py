#!/usr/bin/env python3
"""Conversations of real text: questions about the standard library, answered by its docstrings.

    python examples/docstring_chats.py chats.jsonl
    python examples/docstring_chats.py agents.jsonl --agents

Every module is a conversation, every documented class and function of it a question and its answer;
so conversations differ in length as modules do, from a line to tens of thousands of tokens. With
--agents, a conversation is the first question of a module, after one long system message, as those
of agents begin.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

SYSTEM = "You explain Python's standard library."
NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "__phello__",
}


def answers(tree: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(question, docstring) of what ``tree`` defines, inner definitions behind outer ones."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inner, text = f"{name}.{node.name}", ast.get_docstring(node)
        if text and text.strip():
            is_class = isinstance(node, ast.ClassDef)
            shown = "" if is_class else f"({ast.unparse(node.args)})"
            yield (
                f"What {'is' if is_class else 'does'} {inner}{shown}{'' if is_class else ' do'}?",
                text,
            )
        if isinstance(node, ast.ClassDef):
            yield from answers(node, inner)


def conversations(library: Path) -> Iterator[list[dict[str, str]]]:
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if NOT_LIBRARY & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        turns = list(answers(tree, module))
        if turns:
            yield [{"role": "system", "content": SYSTEM}] + [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]


def of_agents(chats: Iterable[list[dict[str, str]]]) -> Iterator[list[dict[str, str]]]:
    """First question and answer of every chat, after a system message that lists 100 as tools."""
    every = list(chats)
    tools = [message["content"] for chat in every for message in chat[1::2]][:100]
    system = {"role": "system", "content": "\n".join([SYSTEM, "You have tools:", *tools])}
    yield from ([system, *chat[1:3]] for chat in every)


def main(arguments: list[str]) -> int:
    if arguments[1:] not in ([], ["--agents"]) or not arguments:
        print("usage: docstring_chats.py FILE.jsonl [--agents]", file=sys.stderr)
        return 2
    chats = conversations(Path(sysconfig.get_paths()["stdlib"]))
    count = 0
    with open(arguments[0], "w", encoding="utf-8") as file:
        for messages in of_agents(chats) if arguments[1:] else chats:
            file.write(json.dumps({"messages": messages}) + "\n")
            count += 1
    print(f"{count} conversations in {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
