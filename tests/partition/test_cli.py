"""`vipu` and `vipu-admin` as typed, against a service on pretended machines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from podrun.errors import ConfigError
from podrun.partition.cli_admin import vipu_admin
from podrun.partition.cli_common import find_server, read_hcl, run
from podrun.partition.cli_server import vipu_server
from podrun.partition.cli_user import vipu
from podrun.partition.discovery import VIPU_SERVER, Entry, Registry, this_process

from .conftest import Pod


class Shell:
    """Runs commands against one service and keeps what they printed."""

    def __init__(self, pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
        self._pod, self._capsys = pod, capsys
        self.out = self.err = ""

    def __call__(self, line: str, *, admin: bool = False) -> int:
        options = ["-H", "127.0.0.1", "--api-port", str(self._pod.port)]
        code = run(vipu_admin if admin else vipu, [*options, *line.split()])
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def shell(pod16: Pod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("VIPU_CLI_API_HOST", "IPUOF_VIPU_API_HOST"):
        monkeypatch.delenv(name, raising=False)
    return Shell(pod16, capsys)


PARTITIONS = """\
 Partition | Cluster | ILDs | GW Routing | ILD Routing | Size | GCDs | State
------------------------------------------------------------------------------
 p16       | pod16   | 1    | DEFAULT    | DNC         | 8    | 2    | ACTIVE
------------------------------------------------------------------------------
"""


def test_scripts_can_tell_errors_apart(shell: Shell) -> None:
    """An epilog that removes what is gone, a prolog that finds the POD full: by type, as JSON on standard output."""
    assert shell("create partition p --size 8") == 0
    for line, kind in (
        ("create partition p --size 8", "ExistsError"),
        ("create partition q --size 16", "ExhaustedError"),
        ("create partition q --size 12", "UsageError"),
        ("remove partition gone", "NotFoundError"),
        ("create partition q --size 4 --allocation gone", "NotFoundError"),
    ):
        assert shell(f"--format json {line}") == 2
        said = json.loads(shell.out)
        assert said["error"]["type"] == kind, line
        assert shell.err == f"error: {said['error']['message']}\n  {said['error']['hint']}\n"
        assert shell(line) == 2
        assert shell.out == ""


def test_the_hint_names_a_pod_that_is_large_enough(shell: Shell) -> None:
    assert shell("create partition p --size 128") == 2
    assert "start a larger POD: vipu-server --cluster pod128" in shell.err
    assert shell("create partition p --size 1024") == 2
    assert shell.err.endswith("  Ask for fewer.\n")


def test_attributes_of_a_partition_stand_in_order(shell: Shell) -> None:
    assert shell("create partition p --size 8") == 0
    assert shell("get partition p --ipuof-configs") == 0
    names = list(json.loads(shell.out.partition("\n")[2])["attributes"])
    assert names == sorted(names)


def test_create_list_get_reset_remove(shell: Shell) -> None:
    assert shell("create partition p16 --size 8 --num-gcds 2") == 0
    assert shell.out == "create partition (p16): success.\n"
    assert shell("list partitions") == 0
    assert shell.out == PARTITIONS
    assert shell("list partition") == 0
    assert shell.out == PARTITIONS
    assert shell("get partition p16") == 0
    assert " Sync Type      | pod-native-default\n" in shell.out
    assert shell("reset partition p16") == 0
    assert shell.out == "reset partition (p16): success.\n"
    assert shell("delete partition p16") == 0
    assert shell.out == "remove partition (p16): success.\n"
    assert shell("list partitions") == 0
    assert len(shell.out.splitlines()) == 3


def test_global_options_may_stand_anywhere(
    pod16: Pod, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell("create partition p16 --size 8")
    where = f"--api-host=127.0.0.1 --api-port {pod16.port}"
    for line in (f"list partitions {where}", f"list {where} partitions", f"{where} list partitions"):
        assert run(vipu_admin, line.split()) == 0
        assert "ACTIVE" in capsys.readouterr().out
    assert run(vipu, f"get partition p16 {where} --format json".split()) == 0
    assert json.loads(capsys.readouterr().out)["partition"]
    assert run(vipu, f"list partitions --nonsense {where}".split()) == 2
    assert "--nonsense" in capsys.readouterr().err
    assert run(vipu, ["list", "partitions", "--api-port"]) == 2
    assert "--api-port" in capsys.readouterr().err


def test_scripts_that_scrape_find_what_they_look_for(shell: Shell) -> None:
    shell("create partition p64 --size 4 --reconfigurable")
    shell("list partitions")
    active = [line.split("|")[0].strip() for line in shell.out.splitlines() if "ACTIVE" in line]
    assert active == ["p64"]
    shell("--server-version")
    lines = shell.out.splitlines()
    assert lines[0].startswith("version: ")
    assert lines[1].startswith("host: 127.0.0.1:")


def test_ipuof_configs(shell: Shell) -> None:
    shell("create partition p --size 8 --num-gcds 2")
    assert shell("get partition p --gcd 1 --ipuof-configs") == 0
    config = json.loads(shell.out.split("\n", 1)[1])
    assert len(config["devices"]) == 4
    assert config["attributes"]["GCD Id"] == "1"
    assert {"ip", "server_port", "rdma_port"} <= set(config["devices"][0])
    assert shell("get partition p --ipuof-configs") == 0
    assert shell.out.count("IPUoF configuration of partition p, GCD") == 2


def test_json_output_has_a_schema_version(shell: Shell) -> None:
    for line in (
        "--format json create partition p --size 4",
        "--format json list partitions",
        "--format json get partition p",
        "--format json list allocations",
        "--format json list ipu-attrs",
        "--format json --server-version",
        "--showjson list partitions",
        "--format json get partition p --ipuof-configs",
        "--format json remove partition p",
    ):
        assert shell(line) == 0, shell.err
        assert json.loads(shell.out)["schema_version"] == 1
    assert shell("--format json list agents", admin=True) == 0
    agents = json.loads(shell.out)["agents"]
    assert [agent["id"] for agent in agents] == ["ipum1", "ipum2", "ipum3", "ipum4"]


def test_ipu_attributes_are_grouped(shell: Shell) -> None:
    assert shell("list ipu-attrs") == 0
    lines = shell.out.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")] == ["Agent", "IPU", "Attribute", "Value"]
    assert sum(line.startswith(" ipum1 ") for line in lines) == 4
    assert any("clock" in line and line.endswith("1330MHz") for line in lines)


def test_administration(shell: Shell, pod16: Pod) -> None:
    assert shell("remove allocation pod16", admin=True) == 0
    assert shell("create allocation mine --agents ipum1,ipum2", admin=True) == 0
    assert shell.out == "create allocation (mine): success.\n"
    assert shell("list allocations") == 0
    assert shell.out.splitlines()[2] == " mine          | ipum1 ipum2"
    assert shell("create partition p --size 8", admin=True) == 0
    assert shell("power-cycle agent ipum1", admin=True) == 0
    assert shell("get partition p") == 0
    assert "ERROR" in shell.out
    assert shell("reset partition p") == 0
    pod16.pool.machine("ipum2", "p").die()
    assert shell("reset partition p") == 2
    assert "vipu-admin restart agent ipum2" in shell.err
    assert shell("restart agent ipum2", admin=True) == 0
    assert shell("get agent ipum2", admin=True) == 0
    assert " Status              | Up" in shell.out
    assert shell("reset partition p") == 0
    assert shell("inject fault p ipu:5@step=17:tile-parity", admin=True) == 0
    assert shell("get agent ipum9", admin=True) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("create partition p --size 3", "power of two"),
        ("create partition p --size 64", "larger than pod16"),
        ("create partition p", "Missing option '--size'"),
        ("create partition p --sise 4", "'--size'"),
        ("lst partitions", "Did you mean 'list'?"),
        ("list partitoins", "Did you mean 'partitions'?"),
        ("get partition nope", "no partition 'nope'"),
        ("remove partition nope", "no partition 'nope'"),
        ("create partition p --size 4 --sync-type x", "unknown sync type"),
        ("create partition p --size 4 --fault ipu:9@step=1:tile-parity", "no IPU 9"),
        ("--api-port 99999 list partitions", "99999"),
    ],
)
def test_bad_input_is_explained_with_exit_code_two(shell: Shell, line: str, words: str) -> None:
    assert shell(line) == 2
    assert words in shell.err
    assert "Traceback" not in shell.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("create partition p --size 4 --routing ring", "--routing is not there in podrun"),
        ("create partition p --size 4 --index 1", "--index is not there in podrun"),
        ("create user bob", "create user is not there in podrun\n  The server knows no users"),
        ("create agents ipum9", "create agents is not there in podrun\n  Agents and"),
        ("create cluster c1", "vipu-server --cluster FILE"),
        ("discover agent", "vipu-admin list agents"),
        ("remove agents x", "Commands: allocation, partition."),
    ],
)
def test_what_the_real_tools_have_and_ours_have_not_is_refused_by_name(
    shell: Shell, line: str, words: str
) -> None:
    assert shell(line, admin=True) == 2
    assert words in shell.err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(vipu, ["-H", "127.0.0.1", "--api-port", "1", "list", "partitions"]) == 1
    assert "no V-IPU server answers at 127.0.0.1:1" in capsys.readouterr().err


def test_where_the_server_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path / "run"))
    hcl = tmp_path / "c.hcl"
    hcl.write_text('# where\napi-host = "h3"\n\napi-port="33"\n')
    assert find_server("h1", 5, environ={}).port == 5
    by_cli = find_server(None, None, environ={"VIPU_CLI_API_HOST": "h2", "IPUOF_VIPU_API_HOST": "h4"})
    assert (by_cli.host, by_cli.port) == ("h2", 8090)
    by_ipuof = find_server(None, None, environ={"IPUOF_VIPU_API_HOST": "h4", "IPUOF_VIPU_API_PORT": "44"})
    assert (by_ipuof.host, by_ipuof.port) == ("h4", 44)
    by_file = find_server(None, None, config=hcl, environ={})
    assert (by_file.host, by_file.port) == ("h3", 33)
    assert find_server(None, None, environ={}).source == "the default"
    publication = Registry().publish(Entry(VIPU_SERVER, "127.0.0.1", 4321, this_process()))
    assert find_server(None, None, environ={}).port == 4321
    publication.withdraw()
    hcl.write_text("api-host h3\n")
    with pytest.raises(ConfigError, match=r"c\.hcl:1: "):
        read_hcl(hcl)


def test_a_server_on_a_taken_port(pod16: Pod, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["--port", str(pod16.port), "--no-state", "--in-process"]
    assert run(vipu_server, line) == 2
    assert f"port {pod16.port} on 127.0.0.1 is taken" in capsys.readouterr().err


def test_the_server_lists_pods_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(vipu_server, ["--list-clusters"]) == 0
    assert "pod64" in capsys.readouterr().out
    assert run(vipu_server, ["--cluster", "pod63"]) == 2
    assert "Did you mean pod64?" in capsys.readouterr().err


def test_a_server_under_nohup_goes_on_when_the_terminal_closes() -> None:
    from podrun.partition.cli_server import _stop_on_signals

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = _stop_on_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
