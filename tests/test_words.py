"""Words that the package does not use: each has a term of the field in its place.

Identifiers, file names, help texts of the command line, and lines that are logged or raised. What
is left of them is in ``BASELINE_FILE`` and may only become less.
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

# Part of a name that has a term of the field in its place.
IDENTIFIERS = re.compile(
    r"behind|beside|border|borders|further|predicts|letter|letters|latents|room|"
    r"rooms|law|seam|seams|mend|sabotage|sabotages|judge|judges|figures|skeleton|"
    r"skeletons|deal|deals|dealt|spread|share|shares|plain|told|found|made|mine|"
    r"ours|given|whole|house|tower|floor|floors|nobody|somebody|spoken|speak|odds|"
    r"picked|teaches"
)
# Word of a text -> the field's term.
TEXTS = {
    r"behind": "after",
    r"borders?": "boundary",
    r"further tokens?": "multi-token prediction",
    r"(?:in|made of) latents?": "multi-latent attention",
    r"words over (?:the )?stages": "vocabulary parallelism",
    r"output layer": "LM head",
    r"in front of|beside": "before, next to",
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
# Keys of files, flags' values, arguments of adapters, Megatron's names, and verbs.
STAYS = re.compile(
    r"border_bytes|border_gradient_bytes|share_bytes_per_second|predicts|"
    r"(epp_)?share_from|fc1_latent_proj|fc2_latent_proj|shares_ranks|share_gloo_device|"
    r"SHARE|shares_gpus|whole_number"
)
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
    return not STAYS.fullmatch(name) and any(map(IDENTIFIERS.fullmatch, parts(name)))


def names(tree: ast.AST) -> Iterator[str]:
    """Every name that the module binds: definitions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def texts(tree: ast.AST) -> Iterator[str]:
    """Texts of several words that users may read, so not those of docstrings and assertions."""
    unread: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                unread.add(id(docstring))
            case ast.Assert(msg=ast.AST() as message):
                unread.update(map(id, ast.walk(message)))
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if " " in text and id(node) not in unread:
                yield text


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
    rows = (line.rsplit("\t", 1) for line in BASELINE_FILE.read_text().splitlines())
    return Counter({key: int(count) for key, count in rows})


def test_no_banned_word_comes_back_and_the_baseline_shrinks() -> None:
    now, before = violations(PACKAGE), read_baseline()
    new = {key: count for key, count in now.items() if count > before[key]}
    assert not new, f"{new}; use another word: {TEXTS}"
    gone = {key: count for key, count in before.items() if now[key] < count}
    assert not gone, f"less is left; run `python tests/test_words.py`: {gone}"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("def f(borders):\n    pass\n", "a.py borders"),
        ("class FurtherTokens:\n    pass\n", "a.py FurtherTokens"),
        ("x.made = 1\n", "a.py made"),
        ('raise ValueError(f"{x} lies behind it")\n', 'a.py "behind"'),
        ('x = flag(0, "the figures of a device")\n', 'a.py "figures"'),
        ('assert x, "lies behind"\nrows = ["output layer"]\n', 'a.py "output layer"'),
    ],
)
def test_the_guard_sees_a_word(tmp_path: Path, text: str, key: str) -> None:
    (tmp_path / "a.py").write_text('"""Borders are in docs for now."""\n' + text)
    assert violations(tmp_path) == {key: 1}
    (tmp_path / "a.py").rename(tmp_path / "seams.py")
    assert violations(tmp_path)["seams.py is its name"] == 1


if __name__ == "__main__":
    left = sorted(violations(PACKAGE).items())
    BASELINE_FILE.write_text("".join(f"{key}\t{count}\n" for key, count in left))
