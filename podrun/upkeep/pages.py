"""``podrun help TOPIC``: the pages of the guide as text, so that a message can name one that every installation has.

A checkout has the pages in ``docs/``, an installed wheel in ``podrun/_docs/``: the same files.
"""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from podrun.core.errors import NotFoundError

_LINK = re.compile(r"!?\[([^\]]+)\]\(([^)]+)\)")
_OWN = re.compile(r"[\w/.-]+\.md(#.*)?")


def help_pages() -> Mapping[str, Path]:
    """Files by topic, in order: ``faults`` and ``reference/faults``. Empty if the installation has none."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_docs"
    folder = inside if inside.is_dir() else package.parent / "docs"
    paths = [*sorted(folder.glob("*.md")), *sorted(folder.glob("*/*.md"))]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def title(page: Path) -> str:
    """The first heading of a page."""
    with page.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("# ")), page.stem)


def table_of_topics() -> str:
    """All topics with their titles, a line each."""
    rows = [(topic, title(path)) for topic, path in help_pages().items()]
    width = max((len(topic) for topic, _ in rows), default=0)
    return "".join(f"  podrun help {topic:<{width}}  {text}\n" for topic, text in rows)


def page_text(topic: str) -> str:
    """The text of a page; its links name topics. Raises NotFoundError for a topic that does not exist."""
    known = help_pages()
    name = topic.lower().removeprefix("docs/").removesuffix(".md")
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        meant = f"Did you mean podrun help {near[0]}? " if near else ""
        raise NotFoundError(
            f"the guide has no topic {topic!r}", hint=f"{meant}podrun help topics lists them."
        )
    folder = posixpath.dirname(name)

    def shown(link: re.Match[str]) -> str:
        if not _OWN.fullmatch(link[2]):
            return link[1] if not link[2].startswith("http") else f"{link[1]} ({link[2]})"
        other = posixpath.normpath(posixpath.join(folder, link[2].partition("#")[0])).removesuffix(".md")
        return f"{link[1]} (podrun help {other})" if other in known else link[1]

    return _LINK.sub(shown, known[name].read_text(encoding="utf-8"))
