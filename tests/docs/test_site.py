"""The pages as a site: reachable, linked, short, in the words of the field."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.programs import ROOT, loaded, python
from tests.test_words import TEXTS, pattern

hooks = loaded(ROOT / "docs" / "mkdocs_hooks.py")
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
MOST_PAGES, MOST_WORDS = 44, 40_000  # as wc counts the words of all pages


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The text of the page without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```|^    .*?$", "", page.read_text())


def in_nav() -> list[str]:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    return re.findall(r"- (\S+\.md)$", nav, re.M)


def dead_links(page: Path, text: str) -> list[str]:
    return [f"{name(page)}: {path}" for path in hooks.missing(text, name(page))]


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(in_nav()) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_links_lead_to_files_of_the_checkout() -> None:
    others = [*TOP, ROOT / "SECURITY.md", ROOT / "patches" / "README.md"]
    dead = [link for page in (*others, *PAGES) for link in dead_links(page, page.read_text())]
    assert dead == []
    page = DOCS / "guides" / "data.md"
    text = "[a](running.md#x) [b](../nowhere.md) `[c](no.md)` [d](https://e.org) ![e](x.svg)"
    assert [each.split(": ")[1] for each in dead_links(page, text)] == [
        "docs/nowhere.md",
        "docs/guides/x.svg",
    ]


@pytest.mark.everything
def test_mkdocs_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    done = python(
        "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path, NO_MKDOCS_2_WARNING="1"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Add a planner" in (tmp_path / "contributing" / "index.html").read_text()


def test_every_page_is_linked_from_another_one() -> None:
    linked = {
        path
        for page in (ROOT / "README.md", *PAGES)
        for path in hooks.targets(page.read_text(), name(page))
        if path != name(page)
    }
    assert [name(page) for page in PAGES if name(page) not in linked] == []


def test_what_is_outside_the_site_is_linked_in_the_repository() -> None:
    source = "docs/guides/data.md"
    text = (
        "[the script](../../scripts/prepare_corpus.py#L3), [tests](../../tests), [run](running.md)"
    )
    url = "https://host.org/project"
    assert hooks.outside_links(text, source, url + "/") == (
        f"[the script]({url}/blob/main/scripts/prepare_corpus.py#L3), "
        f"[tests]({url}/tree/main/tests), [run](running.md)"
    )
    assert hooks.outside_links(text, source, None) == (
        "the script (`scripts/prepare_corpus.py`), tests, [run](running.md)"
    )


def test_contributing_is_part_of_the_site() -> None:
    source = "docs/contributing/index.md"
    text = hooks.with_included((ROOT / source).read_text(), source)
    assert "## Add a planner" in text and "](index.md#good-first-tasks)" in text
    assert "](../how/architecture.md)" in text and not hooks.missing(text, source)
    front = hooks.with_included((DOCS / "index.md").read_text(), "docs/index.md")
    assert "bash examples/quickstart.sh" in front and "## Train" not in front
    assert "](reference/versions.md)" in front


def test_pages_are_few_and_short() -> None:
    words = {name(page): len(page.read_text().split()) for page in PAGES}
    assert len(words) <= MOST_PAGES
    assert sum(words.values()) <= MOST_WORDS, Counter(words).most_common(10)
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_lists_and_tables_begin_after_a_blank_line() -> None:
    """MkDocs takes them for the end of the paragraph else."""
    begins = re.compile(r"(?m)^(?![-*|>#\s]|\d+\.)[^\n]*\n(- |\d+\. |\| )")
    wrong = []
    for page in (*TOP, *PAGES):
        text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
        wrong += [f"{name(page)}: {match[0][:60]!r}" for match in begins.finditer(text)]
    assert wrong == []
    assert begins.search("a line\n- an item\n") and not begins.search("a line\n\n- an item\n")


# ------------------------------------------------------------------ words


def banned_words() -> Counter[str]:
    """``page "words"`` of what tests/test_words.py bans, outside of code; of generated pages, too.

    These have the help of flags, and what is refused.
    """
    seen: Counter[str] = Counter()
    for page in (*TOP, *PAGES):
        text = re.sub(r"`[^`]*`", "", prose(page))
        for match in pattern().finditer(text):
            seen[f'{name(page)} "{match[1]}"'] += 1
    return seen


def test_no_banned_word_comes_into_the_pages() -> None:
    assert not banned_words(), TEXTS


def test_a_banned_word_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("Rows behind the seam, `behind` code.\n\n    behind\n")
    monkeypatch.setitem(globals(), "PAGES", [page])
    monkeypatch.setitem(globals(), "TOP", [])
    monkeypatch.setitem(globals(), "name", lambda page: page.name)
    assert banned_words() == {'page.md "behind"': 1, 'page.md "seam"': 1}
