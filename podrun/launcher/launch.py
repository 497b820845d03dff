"""Carries out a `LaunchSpec`: service and partition, instances, supervision, summary, and the clearing up of
it all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from podrun.access import quiet_grpc
from podrun.errors import NotFoundError, PodrunError
from podrun.launcher.dry_run import describe
from podrun.launcher.environment import PartitionAddress, instance_environment
from podrun.launcher.hosts import LOCAL_HOST
from podrun.launcher.log import Log, LogHandler, error_text, silence
from podrun.launcher.output import Channel, OutputMixer
from podrun.launcher.partition import Closed, PartitionSession
from podrun.launcher.plan import fit_to_pod
from podrun.launcher.pods import choose_cluster, facts_of, pods_by_size
from podrun.launcher.process import Command, ProcessRunner
from podrun.launcher.residue import Residue
from podrun.launcher.server import find_server
from podrun.launcher.spec import InstanceSpec, LaunchSpec
from podrun.launcher.stopping import Interrupted, Stopping
from podrun.launcher.summary import counted, summary
from podrun.launcher.supervise import Outcome, Runner, Supervisor
from podrun.launcher.topology import topology_table
from podrun.partition.ray_address import AUTO


def preview(spec: LaunchSpec, environ: Mapping[str, str]) -> str:
    """What ``--dry-run`` prints. Asks a server that is there for its POD; starts nothing."""
    if spec.partition is None:
        return describe(spec, None, "")
    address = find_server(spec.server, environ)
    if address is None:
        pod = facts_of(choose_cluster(spec))
        return describe(fit_to_pod(spec, pod, pods_by_size), pod, "podrun starts one for the run")
    session = PartitionSession(spec, environ, Log(-1))
    try:
        pod = session.connect()
    finally:
        session.close()
    return describe(fit_to_pod(spec, pod), pod, str(address))


def launch(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Run it; returns the exit code. Raises PodrunError for what stops it before instances run."""
    # Instances get the environment as the user had it: what follows, and Ray, change it for this process.
    before = dict(environ)
    quiet_grpc()
    with _Launch(spec, before) as running:
        return running.run()


class _Launch:
    """One launch from beginning to end. Everything that must be undone is on the exit stack, in order."""

    def __init__(self, spec: LaunchSpec, environ: dict[str, str]) -> None:
        self.spec = spec
        self.environ = environ
        self.log = Log(spec.verbosity)
        self.session: PartitionSession | None = None
        self.supervisor: Supervisor | None = None
        self.started = time.monotonic()
        self._undo = contextlib.ExitStack()
        self._stopping = Stopping(self._on_signal)

    def __enter__(self) -> _Launch:
        self._undo.enter_context(self._stopping.heard())
        self._undo.callback(_send_logs_to(self.log))
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.clearing()
        self._undo.close()

    def run(self) -> int:
        """See `launch`."""
        for warning in self.spec.warnings:
            self.log.warning(warning)
        try:
            return self._run()
        except Interrupted as stop:
            name = signal.Signals(stop.number).name
            self.log.write(f"podrun: {name}: ended before instances were started\n")
            return 128 + stop.number

    def _run(self) -> int:
        self._check_hosts()
        residue = Residue.begin(self.log)
        self._undo.callback(residue.end)
        address, beside = self._stopping.wait_for(lambda: self._prepare_partition(residue), self._cancel)
        if self.spec.print_topology:
            sys.stdout.write(topology_table(self.spec.layout))
            sys.stdout.flush()
        cache = self.spec.cache_path or residue.cache_directory()
        runner = ProcessRunner()
        self._undo.callback(runner.close)
        runners = [
            runner,
            *self._stopping.wait_for(lambda: self._remote_runners(runner, cache), self._cancel),
        ]
        mixer = self._mixer()
        self._undo.callback(mixer.close)
        self.supervisor = Supervisor(runners, mixer, self.log, wake=runner.wake)
        self._stopping.check()  # From here on the supervisor hears of signals.
        if beside:
            self._watch_partition()
        self._start_instances(runners, residue, address, cache)
        outcome = self.supervisor.run()
        self._stopping.clearing()
        self._report(outcome, mixer)
        return outcome.exit_code

    # --- the partition ----------------------------------------------------------------------------------------

    def _check_hosts(self) -> None:
        """Instances on other hosts are nodes of a Ray cluster, and so are the hosts of their machines."""
        if any(not is_this_host(host) for host in self.spec.layout.hosts) and not self.spec.server.ray:
            server = dataclasses.replace(self.spec.server, ray=AUTO)
            self.spec = dataclasses.replace(self.spec, server=server)
        if self.spec.host_subnet:
            self.log.debug(f"--host-subnet {self.spec.host_subnet} has no effect: Ray connects the hosts")

    def _prepare_partition(self, residue: Residue) -> tuple[PartitionAddress | None, bool]:
        """Where instances find their IPUs, and whether these are still on their way."""
        if self.spec.partition is None:
            self.log.info("offline: no partition")
            return None, False
        others = [host for host in self.spec.layout.hosts if not is_this_host(host)]
        session = PartitionSession(self.spec, self.environ, self.log, others=others)
        self._undo.callback(session.close)
        self.session = session
        pod = session.connect()
        self.spec = fit_to_pod(self.spec, pod, pods_by_size if session.server_missing else None)
        session.spec = self.spec  # The POD decides how many GCDs the partition has.
        self._stopping.check()  # Once machines are asked for, they start before they can be stopped.
        beside = session.prepare()
        residue.publish(session)
        layout = self.spec.layout
        what = f"{counted(layout.replicas, 'replica')}, {counted(layout.instances, 'instance')}"
        self.log.progress(f"{what}; partition {session.name} on {pod.name}, server {session.address}")
        if not beside:
            session.wait_active()
        return session.where(), beside

    def _watch_partition(self) -> None:
        """Wait for the partition beside the instances, which wait for it too; end them if there is none."""
        session, supervisor = self.session, self.supervisor
        assert session is not None
        assert supervisor is not None
        started = time.monotonic()

        def watch() -> None:
            try:
                session.wait_active()
                took = time.monotonic() - started
                self.log.progress(f"partition {session.name} is active after {took:.1f} s")
            except Closed:
                return
            except PodrunError as error:
                supervisor.notify_error(error)

        threading.Thread(target=watch, name="podrun-partition-watch", daemon=True).start()

    # --- instances --------------------------------------------------------------------------------------------

    def _start_instances(
        self, runners: list[Runner], residue: Residue, address: PartitionAddress | None, cache: str
    ) -> None:
        local = runners[0]
        assert isinstance(local, ProcessRunner)
        meeting = meeting_point([instance.host for instance in self.spec.instances])
        for instance in self.spec.instances:
            here = is_this_host(instance.host)
            environment = instance_environment(
                self.spec.layout,
                instance,
                self.environ,
                address=address,
                cache_path=cache,
                launch_id=residue.launch_id,
                local=here,
                debug=self.spec.debug,
                meeting=meeting,
            )
            command = Command(
                instance.index, instance.command, instance.directory, environment, self._stdin(instance)
            )
            runner = local if here else self._runner_of(instance.host, runners)
            try:
                pid = runner.start(command)
            except OSError as error:
                few = error.errno in (errno.EMFILE, errno.EAGAIN)
                raise NotFoundError(
                    f"instance {instance.index} cannot start in {instance.directory}: {error.strerror}",
                    hint="Allow more files and processes: ulimit -n 4096, ulimit -u."
                    if few
                    else "Check the directory (-wdir in --mpi-local-args, or where podrun runs).",
                ) from error
            if here:
                residue.watch(pid)
            self.log.debug(f"instance {instance.index} is process {pid} on {instance.host}")

    def _remote_runners(self, local: ProcessRunner, cache: str) -> list[Runner]:
        others = sorted({host for host in self.spec.layout.hosts if not is_this_host(host)})
        if not others:
            return []
        from podrun.launcher.remote import connect_hosts

        ray = self.spec.server.ray or AUTO
        remote = connect_hosts(others, self.log, local.wake, address=ray, environ=self.environ, scratch=cache)
        for runner in remote:
            self._undo.callback(runner.close)
        return list(remote)

    def _runner_of(self, host: str, runners: list[Runner]) -> Runner:
        return next(runner for runner in runners if getattr(runner, "host", None) == host)

    def _stdin(self, instance: InstanceSpec) -> int | None:
        """Instance 0 reads what is piped into podrun. A terminal cannot be handed to a group in the
        background.
        """
        if not instance.forward_stdin or sys.stdin is None or sys.stdin.closed:
            return None
        try:
            number = sys.stdin.fileno()
            return None if os.isatty(number) else number
        except (OSError, ValueError):
            return None

    def _mixer(self) -> OutputMixer:
        output = self.spec.output
        directory = Path(output.directory) if output.directory else None
        try:
            return OutputMixer(
                self.spec.layout.instances, write_bytes, only=output.only_instance, directory=directory
            )
        except OSError as error:
            raise NotFoundError(
                f"output cannot be kept in {directory}: {error.strerror}",
                hint="Name another --output-filename.",
            ) from error

    # --- the end ----------------------------------------------------------------------------------------------

    def _report(self, outcome: Outcome, mixer: OutputMixer) -> None:
        decisive = outcome.failed if outcome.error is None and outcome.interrupted is None else None
        mixer.release_all(but=None if decisive is None else decisive.instance)
        if outcome.error is not None:
            self.log.write(error_text(outcome.error))
        elif outcome.interrupted is not None:
            name = signal.Signals(outcome.interrupted).name
            self.log.write(f"podrun: {name}: all instances were ended\n")
        elif outcome.failed is not None:
            self._report_failure(outcome, mixer)
        elif self.spec.verbosity >= 0:
            reports = self.session.reports() if self.session else []
            for line in summary(self.spec.layout, reports, time.monotonic() - self.started):
                self.log.progress(line)

    def _report_failure(self, outcome: Outcome, mixer: OutputMixer) -> None:
        """The failing instance's own traceback comes last; what podrun has to say about it comes before."""
        failed = outcome.failed
        assert failed is not None
        alone = self.spec.layout.instances == 1
        if alone and failed.signal is None and mixer.explains_itself(failed.instance):
            mixer.show_failure(failed.instance)
            return
        how = f"exit code {failed.code}"
        if failed.signal is not None:
            how = f"signal {signal.Signals(failed.signal).name} (exit code {failed.code})"
        others = "" if alone else "; the others were ended"
        self.log.write(f"podrun: instance {failed.instance} ended with {how}{others}\n")
        if not alone:
            mixer.note_written()
            mixer.show_failure(failed.instance)

    def _on_signal(self, number: int) -> None:
        if self.supervisor is not None:
            self.supervisor.notify_signal(number)

    def _cancel(self) -> None:
        """Whatever a thread of ours waits for, it need not wait any more."""
        if self.session is not None:
            self.session.cancel()


def is_this_host(name: str) -> bool:
    """True iff the name is this host's: instances there are started directly."""
    import socket

    if name in (LOCAL_HOST, "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    import psutil

    return any(name == a.address for addresses in psutil.net_if_addrs().values() for a in addresses)


def meeting_point(hosts: Sequence[str]) -> str:
    """Where instances on these hosts meet: an address of the first one's, a port outside the range that the kernel
    gives out by itself, and a key. Empty for a single instance.
    """
    import secrets
    import socket

    if len(hosts) < 2:
        return ""
    address = hosts[0]
    if all(is_this_host(host) for host in hosts):
        address = "127.0.0.1"
    elif address == LOCAL_HOST:
        address = socket.gethostname()
    return f"{address}:{20000 + secrets.randbelow(10000)}:{secrets.token_hex(16)}"


def write_bytes(channel: Channel, data: bytes) -> None:
    """To podrun's own standard output or error, at once and whole."""
    stream = sys.stdout if channel is Channel.STDOUT else sys.stderr
    try:
        stream.buffer.write(data)
        stream.buffer.flush()
    except OSError as error:
        # Instances must not be lost because nobody reads what they print; their output is.
        silence(stream, error)


def _send_logs_to(log: Log) -> Callable[[], None]:
    """Let podrun's own service, which uses Python's logging, speak through ``log``; returns how to undo
    it."""
    logger, handler = logging.getLogger("podrun"), LogHandler(log)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if log.verbosity >= 2 else logging.WARNING)
    logger.propagate = False

    def undo() -> None:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]

    return undo
