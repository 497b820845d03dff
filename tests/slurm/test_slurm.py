"""Prolog, epilog and GRES of examples/slurm against a real slurmctld and slurmd of this host: `make test-slurm`.

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. Everything lives in a directory of its own.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPTS = ROOT / "examples/slurm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.system,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))),
        reason="needs root, slurmctld, slurmd, slurm-client and munge",
    ),
]
PATIENCE_S = 60.0
CONFIG = """
ClusterName=podrun
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=ipu
PrologSlurmctld={home}/prolog.sh
EpilogSlurmctld={home}/epilog.sh
TaskProlog={home}/task_prolog.sh
NodeName={host} CPUs=2 RealMemory=500 Gres=ipu:16 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Slurm:
    """One host's Slurm, and a V-IPU server of a POD16 that it hands out."""

    def __init__(self, home: Path) -> None:
        self.home, self.daemons = home, list[subprocess.Popen[bytes]]()
        bin_directory = Path(sys.executable).parent
        self.environ = {
            **os.environ,
            "PATH": f"{bin_directory}:{os.environ['PATH']}",
            "SLURM_CONF": str(home / "slurm.conf"),
            "PODRUN_RUNTIME_DIR": str(home / "run"),
            "XDG_STATE_HOME": str(home / "podrun-state"),
        }
        self.server = self._server(0)
        settings = f"""export PATH={bin_directory}:/usr/local/bin:/usr/bin:/bin
export SLURM_CONF={home}/slurm.conf PODRUN_RUNTIME_DIR={home}/run XDG_STATE_HOME={home}/podrun-state
export VIPU_CLI_API_HOST=127.0.0.1 VIPU_CLI_API_PORT={self.port} PODRUN_SLURM_TIMEOUT=30
"""
        for script in ("partition.sh", "prolog.sh", "epilog.sh", "task_prolog.sh"):
            shutil.copy(SCRIPTS / script, home)
        (home / "settings.env").write_text(settings)
        host = socket.gethostname().partition(".")[0]
        config = CONFIG.format(home=home, host=host, controller=free_port(), node=free_port())
        (home / "slurm.conf").write_text(config)
        (home / "gres.conf").write_text("Name=ipu Count=16\n")
        key = home / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        for directory in ("state", "spool"):
            (home / directory).mkdir()
        munge = [
            f"--{name}={home}/munge.{name.split('-')[0]}"
            for name in ("socket", "log-file", "pid-file", "seed-file")
        ]
        self.munge, self.host = [f"--key-file={key}", *munge], host

    def start(self) -> None:
        """Start munged, slurmctld and slurmd."""
        self._start("munged", "--foreground", "--force", *self.munge)
        self.wait(lambda: (self.home / "munge.socket").exists(), "munged answers")
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D", "-N", self.host)
        self.wait(lambda: " idle" in self.run("sinfo", "--noheader", "--format= %T"), "the node is up")

    def _start(self, *words: str) -> None:
        log = (self.home / f"{words[0]}.out").open("wb")
        with log:
            self.daemons.append(subprocess.Popen(words, env=self.environ, stdout=log, stderr=log))

    def _server(self, port: int) -> subprocess.Popen[bytes]:
        words = [
            sys.executable,
            "-m",
            "podrun.partition.commands.vipu_server",
            "--cluster=pod16",
            f"--port={port}",
            "--in-process",
        ]
        process = subprocess.Popen(words, env=self.environ, stdout=subprocess.PIPE)
        assert process.stdout is not None
        self.port = int(process.stdout.readline().decode().rpartition(":")[2])
        return process

    def restart_server(self) -> None:
        """Start the V-IPU server again at its port."""
        self.server = self._server(self.port)

    def run(self, *words: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            words, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def vipu(self, *words: str) -> str:
        """What `vipu-admin` prints."""
        command = [
            sys.executable,
            "-m",
            "podrun.partition.commands.vipu_admin",
            "--api-host=127.0.0.1",
            f"--api-port={self.port}",
        ]
        return self.run(*command, *words)

    def partitions(self) -> set[str]:
        """Names of the partitions that jobs have."""
        lines = self.vipu("list", "partitions").splitlines()
        return {words[0] for line in lines if (words := line.split()) and words[0].startswith("slurm_")}

    def submit(self, script: str, *options: str) -> str:
        """Submit a job; its number."""
        said = self.run(
            *(
                "sbatch",
                "--parsable",
                "--requeue",
                f"--output={self.home}/job-%j.out",
                *options,
                "--wrap",
                script,
            )
        )
        assert said.strip().isdigit(), said
        return said.strip()

    def output(self, job: str) -> str:
        """What a job has printed."""
        path = self.home / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def state(self, job: str) -> str:
        """The state of a job."""
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").strip()

    def hurry(self, job: str) -> None:
        """Slurm lets a job that was queued again wait for two minutes."""
        self.run("scontrol", "release", job)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE_S) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + patience
        while not condition():
            if time.monotonic() > end:
                logs = [*self.home.glob("*.log"), *self.home.glob("*.out")]
                tails = "\n".join(
                    f"--- {p.name}\n" + "\n".join(p.read_text().splitlines()[-25:]) for p in logs
                )
                raise AssertionError(f"waited {patience:g} s until {what}\n{tails}")
            time.sleep(0.2)

    def close(self) -> None:
        """End everything."""
        self.run("scancel", "--user=root")
        for process in [*reversed(self.daemons), self.server]:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.close()


PRINT = "srun sh -c 'echo partition $IPUOF_VIPU_API_PARTITION_ID'"


def test_a_job_gets_a_partition_and_gives_it_back(slurm: Slurm) -> None:
    job = slurm.submit(f"{PRINT}; sleep 2", "--gres=ipu:8")
    plain = slurm.submit("echo none")
    slurm.wait(lambda: f"partition slurm_{job}" in slurm.output(job), "the job knows its partition")
    assert slurm.partitions() == {f"slurm_{job}"}
    slurm.wait(lambda: slurm.state(job) == "COMPLETED", "the job ends")
    slurm.wait(lambda: slurm.partitions() == set(), "the partition is removed")
    slurm.wait(lambda: slurm.state(plain) == "COMPLETED", "a job without IPUs ends")


def test_a_job_whose_prolog_fails_is_queued_again_and_runs_later(slurm: Slurm) -> None:
    slurm.vipu("create", "partition", "other", "--size=16")
    job = slurm.submit(PRINT, "--gres=ipu:8")
    log = slurm.home / "podrun-slurm.log"
    slurm.wait(lambda: f"job {job}: no partition of 8 IPUs" in log.read_text(), "the prolog is refused")
    slurm.wait(lambda: slurm.state(job) == "PENDING", "the job is queued again")
    assert "other (16 IPUs since" in log.read_text()
    assert slurm.partitions() == set()
    slurm.vipu("remove", "partition", "other")
    slurm.hurry(job)
    slurm.wait(lambda: f"partition slurm_{job}" in slurm.output(job), "the job runs after all")
    slurm.wait(lambda: slurm.partitions() == set(), "the partition is removed")


def test_a_partition_that_an_epilog_left_is_removed_by_the_next_job(slurm: Slurm) -> None:
    job = slurm.submit("sleep 600", "--gres=ipu:4")
    slurm.wait(lambda: slurm.partitions() == {f"slurm_{job}"}, "the job has its partition")
    slurm.server.terminate()  # The server is away while the job ends: its epilog fails.
    slurm.server.wait(30)
    slurm.run("scancel", job)
    log = slurm.home / "podrun-slurm.log"
    slurm.wait(
        lambda: f"job {job}: partition slurm_{job} is not removed (attempt 3)" in log.read_text(),
        "it gives up",
    )
    slurm.restart_server()
    assert slurm.partitions() == {f"slurm_{job}"}
    other = slurm.submit(PRINT, "--gres=ipu:16")
    slurm.wait(lambda: f"partition slurm_{other}" in slurm.output(other), "the next job has all IPUs")
    assert f"partition slurm_{job} belongs to no job that runs" in log.read_text()
    slurm.wait(lambda: slurm.partitions() == set(), "nothing is left")


def test_a_job_that_starts_twice_keeps_its_partition(slurm: Slurm) -> None:
    job = slurm.submit("sleep 600", "--gres=ipu:4")
    slurm.wait(lambda: slurm.partitions() == {f"slurm_{job}"}, "the job has its partition")
    before = slurm.vipu("get", "partition", f"slurm_{job}")
    again = subprocess.run(
        [slurm.home / "prolog.sh"], env={**slurm.environ, "SLURM_JOB_ID": job}, timeout=60, check=False
    )
    assert again.returncode == 0
    assert slurm.vipu("get", "partition", f"slurm_{job}") == before
    slurm.run("scancel", job)
    slurm.wait(lambda: slurm.partitions() == set(), "the partition is removed")
    late = subprocess.run(
        [slurm.home / "epilog.sh"], env={**slurm.environ, "SLURM_JOB_ID": job}, timeout=60, check=False
    )
    assert late.returncode == 0  # What is gone is no error.


def test_a_drain_in_the_middle_ends_the_job_and_the_next_waits_for_the_agents(slurm: Slurm) -> None:
    job = slurm.submit("sleep 600", "--gres=ipu:16")
    slurm.wait(lambda: slurm.partitions() == {f"slurm_{job}"}, "the job has its partition")
    slurm.vipu("drain", "agent", "ipum1", "--deadline=1", "--reason=test")
    slurm.wait(lambda: slurm.partitions() == set(), "the drain removes the partition")
    slurm.run("scancel", job)
    next_job = slurm.submit(PRINT, "--gres=ipu:16")
    log = slurm.home / "podrun-slurm.log"
    slurm.wait(lambda: "agents out of service: ipum1" in log.read_text(), "the prolog is refused")
    slurm.vipu("return", "agent", "ipum1")
    slurm.wait(lambda: slurm.state(next_job) == "PENDING", "the job is queued again")
    slurm.hurry(next_job)
    slurm.wait(lambda: f"partition slurm_{next_job}" in slurm.output(next_job), "the job runs after all")
    slurm.wait(lambda: slurm.partitions() == set(), "nothing is left")
