"""The page about the launcher tells what the table says."""

from __future__ import annotations

from podrun.launcher.help_text import markdown_table
from tests.conftest import ROOT


def test_the_option_table_of_the_page_is_that_of_the_parser() -> None:
    page = (ROOT / "docs/launcher.md").read_text(encoding="utf-8")
    assert markdown_table() in page
