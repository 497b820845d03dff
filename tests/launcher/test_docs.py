"""The page about the launcher tells what the table says, and the launcher what the page about fidelity says."""

from __future__ import annotations

import math
import re

from podrun.launcher.options import markdown_table
from podrun.launcher.profile import NETWORK_MEDIAN, NETWORK_WORST
from tests.conftest import ROOT


def test_the_option_table_of_the_page_is_that_of_the_parser() -> None:
    page = (ROOT / "docs/launcher.md").read_text(encoding="utf-8")
    assert markdown_table() in page


def test_the_errors_that_a_run_names_are_those_of_the_page_about_fidelity() -> None:
    """If the page was generated anew: put its figures, rounded up to tens, into podrun/launcher/profile.py."""
    page = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    row = re.search(r"^\| network \|.*?%\s*\|\s*([\d.]+)%\s*\|[^|]*\|\s*([\d.]+)%", page, flags=re.MULTILINE)
    assert row is not None
    assert [math.ceil(float(figure) / 10) * 10 for figure in row.groups()] == [NETWORK_MEDIAN, NETWORK_WORST]
