"""`vipu_command` and `vipu-admin` as typed, against a service on fake machines."""

from __future__ import annotations

import json
import os
import signal
import socketserver
import threading
from pathlib import Path

import click
import pytest

from podrun.core.command_line import run_command
from podrun.core.errors import ConfigError, UsageError
from podrun.core.telemetry import AttachedProcess
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.commands.context import partition_names
from podrun.partition.commands.get import get_partition
from podrun.partition.commands.vipu import vipu_command
from podrun.partition.commands.vipu_admin import vipu_admin_command
from podrun.partition.commands.vipu_server import vipu_server_command
from podrun.partition.commands.which_server import find_server, read_hcl
from podrun.partition.host.discovery import VIPU_SERVER, Registry, ServiceEntry, own_process_id
from podrun.partition.host.holders import this_holder
from podrun.partition.state.values import PartitionState

from .conftest import Pod


class Shell:
    """Runs commands against one service and keeps what they printed."""

    def __init__(self, pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
        self._pod, self._capsys = pod, capsys
        self.out = self.err = ""

    def __call__(self, line: str, *, admin: bool = False) -> int:
        options = ["-H", "127.0.0.1", "--api-port", str(self._pod.port)]
        code = run_command(vipu_admin_command if admin else vipu_command, [*options, *line.split()])
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def shell(
    pod16: Pod, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Shell:
    monkeypatch.setenv("HOME", str(tmp_path))
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
        error = said["error"]
        assert shell.err == f"vipu: error: {error['message']}\nhint: {error['hint']}\n"
        assert shell(line) == 2
        assert shell.out == ""


def test_the_hint_names_a_pod_that_is_large_enough(shell: Shell) -> None:
    assert shell("create partition p --size 128") == 2
    assert "start a larger POD: vipu-server --cluster pod128" in shell.err
    assert shell("create partition p --size 1024") == 2
    assert shell.err.endswith("hint: Ask for fewer.\n")


def test_attributes_of_a_partition_are_sorted(shell: Shell) -> None:
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
        assert run_command(vipu_admin_command, line.split()) == 0
        assert "ACTIVE" in capsys.readouterr().out
    assert run_command(vipu_command, f"get partition p16 {where} --format json".split()) == 0
    assert json.loads(capsys.readouterr().out)["partition"]
    assert run_command(vipu_command, f"list partitions --nonsense {where}".split()) == 2
    assert "--nonsense" in capsys.readouterr().err
    assert run_command(vipu_command, ["list", "partitions", "--api-port"]) == 2
    assert "--api-port" in capsys.readouterr().err


def test_scripts_that_scrape_tables_find_active_partitions(shell: Shell) -> None:
    shell("create partition p64 --size 4 --reconfigurable")
    shell("list partitions")
    active = [line.split("|")[0].strip() for line in shell.out.splitlines() if "ACTIVE" in line]
    assert active == ["p64"]
    shell("--server-version")
    lines = shell.out.splitlines()
    assert lines[0].startswith("version: ")
    assert lines[1].startswith("host: 127.0.0.1:")


def test_vipu_shows_the_ipuof_config_of_a_gcd(shell: Shell) -> None:
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


def test_ipu_attributes_show_the_attached_process(shell: Shell, pod16: Pod) -> None:
    for name in ("p", "q"):
        assert shell(f"create partition {name} --size 2") == 0
    pod16.pool.machine("ipum1", "q").process = AttachedProcess(4711, "me", "python train.py", 1.0)
    assert shell("--format json list ipu-attrs") == 0
    found = {(e["agent"], e["ipu"]): e["attributes"] for e in json.loads(shell.out)["ipus"]}
    assert len(found) == 16
    holders = {key: values["user process id"] for key, values in found.items() if "user process id" in values}
    assert holders == {("ipum1", 1): "4711", ("ipum1", 0): "4711"}
    assert found["ipum1", 0]["user executable"] == "python train.py"


def test_a_drain_with_a_deadline_of_no_seconds_ends_now(shell: Shell, pod16: Pod) -> None:
    assert shell("create partition p --size 4") == 0
    assert shell(f"drain agent {pod16.client.get_partition('p').agents[0]}", admin=True) == 0
    pod16.service.look_around()
    assert pod16.client.partition_state("p")[0] is PartitionState.ACTIVE
    (agent,) = pod16.client.get_partition("p").agents
    assert shell(f"drain agent {agent} --deadline 0", admin=True) == 0
    now = pod16.service._clock()
    pod16.service._clock = lambda: now + 0.01
    pod16.service.look_around()
    assert pod16.client.wait_for_state("p", {PartitionState.REMOVED}, 60) is PartitionState.REMOVED


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
    assert shell("inject fault p ipu:5@batch=17:tile-parity", admin=True) == 0
    assert shell("get agent ipum9", admin=True) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("create partition p --size 3", "power of two"),
        ("create partition p --size 64", "larger than pod16"),
        ("create partition p", "missing option '--size'"),
        ("create partition p --sise 4", "'--size'"),
        ("lst partitions", "Did you mean 'list'?"),
        ("list partitoins", "Did you mean 'partitions'?"),
        ("get partition nope", "no partition 'nope'"),
        ("remove partition nope", "no partition 'nope'"),
        ("create partition p --size 4 --sync-type x", "unknown sync type"),
        ("create partition p --size 4 --fault ipu:9@batch=1:tile-parity", "no IPU 9"),
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
        (
            "create partition p --size 4 --routing ring",
            "there is no routing 'ring'\nhint: There are: DNC, SWNC, RINGSWNC, BTNC.",
        ),
        ("create partition p --size 4 --routing ring-swnc", "need a whole IPU-Link domain"),
        ("create partition p --size 4 --index 5", "has 4 places for 4 IPUs, no place 5"),
        ("create user bob", "this server has no users: it was started without --secure"),
        ("create agents ipum9", "missing option '--host'"),
        ("create cluster c1", "missing option '--agents'"),
        ("discover agent", "vipu-admin list agents"),
        ("remove agents x", "there is no agent 'x'"),
    ],
)
def test_commands_and_options_that_podrun_lacks_are_refused_by_name(
    shell: Shell, line: str, words: str
) -> None:
    assert shell(line, admin=True) == 2
    assert words in shell.err


def test_without_a_server_the_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(vipu_command, ["-H", "127.0.0.1", "--api-port", "1", "list", "partitions"]) == 1
    assert "no V-IPU server answers at 127.0.0.1:1" in capsys.readouterr().err


def test_the_order_in_which_the_server_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    publication = Registry().publish(ServiceEntry(VIPU_SERVER, "127.0.0.1", 4321, own_process_id()))
    assert find_server(None, None, environ={}).port == 4321
    publication.withdraw()
    hcl.write_text("api-host h3\n")
    with pytest.raises(ConfigError, match=r"c\.hcl:1: "):
        read_hcl(hcl)


@pytest.mark.parametrize("text", ["x", "0", "70000", "-1"])
def test_a_port_that_is_no_number_is_named(tmp_path: Path, text: str) -> None:
    hcl = tmp_path / "c.hcl"
    hcl.write_text(f'api-host="h"\napi-port="{text}"\n')
    with pytest.raises(UsageError, match=rf"api-port in {hcl} is '{text}', not a port number"):
        find_server(None, None, config=hcl, environ={})
    with pytest.raises(UsageError, match=f"VIPU_CLI_API_PORT is '{text}', not a port number"):
        find_server(None, None, environ={"VIPU_CLI_API_HOST": "h", "VIPU_CLI_API_PORT": text})


def test_a_program_that_is_no_server_is_told_from_none(capsys: pytest.CaptureFixture[str]) -> None:
    class Web(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Web) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        port = web.server_address[1]
        code = run_command(
            vipu_command,
            ["-H", "127.0.0.1", "--api-port", str(port), "--timeout", "20", "list", "partitions"],
        )
        web.shutdown()
    assert code == 1
    said = capsys.readouterr().err
    assert (
        f"the program at 127.0.0.1:{port} accepts connections but does not answer as a V-IPU server" in said
    )


def served(line: list[str], monkeypatch: pytest.MonkeyPatch, directory: Path) -> int:
    """The exit code of a vipu-server that is told to stop at once."""
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(directory))
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr("podrun.partition.commands.serve.stop_on_signals", lambda: stop)
    return run_command(vipu_server_command, ["--port", "0", "--in-process", "--no-state", *line])


def test_a_shared_server_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert served([], monkeypatch, tmp_path) == 0
    assert "shared" not in capsys.readouterr().out
    assert served(["--shared", "--admin", "12345"], monkeypatch, tmp_path) == 0
    said = capsys.readouterr().out
    assert "every user of this host may create partitions here" in said
    assert "12345" in said


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["--shared", "--host", "0.0.0.0"], "a shared server listens on 127.0.0.1"),
        (["--shared", "--ray-address", "10.0.0.1:6379"], "a shared server listens on 127.0.0.1"),
        (["--admin", "root"], "--admin is for a server that others use"),
        (["--shared", "--admin", "no-such-user"], "there is no user 'no-such-user'"),
        (["--ray-address", "10.0.0.1:6379", "--host", "0.0.0.0"], "--in-process runs machines without Ray"),
    ],
)
def test_sharing_that_cannot_be_is_refused(
    line: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    assert served(line, monkeypatch, tmp_path) == 2
    assert reason in capsys.readouterr().err


def test_a_server_on_a_taken_port(pod16: Pod, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = ["--port", str(pod16.port), "--no-state", "--in-process"]
    assert run_command(vipu_server_command, line) == 2
    assert f"port {pod16.port} on 127.0.0.1 is taken" in capsys.readouterr().err


def test_the_server_lists_pods_and_refuses_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(vipu_server_command, ["--list-clusters"]) == 0
    assert "pod64" in capsys.readouterr().out
    assert run_command(vipu_server_command, ["--cluster", "pod63"]) == 2
    assert "Did you mean pod64?" in capsys.readouterr().err


def test_a_server_under_nohup_goes_on_when_the_terminal_closes() -> None:
    from podrun.core.stop_signals import stop_on_signals

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = stop_on_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("verb", ["remove", "reset"])
def test_what_is_in_use_is_neither_removed_nor_reset_unless_forced(
    shell: Shell, pod16: Pod, verb: str
) -> None:
    assert shell("create partition p --size 2") == 0
    pod16.pool.machine("ipum1", "p").process = AttachedProcess(4711, "alice", "python train.py", 1.0)
    assert shell(f"{verb} partition p") == 2
    assert "in use by process 4711 (python train.py) of alice" in shell.err
    assert f"Wait until it ends, or end its use: vipu {verb} partition p --force" in shell.err
    assert shell(f"{verb} partition p --force") == 0


def test_a_program_resets_its_own_partition(
    shell: Shell, pod16: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell("create partition p --size 2") == 0
    pod16.pool.machine("ipum1", "p").process = AttachedProcess(4711, "alice", "python train.py", 1.0)
    monkeypatch.setenv("IPUOF_VIPU_API_PARTITION_ID", "p")
    assert shell("reset partition p") == 0


@pytest.mark.parametrize("verb", ["remove", "reset"])
def test_verbs_that_destroy_suggest_no_other_partition(shell: Shell, verb: str) -> None:
    assert shell("create partition run-12 --size 2") == 0
    assert shell(f"{verb} partition run-13") == 2
    assert "no partition 'run-13'" in shell.err
    assert "run-12" not in shell.err
    assert "it went with it" in shell.err


def test_a_full_pod_says_how_to_wait_and_whose_to_remove(shell: Shell) -> None:
    assert shell("create partition p --size 16") == 0
    assert shell("create partition q --size 2") == 2
    assert "Wait for it" in shell.err
    assert "one of your own" in shell.err
    assert shell("create partition p --size 2") == 2
    assert "remove partition" not in shell.err


def test_a_request_that_waits_says_so_and_ctrl_c_gives_it_up(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(client: VipuClient, name: str) -> None:
        raise KeyboardInterrupt

    assert shell("create partition p --size 16") == 0
    monkeypatch.setattr(VipuClient, "wait_in_queue", interrupted)
    assert shell("create partition q --size 2 --wait") == 130
    assert "partition q waits for IPUs; vipu explain q says for which" in shell.err
    assert shell("get partition q") == 2


def test_a_partition_from_the_queue_is_kept_once_its_client_has_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[str] = []
    wait_in_queue = VipuClient.wait_in_queue

    def noted(client: VipuClient, name: str) -> None:
        held.append(client.get_partition(name).holder)
        wait_in_queue(client, name)

    monkeypatch.setattr(VipuClient, "wait_in_queue", noted)
    assert shell("create partition p --size 4 --wait") == 0
    assert held == [str(this_holder())]
    assert shell("get partition p") == 0
    assert "Ends With" not in shell.out
    shell._pod.active("launch", 4, holder=str(this_holder()))
    assert shell("get partition launch") == 0
    assert f"process {os.getpid()} on " in shell.out


def test_names_of_partitions_are_completed(pod16: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    pod16.active("first", 4)
    pod16.active("second", 4)
    monkeypatch.setenv("VIPU_CLI_API_HOST", "127.0.0.1")
    monkeypatch.setenv("VIPU_CLI_API_PORT", str(pod16.port))
    command = get_partition
    context = click.Context(command)
    assert partition_names(context, command.params[0], "f") == ["first"]
    assert [item.value for item in command.params[0].shell_complete(context, "")] == ["first", "second"]
    monkeypatch.setenv("VIPU_CLI_API_PORT", "1")
    assert partition_names(context, command.params[0], "") == []


def test_a_partition_has_files_in_the_home_directory(shell: Shell, tmp_path: Path) -> None:
    where = tmp_path / ".ipuof.conf.d"
    assert shell("create partition p --size 4") == 0
    assert shell("create partition two --size 8 --num-gcds 2") == 0
    assert shell("create partition later --size 1 --no-wait") == 0
    assert shell("create partition none --size 1 --no-ipuof-files") == 0
    names = ["p_ipuof.conf", "two_gcd0_ipuof.conf", "two_gcd1_ipuof.conf"]
    assert sorted(path.name for path in where.iterdir()) == names
    second = json.loads((where / names[2]).read_text())
    assert (second["attributes"]["GCD Id"], len(second["devices"])) == ("1", 4)
    before = (where / names[0]).read_text()
    shell._pod.pool.machine("ipum1", "p").die()
    assert shell("restart agent ipum1", admin=True) == 0
    assert shell("reset partition p") == 0
    assert (where / names[0]).read_text() != before  # The machine listens elsewhere now.
    assert shell("reset partition none") == 0
    assert sorted(path.name for path in where.iterdir()) == names
    assert shell("remove partition two") == 0
    assert [path.name for path in where.iterdir()] == ["p_ipuof.conf"]
    assert shell("remove partition p") == 0
    assert list(where.iterdir()) == []


def test_a_home_directory_that_cannot_be_written_is_no_error(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / ".ipuof.conf.d").write_text("in the way")
    assert shell("create partition p --size 4") == 0
    assert shell.out == "create partition (p): success.\n"
    assert "note: no file was written into" in shell.err
    assert shell("remove partition p") == 0
