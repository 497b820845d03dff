"""Launches with fault plans on a POD16 beside their twins in virtual time: equal incidents in equal order, and times
inside the interval of the timing model."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.simulate.campaign_setup import CampaignSetup
from podrun.simulate.chaos_setup import with_policy
from podrun.simulate.launch_twin import launch_beside_twin, shown_launch_twin
from podrun.simulate.rates import FailureRates
from tests.conftest import Commands
from tests.system.conftest import PARTITION

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "recovery" / "supervised.py"
POLICY = "version: 1\nmax-restarts: 8\ncheckpoint: {every-batches: 5, mode: background}\n"
pytestmark = [pytest.mark.system, pytest.mark.slow]
PLANS = {
    16: [
        ("ipu:5@batch=7:tile-parity", "link:2-3@batch=8:down", "machine:1@batch=9:lost"),
        ("machine:2@batch=9:power", "ipu:0@batch=6:soft-error", "link:4-5@batch=7:down"),
        ("machine:3@batch=7:lost", "ipu:9@batch=8:trap", "machine:0@batch=6:power"),
    ],
    8: [
        ("machine:1@batch=6:lost", "machine:0@batch=8:lost"),
        ("machine:0@batch=8:lost", "machine:1@batch=7:lost"),
        ("machine:0@batch=9:lost", "machine:0@batch=7:lost"),
    ],
}
"""By the IPUs of the launch. With 8 of the POD's 16 a lost machine is left out, and the second one is replaced."""
TRIES = 3
"""Launches of one plan, of which one has to lie inside: a host that others use may stand still for a minute."""


def recorded(commands: Commands, folder: Path, ipus: int, plan: tuple[str, ...]) -> Path:
    """The record of a launch with a plan."""
    folder.mkdir()
    where = ("--vipu-partition", PARTITION) if ipus == 16 else ("--cluster=pod16",)
    words = ("podrun", f"--num-replicas={ipus}", *where, "--max-restarts=8", "--record", folder / "record")
    faults = [f"--fault={text}" for text in plan]
    done = commands.run(*words, *faults, PROGRAM, "--checkpoints", folder / "checkpoints", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "record"


def beside_twins(commands: Commands, tmp_path: Path, ipus: int) -> None:
    """Each of the plans is held against its twin, whose times come from the launches of the other plans."""
    (tmp_path / "p.yaml").write_text(POLICY)
    job = CampaignSetup(load_cluster("pod16"), FailureRates("none", ()), ipus=ipus)
    setup = with_policy(job, tmp_path / "p.yaml")
    plans = PLANS[ipus]
    launches = {plan: recorded(commands, tmp_path / f"{n}", ipus, plan) for n, plan in enumerate(plans)}
    outside: dict[int, list[str]] = {}
    for number, plan in enumerate(plans):
        others = [file for other, file in launches.items() if other != plan]
        for again in range(TRIES):
            if again:
                others.append(
                    launches[plan]
                )  # The host was faster or slower then: the interval takes that in.
                launches[plan] = recorded(commands, tmp_path / f"{number}-{again}", ipus, plan)
            twin = launch_beside_twin(launches[plan], others, setup)
            assert twin["different"] == 0, twin
            assert len(twin["incidents"]) == len(plan)
            if not twin["outside"]:
                break
            outside.setdefault(number, []).append(shown_launch_twin(twin))
    assert all(len(tries) < TRIES for tries in outside.values()), "\n".join(
        chain.from_iterable(outside.values())
    )


def test_launches_of_a_whole_pod_are_as_their_twins(pod: Commands, tmp_path: Path) -> None:
    beside_twins(pod, tmp_path, 16)


def test_launches_with_spare_machines_are_as_their_twins(commands: Commands, tmp_path: Path) -> None:
    beside_twins(commands, tmp_path, 8)
