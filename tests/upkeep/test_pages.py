"""podrun help TOPIC: pages of the guide as text."""

from __future__ import annotations

import re

import pytest

from podrun.core.errors import NotFoundError
from podrun.launcher.cli import main
from podrun.upkeep.pages import help_pages, page_text, table_of_topics
from tests.conftest import ROOT


def test_links_become_topics() -> None:
    text = page_text("reference/faults")
    assert "[Faults](../faults.md)" not in text
    assert "Faults (podrun help faults)" in text


@pytest.mark.parametrize("topic", sorted(help_pages()))
def test_each_page_is_shown_and_names_topics_that_exist(topic: str) -> None:
    named = re.findall(r"\(podrun help ([\w/-]+)\)", page_text(topic))
    assert set(named) <= set(help_pages())
    assert f"podrun help {topic} " in table_of_topics()


def test_help_of_a_topic_a_verb_and_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "faults"]) == 0
    assert capsys.readouterr().out.startswith("# Faults\n")
    assert main(["help", "docs/faults.md"]) == 0
    assert capsys.readouterr().out.startswith("# Faults\n")
    assert main(["help", "topics"]) == 0
    assert "podrun help security" in capsys.readouterr().out
    assert main(["help"]) == 0
    assert "Usage: podrun" in capsys.readouterr().out
    assert main(["help", "fault"]) == 2
    said = capsys.readouterr().err
    assert "the guide has no topic 'fault'" in said
    assert "Did you mean podrun help faults?" in said
    assert main(["help", "estimate"]) == 0
    assert "Usage: podrun estimate" in capsys.readouterr().out


def test_the_cluster_file_on_the_page_is_the_real_one() -> None:
    assert (ROOT / "cluster_configs/pod16.yaml").read_text(encoding="utf-8") in help_pages()[
        "vipu"
    ].read_text(encoding="utf-8")


def test_without_pages_there_are_no_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podrun.upkeep.pages.help_pages", dict)
    assert table_of_topics() == ""
    with pytest.raises(NotFoundError):
        page_text("faults")
