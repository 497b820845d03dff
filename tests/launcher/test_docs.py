"""The page about the launcher tells what the table says, and the launcher what the page about fidelity says."""

from __future__ import annotations

import math
import re

from podrun.launcher.help_text import markdown_table
from podrun.launcher.summary import NETWORK_MEDIAN, NETWORK_WORST
from tests.conftest import ROOT


def test_the_option_table_of_the_page_is_that_of_the_parser() -> None:
    page = (ROOT / "docs/launcher.md").read_text(encoding="utf-8")
    assert markdown_table() in page


def test_the_errors_that_a_run_names_are_those_of_the_page_about_fidelity() -> None:
    """If the page was generated anew: put its figures, the median's rounded up and the worst's rounded up to tens, into
    podrun/launcher/profile.py and docs/trust.md."""
    page = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    header, row = (
        re.search(rf"^\| {first} \|.*(?:median|%).*$", page, flags=re.MULTILINE)
        for first in ("kind", "network")
    )
    assert header is not None
    assert row is not None
    cells = dict(zip(*([cell.strip() for cell in line[0].split("|")] for line in (header, row)), strict=True))
    median, worst = (float(cells[name].rstrip("%")) for name in ("median error", "worst"))
    assert [math.ceil(median), math.ceil(worst / 10) * 10] == [NETWORK_MEDIAN, NETWORK_WORST]
    trust = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
    assert f"throughput of networks | {NETWORK_MEDIAN} % at the median, {NETWORK_WORST} % at worst" in trust
