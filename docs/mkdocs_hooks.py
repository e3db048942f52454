"""Links of the pages to files outside docs/, for MkDocs.

On a repository host they are relative links. On the site they become links into the repository at
``repo_url``, or the file's path where that is not set. A file that is not there fails a strict
build.
"""

import logging
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The part of the page that the site takes from a file at the top of the repository.
INCLUDED = re.compile(r"<!-- include (\S+) -->")
# Fenced blocks and code in a line are no links.
LINK = re.compile(r"(?ms)^```.*?^```|`[^`\n]+`(?!\])|(!?\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\))")
ROLE = re.compile(r":(?:func|class|mod|meth|data|attr):<code>~?([^<]*)</code>")
log = logging.getLogger("mkdocs.hooks.links")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    source = f"docs/{page.file.src_uri}"
    for path in missing(markdown, source):
        if not in_site(path):  # MkDocs looks at these itself
            log.warning("%s: no file %s in the checkout", source, path)
    return outside_links(with_included(markdown, source), source, config.repo_url)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Show names in docstrings, :class:`a.b.Name`, as code."""
    return ROLE.sub(r"<code>\1</code>", html)


def targets(markdown: str, source: str) -> list[str]:
    """Return the paths, from the top of the repository, of the files that a page links to."""
    links = (match[3] for match in LINK.finditer(markdown) if match[1])
    return [resolved(link, source) for link in links if "://" not in link and ":" not in link]


def resolved(link: str, source: str) -> str:
    return normpath(PurePosixPath(source).parent / link)


def missing(markdown: str, source: str) -> list[str]:
    """Return the files that the page links to and the checkout lacks."""
    return [path for path in targets(markdown, source) if not (ROOT / path).exists()]


def in_site(path: str) -> bool:
    return path.startswith("docs/") and path.endswith((".md", ".svg"))


def with_included(markdown: str, source: str) -> str:
    """Replace the include comment by the named file without its title, links moved along."""

    def text_of(match: re.Match[str]) -> str:
        name = match[1]
        text = (ROOT / name).read_text().split("\n", 1)[1].strip()

        def moved(link: re.Match[str]) -> str:
            if not link[1] or "://" in link[3]:
                return link[0]
            path = relpath(resolved(link[3], name), PurePosixPath(source).parent)
            return link[0].replace(f"({link[3]}", f"({path}")

        return LINK.sub(moved, text)

    return INCLUDED.sub(text_of, markdown)


def outside_links(markdown: str, source: str, repo_url: str | None) -> str:
    """Make links of the page to what the site does not have links into the repository."""

    def elsewhere(match: re.Match[str]) -> str:
        whole, text, link = match[1], match[2], match[3]
        if not whole or ":" in link or whole.startswith("!"):
            return match[0]
        path = resolved(link, source)
        if in_site(path):
            return match[0]
        if repo_url:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"[{text}]({repo_url.rstrip('/')}/{kind}/main/{path}{match[4] or ''})"
        return text if path in text else f"{text} (`{path}`)"

    return LINK.sub(elsewhere, markdown)
