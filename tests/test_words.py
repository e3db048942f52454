"""Words that the package does not use: each has a term of the field in its place.

Identifiers, file names, help texts of the command line, and lines that are logged or raised. What
is left of them stands in ``BASELINE`` and may only become less; names that users type or parse
(flags, JSON keys, attributes of files) stay, and are listed in ``STAYS`` with the reason.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_epp"

# Part of a name, or word of a text -> the field's term.
IDENTIFIERS = {
    "behind": "after",
    "beside": "next to",
    "border": "boundary",
    "borders": "boundaries",
    "further": "mtp",
    "predicts": "mtp",
    "letter": "mode, symbol, code",
    "letters": "modes, symbols, codes",
    "latents": "mla",
    "room": "headroom",
    "rooms": "headroom, packages",
    "law": "in-flight limit",
    "seam": "patch point",
    "seams": "patch points",
    "mend": "fix",
    "sabotage": "fault injection",
    "sabotages": "fault injections",
    "judge": "oracle",
    "judges": "oracles",
    "figures": "coefficients",
    "skeleton": "op template",
    "skeletons": "op templates",
    "deal": "assignment",
    "deals": "assignments",
    "dealt": "assigned",
    "spread": "sharded",
    "share": "shard, fraction",
    "shares": "shards, fractions",
    "plain": "reference",
    "told": "what it holds",
    "found": "what it holds",
    "made": "what it holds",
    "mine": "local, own",
    "ours": "elastic",
    "given": "what it holds",
    "whole": "full, unsliced",
    "house": "package",
    "tower": "package",
    "floor": "layer of the package",
    "floors": "layers of the package",
    "nobody": "no rank",
    "somebody": "a rank",
    "spoken": "initialised",
    "speak": "initialise, report",
    "odds": "probabilities",
    "picked": "gathered",
    "teaches": "trains",
}
TEXTS = {
    r"behind": "after",
    r"borders?": "boundary",
    r"further tokens?": "multi-token prediction",
    r"(?:in|made of) latents?": "multi-latent attention",
    r"words over (?:the )?stages": "vocabulary parallelism",
    r"output layer's words": "vocabulary rows",
    r"house|rooms?|tower|floors?": "package, module, layer",
    r"window law|law": "in-flight limit",
    r"seams?": "patch point",
    r"mends?|mended": "fix",
    r"sabotages?d?": "fault injection",
    r"figures": "coefficients",
    r"skeletons?": "op template",
    r"dealt|deals": "assigned",
    r"spread over": "sharded over",
    r"loops of others": "external training loops",
    r"passes of forwards|forwards alone": "forward-only passes",
    r"plain model": "reference model",
    r"nobody|somebody|everybody": "no rank, a rank, every rank",
    r"spoken|is told|are told|was told": "initialised, receives",
    r"so many": "a number",
    r"host without a GPU": "CPU-only host",
}
# name -> why it stays
STAYS = {
    "border_bytes": "a key of cost-model files",
    "border_gradient_bytes": "a key of cost-model files",
    "share_bytes_per_second": "a key of topology files",
    "share_from": "an argument of the adapters of training loops",
    "carries_latents": "a key of model files",
    "LATENTS": "the value of a flag",
    "predicts": "a key of model files",
    "shares_ranks": "a verb: several stages share a rank",
    "share_gloo_device": "a verb: process groups share a device",
    "SHARE": "a verb: ranks share a GPU",
    "shares_gpus": "a verb: ranks share a GPU",
    "whole_number": "an integer is called so",
    "fc1_latent_proj": "Megatron's",
    "fc2_latent_proj": "Megatron's",
}
# Calls whose texts users read.
HELP = {"flag", "add_argument", "add_parser", "add_argument_group"}
LOG = {"debug", "info", "warning", "error", "exception", "print"}
# ``mcore/loops/adapter.py share_from``: how often; only ever less.
BASELINE_FILE = Path(__file__).with_name("words_baseline.txt")


def parts(name: str) -> list[str]:
    """Split a name at underscores and capitals."""
    return [
        part.lower()
        for word in name.split("_")
        for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", word)
    ]


def banned(name: str) -> bool:
    return name not in STAYS and any(part in IDENTIFIERS for part in parts(name))


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that the module binds: definitions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def texts(tree: ast.AST) -> Iterator[str]:
    """Help of the command line, logged lines, messages of what is raised."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            callee = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if callee in HELP | LOG:
                yield from strings(node)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield from strings(node.exc)


def strings(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


@cache
def pattern() -> re.Pattern[str]:
    return re.compile(rf"(?<![\w-])({'|'.join(TEXTS)})(?![\w-])")


def violations(root: Path) -> Counter[str]:
    """``path name`` and ``path "words"`` of what is banned, with how often it occurs."""
    seen: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        place = str(path.relative_to(root))
        if banned(path.stem) or any(map(banned, path.relative_to(root).parent.parts)):
            seen[f"{place} is its name"] += 1
        tree = ast.parse(path.read_text())
        for name in names(tree):
            if banned(name):
                seen[f"{place} {name}"] += 1
        for text in texts(tree):
            for match in pattern().finditer(text):
                seen[f'{place} "{match[1]}"'] += 1
    return seen


def read_baseline() -> Counter[str]:
    if not BASELINE_FILE.exists():
        return Counter()
    rows = (line.rsplit("\t", 1) for line in BASELINE_FILE.read_text().splitlines())
    return Counter({key: int(count) for key, count in rows})


def write_baseline() -> None:
    """``python tests/test_words.py`` writes what is left, after something has gone."""
    rows = sorted(violations(PACKAGE).items())
    BASELINE_FILE.write_text("".join(f"{key}\t{count}\n" for key, count in rows))


def test_no_banned_word_comes_back() -> None:
    now, before = violations(PACKAGE), read_baseline()
    new = {key: count for key, count in now.items() if count > before[key]}
    assert not new, f"{new}; terms: {IDENTIFIERS | TEXTS}"


def test_the_baseline_shrinks() -> None:
    now = violations(PACKAGE)
    gone = {key: count for key, count in read_baseline().items() if now[key] < count}
    assert not gone, f"less is left; run `python tests/test_words.py`: {gone}"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("def f(borders):\n    pass\n", "a.py borders"),
        ("class FurtherTokens:\n    pass\n", "a.py FurtherTokens"),
        ("x.made = 1\n", "a.py made"),
        ('raise ValueError(f"{x} lies behind it")\n', 'a.py "behind"'),
        ('x = flag(0, "the figures of a device")\n', 'a.py "figures"'),
    ],
)
def test_the_guard_sees_a_word(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "a.py").write_text('"""Borders are in docs for now."""\n' + text)
    assert violations(tmp_path) == {key: 1}
    (tmp_path / "a.py").rename(tmp_path / "seams.py")
    assert violations(tmp_path)["seams.py is its name"] == 1


if __name__ == "__main__":
    write_baseline()
