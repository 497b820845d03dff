"""Carries out a `LaunchSpec`: service and partition, instances, supervision, summary, clean-up."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from podrun.core.access import quiet_grpc
from podrun.core.environment import PODRUN_PROGRAM_FAULTS, PODRUN_RESTART_COUNT
from podrun.core.errors import PodrunError, UsageError, present
from podrun.core.terminal import note_moment
from podrun.faults import UNSTRUCK_EXIT_CODE, PlanOfALaunch
from podrun.launcher.ending import LaunchEnding
from podrun.launcher.host_names import is_this_host
from podrun.launcher.instances import InstanceStarter
from podrun.launcher.launch_server import LaunchOverError, LaunchServer
from podrun.launcher.output import OutputMixer
from podrun.launcher.own_streams import Log, open_mixer, send_logs_to
from podrun.launcher.partition import LaunchPartition
from podrun.launcher.placement import fit_to_pod
from podrun.launcher.process import LaunchResources, ProcessRunner
from podrun.launcher.recovering import Restarts
from podrun.launcher.recovery import Coordinator, RestartPolicy
from podrun.launcher.repair import Repairs, Replan
from podrun.launcher.server import pods_by_size
from podrun.launcher.spec import CurrentLaunch, LaunchSpec, PartitionAddress
from podrun.launcher.status import LaunchStatus
from podrun.launcher.summary import number_of
from podrun.launcher.supervise import Interrupted, LaunchOutcome, Stopping, Supervisor
from podrun.launcher.topology import topology_table
from podrun.partition.client.connection import import_what_connects
from podrun.record.running_launch import OutputTail


def launch(spec: LaunchSpec, environ: Mapping[str, str], replan: Replan | None = None) -> int:
    """Run a launch and return its exit code. Raises PodrunError for errors before instances run.

    ``replan`` returns the launch with another number of replicas, for launches that may go on with fewer.
    """
    # Instances get the environment as the user had it; podrun and Ray change the one of this process.
    before = dict(environ)
    note_moment("the launch is planned")
    quiet_grpc()
    with _Launch(spec, before, replan) as running:
        return running.run()


class _Launch:
    """One launch from beginning to end. The exit stack holds everything that must be undone, in order."""

    def __init__(self, spec: LaunchSpec, environ: dict[str, str], replan: Replan | None = None) -> None:
        self.current = CurrentLaunch(spec)
        self.environ = environ
        self.replan = replan
        self.log = Log(spec.verbosity)
        self._undo = contextlib.ExitStack()
        self._status = LaunchStatus(sys.stderr, environ, quiet=spec.verbosity < 0)
        self._stopping = Stopping(self._on_signal)
        self.restarts = Restarts(Coordinator(spec.restarts or RestartPolicy()), self._stopping, self.log)
        self.ending = LaunchEnding(self.current, self.log, time.monotonic(), time.time())
        self.partition: LaunchPartition | None = None
        self.supervisor: Supervisor | None = None
        self._fault_environment: Mapping[str, str] = {}
        """Variables that tell instances on this host which faults strike in them."""

    def __enter__(self) -> _Launch:
        self._undo.enter_context(self._stopping.heard())
        self._undo.callback(send_logs_to(self.log))
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.clearing()
        self._undo.close()

    @property
    def starts(self) -> int:
        """How often instances were started before."""
        return len(self.restarts.coordinator.attempts)

    def run(self) -> int:
        """See `launch`."""
        for warning in self.current.spec.warnings:
            self.log.warning(warning)
        try:
            return self._run()
        except Interrupted as stop:
            name = signal.Signals(stop.number).name
            when = "between two attempts" if self.starts else "before instances were started"
            self.log.write(f"podrun: {name}: ended {when}\n")
            return 128 + stop.number

    def _run(self) -> int:
        self._check_hosts()
        resources = LaunchResources.begin(self.log)
        self._undo.callback(resources.end)
        self._undo.callback(self._status.end)
        if self.current.spec.partition is not None:
            self._status.starting()
            import_what_connects()
        address, under_way = self._stopping.wait_for(lambda: self._prepare_partition(resources), self._cancel)
        if self.current.spec.print_topology:
            sys.stdout.write(topology_table(self.current.spec.layout))
            sys.stdout.flush()
        cache = self.current.spec.cache_path or resources.cache_directory()
        tail = OutputTail(Path(resources.cache_directory()))
        self._undo.callback(tail.close)
        mixer = open_mixer(self.current.spec, tail)
        self._undo.callback(mixer.close)
        self._plan_program_faults(cache)
        self._begin_recording(resources)
        if self.partition is not None and self.current.spec.restarts is not None:
            self.restarts.repairs = Repairs(self.partition, self.log, self.replan)
        outcome = self._attempt_until_done(resources, cache, mixer, address, under_way=under_way)
        self._stopping.clearing()
        unstruck = self.ending.unstruck_faults(interrupted=bool(outcome.interrupted))
        code = outcome.exit_code or (UNSTRUCK_EXIT_CODE if unstruck else 0)
        self.ending.finish_recording(outcome, code, mixer)
        self._status_end_and_report(outcome, mixer)
        if unstruck:
            self.log.write(f"podrun: {unstruck}")
        return code

    def _status_end_and_report(self, outcome: LaunchOutcome, mixer: OutputMixer) -> None:
        self.ending.release_output(outcome, mixer)
        self._status.end()
        self.ending.report(outcome, mixer)

    def _attempt_until_done(
        self,
        resources: LaunchResources,
        cache: str,
        mixer: OutputMixer,
        address: PartitionAddress | None,
        *,
        under_way: bool,
    ) -> LaunchOutcome:
        """Start the instances until they end well, or no restart helps or is wanted. ``under_way``: the partition is
        being made while the first of them start.
        """
        while True:
            started = time.monotonic()
            outcome = self._attempt(resources, cache, mixer, address, under_way=under_way)
            if self.current.spec.restarts is None or not self.restarts.may_help(outcome):
                return outcome
            if not self.restarts.recover(outcome, mixer, time.monotonic() - started):
                return outcome
            address = None if self.partition is None else self.partition.address()
            under_way = self.partition is not None

    def _attempt(
        self,
        resources: LaunchResources,
        cache: str,
        mixer: OutputMixer,
        address: PartitionAddress | None,
        *,
        under_way: bool,
    ) -> LaunchOutcome:
        """Start all instances, and supervise them until they have ended."""
        with contextlib.ExitStack() as undo:
            runner = ProcessRunner()
            undo.callback(runner.close)
            starter = self._starter(resources, cache)
            others = self._stopping.wait_for(lambda: starter.remote_runners(runner.wake), self._cancel)
            for other in others:
                undo.callback(other.close)
            self.supervisor = Supervisor([runner, *others], mixer, self.log, wake=runner.wake)
            self._stopping.check()  # From here on the supervisor receives signals.
            if under_way:
                self._watch_partition()
            if self.ending.recording is not None:
                self.ending.recording.begin(self.starts, self.current.spec.layout)
            note_moment("instances start")
            starter.start(runner, others, address)
            outcome = self.supervisor.run()
            self.supervisor = None
            return outcome

    def _starter(self, resources: LaunchResources, cache: str) -> InstanceStarter:
        of_host: dict[str, str] = {}
        if self.ending.recording is not None:
            of_host |= self.ending.recording.environment
        of_host |= self._fault_environment
        of_host |= self._status.environment(resources.cache_directory)
        of_launch = {PODRUN_RESTART_COUNT: str(self.starts)}
        return InstanceStarter(
            self.current.spec, self.environ, self.log, resources, cache, of_launch, of_host
        )

    def _begin_recording(self, resources: LaunchResources) -> None:
        spec = self.current.spec
        if spec.header is not None:
            from podrun.launcher.recording import LaunchRecording

            recording = LaunchRecording(
                Path(resources.cache_directory()), spec.record, spec.header, self.ending.began
            )
            self.ending.recording = self.restarts.recording = recording

    def _plan_program_faults(self, folder: str) -> None:
        """Write down the faults that strike in instances. Raises UsageError for a fault in an instance on
        another host.
        """
        spec = self.current.spec
        planned = () if spec.partition is None else spec.partition.faults
        faults = [fault for fault in planned if fault.in_program]
        for fault in faults:
            for index in fault.indices:
                host = spec.instances[index].host
                if not is_this_host(host):
                    raise UsageError(
                        f"fault {fault.text}: instance {index} runs on {host}, out of podrun's reach",
                        hint="Such faults strike instances on podrun's own host.",
                    )
        if faults:
            file = Path(folder, "program-faults")
            plan = PlanOfALaunch(file)
            plan.write(faults)
            self.ending.program_faults = plan
            self._fault_environment = {PODRUN_PROGRAM_FAULTS: str(file)}

    # --- the partition ----------------------------------------------------------------------------------------

    def _check_hosts(self) -> None:
        """Use a Ray cluster if instances run on other hosts."""
        spec = self.current.spec
        if any(not is_this_host(host) for host in spec.layout.hosts) and not spec.server.ray:
            from podrun.partition.machines.ray_starts import AUTO

            server = dataclasses.replace(spec.server, ray=AUTO)
            self.current.spec = dataclasses.replace(spec, server=server)
        if spec.host_subnet:
            self.log.debug(f"--host-subnet {spec.host_subnet} has no effect: Ray connects the hosts")

    def _prepare_partition(self, resources: LaunchResources) -> tuple[PartitionAddress | None, bool]:
        """Where instances find their IPUs, and whether the partition is still being made."""
        if self.current.spec.partition is None:
            self.log.info("offline: no partition")
            return None, False
        others = [host for host in self.current.spec.layout.hosts if not is_this_host(host)]
        server = LaunchServer(self.current, self.environ, self.log, others)
        partition = LaunchPartition(server, resources.launch_id)
        self._undo.callback(partition.close)
        self.partition = self.restarts.partition = self.ending.partition = partition
        pod = server.connect(partition.pause)
        # The POD decides how many GCDs the partition has.
        self.current.spec = fit_to_pod(self.current.spec, pod, pods_by_size if server.missing else None)
        self._stopping.check()  # From here on machines start, and cannot be stopped before they have started.
        under_way = partition.prepare()
        resources.publish(partition)
        layout = self.current.spec.layout
        what = f"{number_of(layout.replicas, 'replica')}, {number_of(layout.instances, 'instance')}"
        where = f"a {pod.name} of its own" if server.own else f"{pod.name}, server {server.address}"
        self.log.progress(f"{what}; partition {partition.name} on {where}")
        if not under_way:
            partition.wait_active()
            self._status.started()
        return partition.address(), under_way

    def _watch_partition(self) -> None:
        """Wait for the partition while instances start; end them if the partition fails."""
        partition = present(self.partition, "a launch that waits for a partition has one")
        supervisor = present(self.supervisor, "instances start before their partition is waited for")
        started, again = time.monotonic(), bool(self.starts)

        def watch() -> None:
            try:
                partition.wait_again() if again else partition.wait_active()
                took = time.monotonic() - started
                note_moment("machines are up")
                self.log.progress(f"partition {partition.name} is active after {took:.1f} s")
                self._status.started()
            except LaunchOverError:
                return
            except PodrunError as error:
                supervisor.notify_error(error)

        threading.Thread(target=watch, name="podrun-partition-watch", daemon=True).start()

    def _on_signal(self, number: int) -> None:
        self.ending.signalled = min(self.ending.signalled, time.time())
        if self.supervisor is not None:
            self.supervisor.notify_signal(number)

    def _cancel(self) -> None:
        """Cancel blocked background work."""
        if self.partition is not None:
            self.partition.cancel()
