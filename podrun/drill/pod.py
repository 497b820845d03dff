"""The POD of a drill: a partition service with machines in threads of this process, and jobs that ``podrun`` launches.

All of it lies in a runtime directory of its own, so that tools which are pointed there see this POD and no other. The
service conceals which faults are planned and have struck: what tools show is what they would show of a real fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from podrun.core.cluster_file import load_cluster
from podrun.core.environment import IPUOF_VIPU_API_PARTITION_ID, PODRUN_RUNTIME_DIR, pass_on
from podrun.core.errors import DeadlineError, PodrunError, ServiceError
from podrun.core.telemetry import ControlEvent, MachineReport
from podrun.drill.scenario import JOBS, DrillJob, DrillScenario
from podrun.faults import FaultSpec, PlanOfALaunch
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.host.discovery import VIPU_SERVER, Registry, ServiceEntry, own_process_id
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.records import ITSELF, Asker
from podrun.partition.state.store import Store
from podrun.partition.state.values import AgentInfo, PartitionInfo, PartitionState, Requirements

START_S = 180.0
"""Longest wait for a partition and for a job's first batches."""
POLL_S = 0.2
END_S = 20.0
JOB_FAULTS = "job-faults"
"""File of the drill's directory with faults that strike in instances."""


class DrillService(Service):
    """A service that conceals faults, and may answer late. ``delay_s``: seconds before lists of partitions and
    agents."""

    delay_s = 0.0

    def machine_reports(self, name: str = "", *, asker: Asker = ITSELF) -> list[MachineReport]:
        """Reports without planned faults and strikes."""
        reports = super().machine_reports(name, asker=asker)
        return [replace(report, planned_faults=(), struck_faults=()) for report in reports]

    def strikes(self, name: str) -> int:
        """How many faults have struck a partition."""
        return sum(len(report.struck_faults) for report in super().machine_reports(name))

    def partitions(self) -> list[PartitionInfo]:
        """Late, if the drill wants that."""
        time.sleep(self.delay_s)
        return super().partitions()

    def agents(self) -> list[AgentInfo]:
        """Late, if the drill wants that."""
        time.sleep(self.delay_s)
        return super().agents()


class DrillPod:
    """A running drill. ``directory``: its runtime directory. ``environ``: of the jobs, completed here."""

    def __init__(self, scenario: DrillScenario, directory: Path, environ: Mapping[str, str]) -> None:
        self.scenario, self.directory = scenario, directory
        self._environ = {**environ, PODRUN_RUNTIME_DIR: str(directory)}
        self._environ.pop(IPUOF_VIPU_API_PARTITION_ID, None)
        pass_on(PODRUN_RUNTIME_DIR, str(directory))  # The machines and the service keep their secret there.
        cluster = load_cluster(scenario.pod)
        pool = LocalMachinePool(cluster, keep_spares=True)
        self.service = DrillService(cluster, Store(None, scenario.pod), pool, heartbeats=True)
        self.port = self.service.start("127.0.0.1", 0)
        self._published = Registry(directory).publish(
            ServiceEntry(VIPU_SERVER, "127.0.0.1", self.port, own_process_id(), scenario.pod)
        )
        self.client = VipuClient("127.0.0.1", self.port, timeout=60)
        self._jobs: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: dict[str, int] = {}
        self._faults: dict[str, list[FaultSpec]] = {}

    def start(self, say: Callable[[str], None]) -> None:
        """Create partitions, launch jobs, and wait until all work. Raises DeadlineError, ServiceError."""
        for job in self.scenario.jobs:
            self.client.create_partition(Requirements(job.partition, job.size))
        for job in self.scenario.jobs:
            self.client.wait_for_state(job.partition, {PartitionState.ACTIVE}, deadline=START_S)
            self._launch(job)
            say(f"partition {job.partition}: {job.size} IPUs, output in {self.log(job.partition)}")
        end = time.monotonic() + START_S
        while not all(self.batches(job.partition) > 0 for job in self.scenario.jobs):
            if ended := self.ended_jobs():
                output = self.log(ended[0]).read_text(errors="replace").strip().splitlines()
                raise ServiceError(
                    f"the job of partition {ended[0]} ended at its start: {output[-1] if output else ''}",
                    hint=f"See {self.log(ended[0])}",
                )
            if time.monotonic() > end:
                raise DeadlineError(
                    f"the jobs do not work after {START_S:.0f} s", hint="Try again on an idle host."
                )
            time.sleep(POLL_S)

    def log(self, partition: str) -> Path:
        """The output of a partition's job."""
        return self.directory / f"{partition}.log"

    def _launch(self, job: DrillJob) -> None:
        own = job.program in JOBS
        program = Path(__file__).parent / "jobs" / "train.py" if own else Path(job.program)
        words = [sys.executable, "-m", "podrun", "--vipu-server-host", "127.0.0.1", "--vipu-server-port"]
        words += [str(self.port), "--vipu-partition", job.partition, "--num-replicas", str(job.replicas)]
        words += ["--num-instances", str(job.instances), *job.options, str(program)]
        if own:
            words += ["--checkpoints", str(self.directory / f"{job.partition}-checkpoints")]
            words += ["--hold"] if job.program == "hold" else []
        environ = dict(self._environ)
        if self.scenario.job_faults and job is self.scenario.jobs[0]:
            environ["DRILL_FAULTS"] = str(self.directory / JOB_FAULTS)
            (self.directory / JOB_FAULTS).touch()
        with self.log(job.partition).open("wb") as output:
            self._jobs[job.partition] = subprocess.Popen(
                [*words, *job.arguments], stdout=output, stderr=subprocess.STDOUT, env=environ,
                stdin=subprocess.DEVNULL, start_new_session=True, cwd=self.directory,
            )  # fmt: skip

    def batches(self, partition: str) -> int:
        """Batches that the slowest machine of a partition has done."""
        return min((r.batches_done for r in self.service.machine_reports(partition)), default=0)

    def break_it(self) -> None:
        """Plan the faults, queue the requests, slow the service down."""
        self._begun = {job.partition: len(self._events(job.partition)) for job in self.scenario.jobs}
        for partition, fault in self.scenario.faults:
            self.service.inject_faults(partition, [fault])
        if self.scenario.job_faults:
            PlanOfALaunch(self.directory / JOB_FAULTS).write(self.scenario.job_faults)
        for name, size in self.scenario.requests:
            self.client.create_partition(Requirements(name, size), wait=True)
        self._begun = {job.partition: len(self._events(job.partition)) for job in self.scenario.jobs}
        self.service.delay_s = self.scenario.service_delay_s

    def has_struck(self) -> bool:
        """Whether every fault has struck that strikes on machines. A machine that is lost tells of no strike."""
        ended, changes = self.ended_jobs(), self.changes()
        return all(
            self.service.strikes(partition)
            or partition in ended
            or any(event.did == "machine lost" for event in changes[partition])
            for partition, _ in self.scenario.faults
        )

    def _events(self, partition: str) -> tuple[ControlEvent, ...]:
        return self.service.control_log.of(partition)

    def changes(self) -> dict[str, list[ControlEvent]]:
        """What was done to each partition since `break_it`."""
        return {name: list(self._events(name)[begun:]) for name, begun in self._begun.items()}

    def ended_jobs(self) -> list[str]:
        """Partitions whose job has ended."""
        return [partition for partition, job in self._jobs.items() if job.poll() is not None]

    def is_healthy(self) -> bool:
        """Whether nothing is broken, as ``podrun health`` sees it."""
        from podrun.monitor.pod_health import examine_pod

        try:
            return examine_pod(self.client, time.time()).healthy
        except PodrunError:
            return False

    def stop(self) -> None:
        """End jobs, service and machines."""
        self.service.delay_s = 0.0
        _end_all(self._jobs.values())
        self._published.withdraw()
        self.client.close()
        self.service.stop(grace=0)


def _end_all(jobs: Iterable[subprocess.Popen[bytes]]) -> None:
    running = [job for job in jobs if job.poll() is None]
    for job in running:
        os.killpg(job.pid, signal.SIGTERM)
    end = time.monotonic() + END_S
    for job in running:
        try:
            job.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
