"""Every drill of the package is solved by documented commands alone, so that each can be solved.

A solver sees what a player sees: the output of commands in the drill's runtime directory, and the logs of jobs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podrun.drill.scenario import built_in_drills

pytestmark = [pytest.mark.slow, pytest.mark.system]
DEADLINE_S = 120.0


class Player:
    """A second terminal. ``directory``: where the drill says to point tools."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._environ = {**os.environ, "PODRUN_RUNTIME_DIR": str(directory)}

    def run(self, *words: str) -> str:
        """Standard output of a command."""
        bin_dir = Path(sys.executable).parent
        done = subprocess.run(
            [str(bin_dir / words[0]), *words[1:]], capture_output=True, text=True, timeout=60, check=False,
            env=self._environ,
        )  # fmt: skip
        return done.stdout

    def rows(self, *words: str) -> list[dict[str, Any]]:
        """Rows of a tool."""
        return [json.loads(line) for line in self.run(*words, "--format", "jsonl").splitlines()]

    def log(self, partition: str) -> str:
        """The end of a job's output."""
        return (self.directory / f"{partition}.log").read_text(errors="replace")[-20_000:]

    def until(self, look: Callable[[], Any]) -> Any:
        """What a look gives, as soon as that is something."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if seen := look():
                return seen
            time.sleep(0.2)
        raise AssertionError("nothing was seen")


def link_flap(player: Player) -> str:
    def counting() -> list[int]:
        ipus = [row["id"] for row in player.rows("gc-monitor") if row["link_correctable_errors"]]
        return ipus if len(ipus) == 2 else []

    first, second = player.until(counting)
    return f"link:{first}-{second}:degraded"


def straggler(player: Player) -> str:
    def late() -> str:
        machines = json.loads(player.run("podrun", "top", "--format", "json"))["sighting"]["machines"]
        rates = {
            machine["agent"]: machine["modelled_s"] / machine["batches"]
            for machine in machines
            if machine["partition"] and machine["batches"]
        }
        worst = max(rates, key=lambda agent: rates[agent], default="")
        return worst if rates and rates[worst] > 1.5 * min(rates.values()) else ""

    return f"machine:{player.until(late)}:slow"


def lost_machine(player: Player) -> str:
    def broken() -> list[dict[str, Any]]:
        return [
            row for row in player.rows("podrun", "health") if row["severity"] == "broken" and row["agent"]
        ]

    problem = player.until(broken)[0]
    answer = f"machine:{problem['agent']}:lost"
    assert "make the POD healthy" in player.run("podrun", "drill", "answer", answer)
    for command in problem["remedy"].split(", then "):
        player.run(*command.split())
    return ""


def corrupted_gradient(player: Player) -> str:
    ipu = player.until(lambda: re.search(r"those of IPU (\d+) are not those of most", player.log("train")))
    return f"ipu:{ipu.group(1)}:corrupt"


def full_disk(player: Player) -> str:
    line = player.until(lambda: re.search(r"\[1,(\d+)\]<\w+>:.*No space left", player.log("train")))
    assert player.rows("podrun", "health") == []
    return f"disk:{line.group(1)}:full"


def slow_controller(player: Player) -> str:
    def slow() -> bool:
        begin = time.monotonic()
        player.run("vipu", "list", "partitions")
        return time.monotonic() - begin > 2.0

    player.until(slow)
    before, after = (player.rows("gc-monitor")[0]["batches_done"] for _ in range(2))
    assert after > before, "the job itself goes on"
    return "service:vipu:slow"


def noisy_neighbour(player: Player) -> str:
    def blockers() -> list[str]:
        queue = json.loads(player.run("vipu", "list", "queue", "--format", "json"))["queue"]
        return queue[0]["blockers"] if queue else []

    suspects = player.until(blockers)

    def idle() -> list[str]:
        rows = player.rows("gc-monitor", "--all-partitions")
        return [
            name
            for name in suspects
            if all(row["utilisation_percent"] == 0 and row["PID"] for row in rows if row["partition"] == name)
        ]

    return f"partition:{player.until(idle)[0]}:idle"


def hot_ipu(player: Player) -> str:
    def slow() -> list[dict[str, Any]]:
        return [row for row in player.rows("podrun", "health") if row["what"].startswith("clock ")]

    return f"ipu:{player.until(slow)[0]['ipus'][0]}:throttled"


SOLVERS: dict[str, Callable[[Player], str]] = {
    "corrupted-gradient": corrupted_gradient,
    "full-disk": full_disk,
    "hot-ipu": hot_ipu,
    "link-flap": link_flap,
    "lost-machine": lost_machine,
    "noisy-neighbour": noisy_neighbour,
    "slow-controller": slow_controller,
    "straggler": straggler,
}


def test_every_drill_has_a_solver() -> None:
    assert SOLVERS.keys() == built_in_drills().keys()


@pytest.mark.parametrize("name", sorted(SOLVERS))
def test_a_drill_is_solved_by_documented_commands(name: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    podrun = str(Path(sys.executable).parent / "podrun")
    with said.open("w") as stderr, subprocess.Popen(
        [podrun, "drill", name, "--format", "json"], stdout=subprocess.PIPE, stderr=stderr, text=True,
        stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as drill:  # fmt: skip
        assert drill.stdout is not None
        try:
            watcher = Player(tmp_path)
            where = watcher.until(
                lambda: (
                    re.search(r"export PODRUN_RUNTIME_DIR=(\S+)", said.read_text())
                    or drill.poll() is not None
                )
            )
            assert where is not True, said.read_text()
            player = Player(Path(where.group(1)))
            player.until(lambda: (player.directory / "drill-answers").exists())
            answer = SOLVERS[name](player)
            if answer:
                assert player.run("podrun", "drill", "answer", answer) == "Right.\n", (
                    answer,
                    said.read_text(),
                )
            result = json.loads(drill.stdout.read())
            assert drill.wait(60) == 0
        finally:
            drill.kill() if drill.poll() is None else None
    score = result["score"]
    assert score["solved"]
    assert score["damage"] == []
    assert score["points"] >= 80
    assert not list(tmp_path.glob("podrun-drill-*"))
