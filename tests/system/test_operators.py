"""What an operator does at a shell: users and TLS, figures for Prometheus, and tools that print what changes."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podrun.partition.server.event_log import BOUNDS_S
from tests.certificates import MISSING, Authority
from tests.conftest import Commands
from tests.copies import run_command

pytestmark = pytest.mark.system
SECONDS = 60.0


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """The next line of a process that has these words; fails at its end. The test's own deadline ends a silent one."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return line
    raise AssertionError(f"no line has {words!r}")


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=SECONDS)


@pytest.fixture
def port(commands: Commands) -> Iterator[int]:
    """A server of a POD16, whose machines are its threads."""
    server = commands.start("vipu-server", "--in-process", "--no-state", "--port=0")
    yield int(line_with(server, "listens on").rpartition(":")[2])
    end(server)


@pytest.fixture
def vipu(commands: Commands, port: int) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return run_command(commands, "vipu-admin", f"--api-port={port}", *words, timeout=SECONDS)

    return run


Samples = dict[tuple[str, str], float]


def scrape(url: str) -> Samples:
    """The samples of a metrics page: by family and labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    found: Samples = {}
    for line in opener.open(url, timeout=SECONDS).read().decode().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z_]+)(?:\{(.*)\})? (\S+)", line)
            assert match, line
            key = (match[1], match[2] or "")
            assert key not in found, f"{key} is there twice"
            found[key] = float(match[3])
    return found


def check_histogram(samples: Samples, call: str, count: int) -> None:
    """Classes grow, the last holds all, and the sum lies between what the classes allow."""
    name, label = "podrun_vipu_call_seconds", f'call="{call}"'
    bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    within = [samples[f"{name}_bucket", f'{label},le="{bound}"'] for bound in bounds]
    assert within == sorted(within)
    assert within[-1] == samples[f"{name}_count", label] == count
    alone = [b - a for a, b in zip([0.0, *within], within, strict=False)]
    least = sum(n * low for n, low in zip(alone, (0.0, *BOUNDS_S), strict=True))
    most = sum(n * high for n, high in zip(alone, (*BOUNDS_S, SECONDS), strict=True))
    assert least <= samples[f"{name}_sum", label] <= most


@pytest.mark.slow
def test_figures_of_the_service_are_what_was_done(
    commands: Commands, port: int, vipu: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    exporter = commands.start("podrun", "exporter", "--port=0", f"--api-port={port}")
    url = line_with(exporter, "/metrics").split()[0]
    sizes = {"a": 4, "b": 4, "c": 1}
    for name, size in sizes.items():
        assert vipu("create", "partition", name, f"--size={size}", "--no-wait").returncode == 0
    for size in (3, 16):
        assert vipu("create", "partition", "x", f"--size={size}", "--no-wait").returncode == 2
    samples = scrape(url)
    check_histogram(samples, "CreatePartition", len(sizes) + 2)
    assert samples["podrun_vipu_call_errors_total", 'call="CreatePartition"'] == 2
    free = 16 - sum(sizes.values())
    largest = 4  # ipum4 is whole; c has one IPU of ipum3.
    assert samples["podrun_vipu_free_ipus", ""] == free
    assert samples["podrun_vipu_largest_free_partition", ""] == largest
    assert samples["podrun_vipu_fragmentation", ""] == pytest.approx(1 - largest / free, abs=1e-5)
    assert samples["podrun_vipu_queued_requests", ""] == 0
    assert samples["podrun_vipu_watchers", ""] == 1  # The exporter.
    assert samples["podrun_agents", 'health="up"'] == 4
    assert vipu("cordon", "agent", "ipum4").returncode == 0
    queued = commands.start("vipu", f"--api-port={port}", "create", "partition", "q", "--size=16", "--wait")
    while (samples := scrape(url))["podrun_vipu_queued_requests", ""] == 0:
        assert queued.poll() is None
    free, largest = free - 4, 2
    assert samples["podrun_vipu_free_ipus", ""] == free
    assert samples["podrun_vipu_fragmentation", ""] == pytest.approx(1 - largest / free, abs=1e-5)
    told = ("podrun_partition_state", 'partition="q",state="QUEUED"')
    while samples["podrun_agents", 'health="cordoned"'] != 1 or samples.get(told) != 1:
        samples = scrape(url)  # What changes arrives a moment later.
    check_histogram(samples, "CreatePartition", len(sizes) + 3)
    queued.kill()
    queued.communicate(timeout=SECONDS)
    end(exporter)


def test_tools_print_again_when_something_changes(
    commands: Commands, port: int, vipu: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    monitor = commands.start("gc-monitor", "--watch", "--no-card-info", f"--api-port={port}")
    listing = commands.start("podrun", "ps", "--watch")
    agent = commands.start(
        "vipu-admin", f"--api-port={port}", "--format=json", "--watch", "get", "agent", "ipum1"
    )
    line_with(listing, "Nothing runs.")
    line_with(agent, '"health": "up"')
    assert vipu("create", "partition", "p", "--size=4").returncode == 0
    line_with(monitor, "No attached processes in partition p")
    line_with(listing, "ACTIVE")
    assert vipu("cordon", "agent", "ipum1", "--reason=memory").returncode == 0
    line_with(agent, '"health": "cordoned"')
    for process in (monitor, listing, agent):
        end(process)


@pytest.mark.skipif(MISSING != "", reason=f"needs {MISSING}")
def test_users_and_tls_from_a_shell(commands: Commands, tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    files, foreign = ours.host("here"), others.host("elsewhere")

    def tls(made: dict[str, str]) -> list[str]:
        return [f"--tls-{name}={made[f'PODRUN_TLS_{name.upper()}']}" for name in ("cert", "key", "ca")]

    state = tmp_path / "state.sqlite"
    words = ["--in-process", "--secure", "--port=0", f"--state-file={state}"]
    server = commands.start("vipu-server", *words, *tls(files))
    port = line_with(server, "listens on").rpartition(":")[2].strip()
    admin = line_with(server, "secure: the first user is admin").split("--config ")[1].split()[0]

    def run(*words: str, made: dict[str, str] | None = files) -> subprocess.CompletedProcess[str]:
        words = (*(tls(made) if made else ()), *words)
        return run_command(commands, "vipu-admin", *words, timeout=SECONDS)

    listed = commands.run("vipu-admin", *tls(files), "--config", admin, "list", "partitions", timeout=SECONDS)
    assert listed.returncode == 0, listed.stderr
    plain = run("--config", admin, "list", "partitions", made=None)
    assert (plain.returncode, "TLS" in plain.stderr, "Traceback" in plain.stderr) == (1, True, False)
    stranger = run("--config", admin, "list", "partitions", made=foreign)
    assert stranger.returncode == 1
    assert "certificate" in stranger.stderr
    nobody = run(f"--api-port={port}", "list", "partitions")
    assert nobody.returncode != 0
    assert "wants a user and an access key" in nobody.stderr

    for name, agents in (("left", "ipum1,ipum2"), ("right", "ipum3,ipum4")):
        if name == "left":
            assert run("--config", admin, "remove", "allocation", "pod16").returncode == 0
        assert run("--config", admin, "create", "allocation", name, "--agents", agents).returncode == 0
        made = run("--config", admin, "create", "user", f"of-{name}", "--allocations", name)
        assert "access key: " in made.stdout, made.stderr
        path = commands.home / f"of-{name}.vipu-cli.hcl"
        assert path.stat().st_mode & 0o777 == 0o600
        created = run("--config", str(path), "create", "partition", f"p-{name}", "--size=4")
        assert created.returncode == 0, created.stderr
    listed = run(
        "--config", str(commands.home / "of-left.vipu-cli.hcl"), "--format=json", "list", "partitions"
    )
    assert [entry["name"] for entry in json.loads(listed.stdout)["partitions"]] == ["p-left"]
    denied = run("--config", str(commands.home / "of-left.vipu-cli.hcl"), "remove", "partition", "p-right")
    assert denied.returncode != 0
    assert "there is no partition 'p-right'" in denied.stderr
    shown = commands.run("gc-monitor", env={**files, **account(commands.home / "of-left.vipu-cli.hcl")})
    assert "Partition: p-left [active] has 4 IPUs" in shown.stdout, shown.stderr
    audit = (tmp_path / "state.sqlite.audit.jsonl").read_text()
    outcomes = [json.loads(line)["outcome"].split(":")[0] for line in audit.splitlines()]
    assert {"asked", "done", "refused"} <= set(outcomes)
    end(server)

    again = commands.start("vipu-server", *words, *tls(files))
    line_with(again, "secure: 3 users")
    end(again)


def account(path: Path) -> dict[str, str]:
    """The variables that name the server and user of a vipu-cli.hcl file."""
    settings = dict(re.findall(r'([a-z-]+)="(.*)"', path.read_text()))
    return {
        "VIPU_CLI_API_HOST": settings["api-host"],
        "VIPU_CLI_API_PORT": settings["api-port"],
        "VIPU_CLI_API_USER_ID": settings["api-user-id"],
        "VIPU_CLI_API_ACCESS_KEY": settings["api-access-key"],
    }
