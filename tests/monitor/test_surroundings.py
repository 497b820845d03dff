"""A reader that goes, a disk that is full, a service of another release: a sentence, and an end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import click
import grpc
import pytest
from click.testing import CliRunner

from podrun.core.command_line import run_while_read
from podrun.core.errors import PodrunError, ServiceError
from podrun.monitor.commands.health import health_verb
from podrun.monitor.commands.record import record_verb
from podrun.monitor.commands.top import top_verb
from podrun.monitor.device_tools import gc_monitor_command
from podrun.monitor.live import recordings
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.commands import context
from tests.partition.conftest import Pod


def test_a_command_that_watches_ends_when_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        after = []

        def wait() -> None:
            os.close(reader)
            after.append(threading.Event().wait(60))

        run_while_read(wait)
        monkeypatch.undo()
    assert after == []


def test_a_signal_that_comes_before_the_wait_begins_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under load, where the system takes the main thread its processor just before it waits."""
    reader, writer = os.pipe()
    lost, send = [], signal.pthread_kill

    def lose_the_first(thread: int, number: int) -> None:
        send(thread, number) if lost else lost.append(number)

    monkeypatch.setattr("signal.pthread_kill", lose_the_first)
    with open(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        os.close(reader)
        after = []
        run_while_read(lambda: after.append(threading.Event().wait(60)))
        monkeypatch.undo()
    assert after == []
    assert lost == [signal.SIGINT]


def test_ctrl_c_stays_ctrl_c_while_somebody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as output, open(reader):
        monkeypatch.setattr("sys.stdout", output)

        def press() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_while_read(press)
        monkeypatch.undo()


def test_a_full_disk_ends_a_recording_with_what_is_kept(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullAfterOne(recordings.RecordingWriter):
        """Writes a sighting to the disk, the next to a full one."""

        def add(self, seen: recordings.PodSighting) -> None:
            super().add(seen)
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, self._raw.fileno())
            os.close(full)

    monkeypatch.setattr(recordings, "RecordingWriter", FullAfterOne)
    file = tmp_path / "pod.recording"
    words = [str(file), "--interval", "0.1", "--for", "30"]
    done = CliRunner().invoke(record_verb, words, standalone_mode=False)
    assert isinstance(done.exception, PodrunError)
    assert done.exception.message == f"cannot write {file}: No space left on device"
    assert f"podrun top --replay {file}" in (done.exception.hint or "")
    assert len(recordings.read_recording(file).sightings) == 1


def test_a_recording_in_a_folder_that_is_not_there_is_refused(pod: Pod, tmp_path: Path) -> None:
    done = CliRunner().invoke(record_verb, [str(tmp_path / "no" / "file")], standalone_mode=False)
    assert isinstance(done.exception, PodrunError)
    assert "No such file or directory" in done.exception.message


def test_that_the_partition_is_gone_is_said_once(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    def five_changes(client: VipuClient, kinds: object, once: Callable[[VipuClient], None]) -> None:
        once(client)
        once(client)
        pod.active("p", 4)
        once(client)
        client.remove_partition("p")
        assert pod.service.wait_idle(60)
        once(client)
        once(client)

    monkeypatch.setattr(context, "follow", five_changes)
    done = CliRunner().invoke(gc_monitor_command, ["--watch", "--no-card-info"], standalone_mode=False)
    assert done.exception is None
    assert done.output.count("no active partition") == 2
    assert done.output.count("No attached processes in partition p") == 1


@pytest.mark.parametrize(
    ("command", "words"), [(gc_monitor_command, []), (top_verb, ["--once"]), (health_verb, [])]
)
def test_a_server_that_knows_none_of_the_calls_is_named(
    command: click.Command, words: list[str], pod: Pod
) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        where = ["--api-host", "127.0.0.1", "--api-port", str(port)]
        done = CliRunner().invoke(command, [*words, *where], standalone_mode=False)
    finally:
        server.stop(0).wait(60)
    told = done.output if done.exception is None else str(done.exception)
    assert f"the program at 127.0.0.1:{port} is no V-IPU server, or one of another release" in told
    assert done.exception is None or isinstance(done.exception, ServiceError)
