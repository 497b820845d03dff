"""Carries out a `LaunchSpec`: service and partition, instances, supervision, summary, clean-up."""

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
from typing import TYPE_CHECKING

from podrun.core.access import quiet_grpc
from podrun.core.errors import NotFoundError, PodrunError, UsageError
from podrun.core.terminal import above_status
from podrun.faults import UNSTRUCK_EXIT_CODE, PlanOfALaunch, report_unstruck
from podrun.faults.fault_errors import SUPERVISED
from podrun.faults.in_program import FILE
from podrun.launcher.host_names import LOCAL_HOST, is_this_host
from podrun.launcher.output import Log, LogHandler, OutputChannel, OutputMixer, error_text, silence
from podrun.launcher.partition import Closed, PartitionSession
from podrun.launcher.placement import fit_to_pod
from podrun.launcher.process import Command, ProcessRunner, Residue
from podrun.launcher.recovery import Attempt, Coordinator, Damage, Recovery, RestartPolicy, Step, Verdict
from podrun.launcher.repair import Repairs, Replan
from podrun.launcher.server import pods_by_size
from podrun.launcher.spec import InstanceSpec, LaunchSpec, PartitionAddress, instance_environment
from podrun.launcher.status import LaunchStatus
from podrun.launcher.summary import counted, launch_summary
from podrun.launcher.supervise import Interrupted, LaunchOutcome, Runner, Stopping, Supervisor
from podrun.launcher.topology import topology_table
from podrun.partition.machines.ray_starts import AUTO

if TYPE_CHECKING:
    from podrun.launcher.recording import LaunchRecording


def launch(spec: LaunchSpec, environ: Mapping[str, str], replan: Replan | None = None) -> int:
    """Run a launch and return its exit code. Raises PodrunError for errors before instances run.

    ``replan`` returns the launch with another number of replicas, for launches that may go on with fewer.
    """
    # Instances get the environment as the user had it; podrun and Ray change the one of this process.
    before = dict(environ)
    quiet_grpc()
    with _Launch(spec, before, replan) as running:
        return running.run()


class _Launch:
    """One launch from beginning to end. The exit stack holds everything that must be undone, in order."""

    def __init__(self, spec: LaunchSpec, environ: dict[str, str], replan: Replan | None = None) -> None:
        self.spec = spec
        self.environ = environ
        self.replan = replan
        self.coordinator = Coordinator(spec.restarts or RestartPolicy())
        self.log = Log(spec.verbosity)
        self.session: PartitionSession | None = None
        self.supervisor: Supervisor | None = None
        self.recording: LaunchRecording | None = None
        self._left: frozenset[str] = frozenset()
        """The planned faults that have not struck."""
        self._program_faults: PlanOfALaunch | None = None
        self._program_environment: Mapping[str, str] = {}
        """Variables that tell instances on this host which faults strike in them."""
        self.started = time.monotonic()
        self._began = time.time()
        self._undo = contextlib.ExitStack()
        self._status = LaunchStatus(sys.stderr, environ, quiet=spec.verbosity < 0)
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
            when = "between two attempts" if self.coordinator.attempts else "before instances were started"
            self.log.write(f"podrun: {name}: ended {when}\n")
            return 128 + stop.number

    def _run(self) -> int:
        self._check_hosts()
        residue = Residue.begin(self.log)
        self._undo.callback(residue.end)
        self._undo.callback(self._status.end)
        if self.spec.partition is not None:
            self._status.starting()
        address, beside = self._stopping.wait_for(lambda: self._prepare_partition(residue), self._cancel)
        if self.spec.print_topology:
            sys.stdout.write(topology_table(self.spec.layout))
            sys.stdout.flush()
        cache = self.spec.cache_path or residue.cache_directory()
        mixer = self._mixer()
        self._undo.callback(mixer.close)
        self._plan_program_faults(cache)
        if self.spec.header is not None:
            from podrun.launcher.recording import LaunchRecording

            self.recording = LaunchRecording(
                Path(residue.cache_directory()), self.spec.record, self.spec.header, self._began
            )
        repairs = None
        if self.session is not None and self.spec.restarts is not None:
            repairs = Repairs(self.session, self.log, self.replan)
        while True:
            started = time.monotonic()
            outcome = self._attempt(residue, address, beside, cache, mixer)
            if self.spec.restarts is None or not self._may_recover(outcome):
                break
            again = self._recover(outcome, repairs, mixer, time.monotonic() - started)
            if not again:
                break
            address = None if self.session is None else self.session.where()
            beside = self.session is not None
        self._stopping.clearing()
        missed = "" if outcome.interrupted else self._unstruck_faults()
        code = outcome.exit_code or (UNSTRUCK_EXIT_CODE if missed else 0)
        self._finish_recording(outcome, code, mixer)
        self._report(outcome, mixer)
        if missed:
            self.log.write(f"podrun: {missed}")
        return code

    def _plan_program_faults(self, folder: str) -> None:
        """Write down the faults that strike in instances. Raises UsageError for a fault in an instance on
        another host.
        """
        planned = () if self.spec.partition is None else self.spec.partition.faults
        faults = [fault for fault in planned if fault.in_program]
        for fault, index in ((each, index) for each in faults for index in each.indices):
            host = self.spec.instances[index].host
            if not is_this_host(host):
                raise UsageError(
                    f"fault {fault.text}: instance {index} runs on {host}, out of podrun's reach",
                    hint="Such faults strike instances on podrun's own host.",
                )
        if faults:
            file = Path(folder, "program-faults")
            self._program_faults = PlanOfALaunch(file)
            self._program_faults.write(faults)
            self._program_environment = {FILE: str(file)}

    def _finish_recording(self, outcome: LaunchOutcome, code: int, mixer: OutputMixer) -> None:
        """Write the record; if anything went wrong, say what it was and what it cost."""
        if self.recording is None:
            return
        if outcome.failed is not None and self.spec.restarts is None:
            self.recording.ended(outcome.failed)
        self.recording.note("end", code=code)
        try:
            reports = [] if self.session is None else self.session.history()
            inside = [] if self._program_faults is None else self._program_faults.strikes()
            lines = self.recording.finish(self._left, reports, inside).lines
        except PodrunError as error:
            self.log.write(error_text(error))
            return
        if lines and self.spec.verbosity >= 0:
            mixer.note_written()
            for line in lines:
                self.log.progress(line)

    def _attempt(
        self,
        residue: Residue,
        address: PartitionAddress | None,
        beside: bool,
        cache: str,
        mixer: OutputMixer,
    ) -> LaunchOutcome:
        """Start all instances, and supervise them until they have ended. ``beside``: the partition is being made
        meanwhile.
        """
        with contextlib.ExitStack() as undo:
            runner = ProcessRunner()
            undo.callback(runner.close)
            others = self._stopping.wait_for(lambda: self._remote_runners(runner, cache), self._cancel)
            for other in others:
                undo.callback(other.close)
            self.supervisor = Supervisor([runner, *others], mixer, self.log, wake=runner.wake)
            self._stopping.check()  # From here on the supervisor receives signals.
            if beside:
                self._watch_partition()
            if self.recording is not None:
                self.recording.begin(len(self.coordinator.attempts), self.spec.layout)
            self._start_instances([runner, *others], residue, address, cache)
            outcome = self.supervisor.run()
            self.supervisor = None
            return outcome

    def _may_recover(self, outcome: LaunchOutcome) -> bool:
        """Whether restarts help: an instance failed, or the partition did while instances were started again."""
        if outcome.interrupted is not None:
            return False
        return outcome.failed is not None if outcome.error is None else bool(self.coordinator.attempts)

    def _recover(
        self, outcome: LaunchOutcome, repairs: Repairs | None, mixer: OutputMixer, seconds: float
    ) -> bool:
        """Do what the coordinator decides about a failed attempt. True iff the instances are to start again.

        A recovery that fails half-way is itself an attempt that failed: it is tried again while restarts remain.
        """
        failed = _how_failed(outcome, seconds)
        if self.recording is not None and outcome.failed is not None:
            self.recording.ended(outcome.failed)
        tried = len(self.coordinator.attempts)
        while True:
            try:
                verdict = self._repair(failed, repairs, mixer)
                break
            except PodrunError as error:
                self.log.write(error_text(error))
                if len(self.coordinator.attempts) == tried:  # Nobody even says what is broken.
                    verdict = self.coordinator.broke_off(error.message)
                    break
                failed = Attempt(
                    f"the recovery failed: {error.message}", error.exit_code, Damage(), in_recovery=True
                )
                tried = len(self.coordinator.attempts)
        if verdict is None:
            return True
        if self.recording is not None:
            self.recording.gave_up(verdict)
        self.log.write(f"podrun: not started again: {verdict.text}\n")
        mixer.note_written()
        return False

    def _repair(self, failed: Attempt, repairs: Repairs | None, mixer: OutputMixer) -> Verdict | None:
        """Repair what is broken, so that the instances can start again. The verdict if they are not to."""
        damage, batches = (
            (Damage(), 0) if repairs is None else self._stopping.wait_for(repairs.look, self._cancel)
        )
        reached = None if self.recording is None else self.recording.reached()
        attempt = dataclasses.replace(failed, damage=damage, batches=batches, reached=reached)
        decision = self.coordinator.failed(attempt)
        if isinstance(decision, Verdict):
            return decision
        mixer.release_all()
        self.log.progress(f"{self.coordinator.attempts[-1].text}")
        self.log.progress(f"restart {decision.number} of {self.coordinator.policy.max_restarts}")
        done = self._stopping.wait_for(lambda: self._carry_out(decision, repairs), self._cancel)
        if done is None:
            return self.coordinator.impossible()
        if self.recording is not None:
            self.recording.started_again(decision.number, done)
        return None

    def _carry_out(self, recovery: Recovery, repairs: Repairs | None) -> tuple[Step, ...] | None:
        """Make the partition usable again and plan the faults that have still to strike, before instances start. The
        steps that were taken; None if that is impossible.
        """
        if repairs is None or self.session is None:
            return ()
        done = repairs.carry_out(recovery)
        if done is None:
            return None
        self.spec = self.session.spec
        if self.session.faults:
            self.session.wait_again()
            repairs.plan_again()
        if recovery.pause_seconds:
            self.session.pause(recovery.pause_seconds)
        return done

    # --- the partition ----------------------------------------------------------------------------------------

    def _check_hosts(self) -> None:
        """Use a Ray cluster if instances run on other hosts."""
        if any(not is_this_host(host) for host in self.spec.layout.hosts) and not self.spec.server.ray:
            server = dataclasses.replace(self.spec.server, ray=AUTO)
            self.spec = dataclasses.replace(self.spec, server=server)
        if self.spec.host_subnet:
            self.log.debug(f"--host-subnet {self.spec.host_subnet} has no effect: Ray connects the hosts")

    def _prepare_partition(self, residue: Residue) -> tuple[PartitionAddress | None, bool]:
        """Where instances find their IPUs, and whether the partition is still being made."""
        if self.spec.partition is None:
            self.log.info("offline: no partition")
            return None, False
        others = [host for host in self.spec.layout.hosts if not is_this_host(host)]
        session = PartitionSession(
            self.spec, self.environ, self.log, others=others, launch_id=residue.launch_id
        )
        self._undo.callback(session.close)
        self.session = session
        pod = session.connect()
        self.spec = fit_to_pod(self.spec, pod, pods_by_size if session.server_missing else None)
        session.spec = self.spec  # The POD decides how many GCDs the partition has.
        self._stopping.check()  # From here on machines start, and cannot be stopped before they have started.
        beside = session.prepare()
        residue.publish(session)
        layout = self.spec.layout
        what = f"{counted(layout.replicas, 'replica')}, {counted(layout.instances, 'instance')}"
        where = f"a {pod.name} of its own" if session.own_service else f"{pod.name}, server {session.address}"
        self.log.progress(f"{what}; partition {session.name} on {where}")
        if not beside:
            session.wait_active()
            self._status.started()
        return session.where(), beside

    def _watch_partition(self) -> None:
        """Wait for the partition while instances start; end them if the partition fails."""
        session, supervisor = self.session, self.supervisor
        assert session is not None
        assert supervisor is not None
        started, again = time.monotonic(), bool(self.coordinator.attempts)

        def watch() -> None:
            try:
                session.wait_again() if again else session.wait_active()
                took = time.monotonic() - started
                self.log.progress(f"partition {session.name} is active after {took:.1f} s")
                self._status.started()
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
        exchange_point = choose_exchange_point([instance.host for instance in self.spec.instances])
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
                exchange_point=exchange_point,
            )
            if self.recording is not None and here:
                environment |= self.recording.environment
            environment |= self._program_environment if here else {}
            if self.spec.check_replicas:
                environment["PODRUN_CHECK_REPLICAS"] = str(self.spec.check_replicas)
            environment["PODRUN_RESTART_COUNT"] = str(len(self.coordinator.attempts))
            environment |= self._status.environment(residue.cache_directory) if here else {}
            if self.spec.restarts is not None:
                environment[SUPERVISED] = "1"
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
        return list(
            connect_hosts(others, self.log, local.wake, address=ray, environ=self.environ, scratch=cache)
        )

    def _runner_of(self, host: str, runners: list[Runner]) -> Runner:
        return next(runner for runner in runners if getattr(runner, "host", None) == host)

    def _stdin(self, instance: InstanceSpec) -> int | None:
        """The input of an instance: instance 0 reads what is piped into podrun. A terminal cannot be given to a
        background process group.
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
                f"output cannot be written to {directory}: {error.strerror}",
                hint="Name another --output-filename.",
            ) from error

    # --- the end ----------------------------------------------------------------------------------------------

    def _report(self, outcome: LaunchOutcome, mixer: OutputMixer) -> None:
        decisive = outcome.failed if outcome.error is None and outcome.interrupted is None else None
        mixer.release_all(but=None if decisive is None else decisive.instance)
        self._status.end()
        if outcome.error is not None:
            self.log.write(error_text(outcome.error))
        elif outcome.interrupted is not None:
            name = signal.Signals(outcome.interrupted).name
            self.log.write(f"podrun: {name}: all instances were ended\n")
        elif outcome.failed is not None:
            self._report_failure(outcome, mixer)
        elif self.spec.verbosity >= 0:
            reports = self.session.reports() if self.session else []
            first = self.spec.instances[0]
            words = [str(Path(first.directory, word)) for word in first.command]
            for line in launch_summary(self.spec.layout, reports, time.monotonic() - self.started, words):
                self.log.progress(line)

    def _unstruck_faults(self) -> str:
        """The message that names planned faults that did not strike; empty if every fault that had to strike did."""
        if self.session is None:
            return ""
        try:
            unstruck = self.session.unstruck_faults()
            if self._program_faults is not None:
                unstruck += self._program_faults.left()
            self._left = frozenset(fault.text for fault in unstruck)
            return report_unstruck(unstruck)
        except PodrunError as error:
            return f"cannot tell whether the planned faults struck: {error.message}\n"

    def _report_failure(self, outcome: LaunchOutcome, mixer: OutputMixer) -> None:
        """Report the failing instance: podrun's line first, the instance's traceback last."""
        failed = outcome.failed
        assert failed is not None
        alone = self.spec.layout.instances == 1
        if alone and failed.signal is None and mixer.explains_itself(failed.instance):
            mixer.show_failure(failed.instance)
            return
        how = failed.in_words
        others = "" if alone else "; the others were ended"
        self.log.write(f"podrun: instance {failed.instance} ended with {how}{others}\n")
        if not alone:
            mixer.note_written()
            mixer.show_failure(failed.instance)

    def _on_signal(self, number: int) -> None:
        if self.supervisor is not None:
            self.supervisor.notify_signal(number)

    def _cancel(self) -> None:
        """Cancel blocked background work."""
        if self.session is not None:
            self.session.cancel()


def _how_failed(outcome: LaunchOutcome, seconds: float) -> Attempt:
    """How an attempt failed after so many seconds, before anybody has looked at what is broken."""
    if outcome.error is not None:
        cause = f"the partition did not become active: {outcome.error.message}"
        return Attempt(cause, outcome.exit_code, Damage(), seconds=seconds, in_recovery=True)
    failed = outcome.failed
    assert failed is not None
    cause = f"instance {failed.instance} ended with {failed.in_words}"
    return Attempt(cause, failed.code, Damage(), seconds=seconds)


def choose_exchange_point(hosts: Sequence[str]) -> str:
    """The exchange point of instances on these hosts: an address of the first host, a port outside the range of
    ports that the kernel assigns, and a random key. Empty for a single instance.
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


def write_bytes(channel: OutputChannel, data: bytes) -> None:
    """Write to podrun's own standard output or error, in one piece, and flush."""
    stream = sys.stdout if channel is OutputChannel.STDOUT else sys.stderr
    with above_status():
        try:
            stream.buffer.write(data)
            stream.buffer.flush()
        except OSError as error:
            # Nobody reads the output: drop it, and let the instances go on.
            silence(stream, error)


def _send_logs_to(log: Log) -> Callable[[], None]:
    """Route log records of podrun's own service to ``log``. Returns a function that undoes it."""
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
