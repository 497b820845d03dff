"""Files and tables that pages show are those of the code: plans, policies, rates, drills, alerts, formats."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from podrun.checkpoint.policy import Spacing
from podrun.core.cluster_file import load_cluster
from podrun.drill.scenario import built_in_drills, load_scenario
from podrun.drill.scoring import Judgement, judge
from podrun.faults.plan_file import read_plan
from podrun.launcher.recovery import FailureKind, RestartPolicy, read_policy
from podrun.monitor.dashboards import ALERTS, Alert
from podrun.simulate.campaign_setup import CampaignSetup
from podrun.simulate.chaos_setup import with_policy
from podrun.simulate.counted_pool import POLICIES
from podrun.simulate.rates import UNITS, preset_names, read_rates
from tests.conftest import ROOT


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def block(name: str, word: str) -> str:
    """The one block of a page, fenced or indented, that begins with a version and has a word."""
    text = page(name)
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    blocks += map(textwrap.dedent, re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE))
    (chosen,) = (one for one in blocks if one.startswith("version: 1\n") and word in one)
    return chosen


def written(folder: Path, name: str, word: str) -> Path:
    file = folder / "shown.yaml"
    file.write_text(block(name, word), encoding="utf-8")
    return file


def test_the_plan_of_faults(tmp_path: Path) -> None:
    faults = read_plan(written(tmp_path, "faults.md", "faults:"))
    assert [fault.kind for fault in faults] == ["tile-parity", "degraded", "soft-error"]


def test_the_restart_policy_says_what_holds_without_it(tmp_path: Path) -> None:
    shown, usual = read_policy(written(tmp_path, "faults.md", "max-restarts:")), RestartPolicy(max_restarts=3)
    assert {kind: shown.answers(kind) for kind in FailureKind} == {
        kind: usual.answers(kind) for kind in FailureKind
    }
    for name in ("max_restarts", "crash_loop_after", "pause_seconds", "min_replicas"):
        assert getattr(shown, name) == getattr(usual, name), name


def test_rates_and_policy_of_a_campaign(tmp_path: Path) -> None:
    rates = read_rates(str(written(tmp_path, "simulate.md", "sources:")))
    setup = CampaignSetup(load_cluster("pod64"), rates)
    setup = with_policy(setup, written(tmp_path, "simulate.md", "spares:"))
    assert (setup.checkpoint.spacing, setup.spares, setup.ipus) == (Spacing.DALY, 16, 32768)


def test_words_of_simulations() -> None:
    text = page("simulate.md")
    assert [name for name in (*preset_names(), *UNITS, *POLICIES) if f"`{name}`" not in text] == []


def test_drills(tmp_path: Path) -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|", page("drills.md"), flags=re.MULTILINE)
    assert rows == sorted(built_in_drills())
    drill = load_scenario(str(written(tmp_path, "drills.md", "story:")), 1)
    assert judge(drill, drill.answers[0]) is Judgement.RIGHT


SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}


def seconds(text: str) -> int:
    parts = re.fullmatch(r"(\d+) ?(\w+)", text)
    assert parts, text
    return int(parts[1]) * SECONDS[parts[2]]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_fire_when_the_page_says(alert: Alert) -> None:
    rows = dict(
        re.findall(r"^\| `(Podrun\w+)` \| .* \| ([\w ]+) \|$", page("monitor.md"), flags=re.MULTILINE)
    )
    assert len(rows) == len(ALERTS)
    assert seconds(rows[alert.name]) == seconds(alert.holds)
