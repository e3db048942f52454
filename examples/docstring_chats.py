#!/usr/bin/env python3
"""Conversations of real text: questions about the standard library, answered by its docstrings.

    python examples/docstring_chats.py chats.jsonl

Every module is a conversation, every documented class and function of it a question and its answer;
so conversations differ in length as modules do, from a line to tens of thousands of tokens.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
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


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: docstring_chats.py FILE.jsonl", file=sys.stderr)
        return 2
    count = 0
    with open(arguments[0], "w", encoding="utf-8") as file:
        for messages in conversations(Path(sysconfig.get_paths()["stdlib"])):
            file.write(json.dumps({"messages": messages}) + "\n")
            count += 1
    print(f"{count} conversations in {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
