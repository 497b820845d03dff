"""What `weak_scaling.py` runs under podrun: steps of a small network, timed. Instance 0 prints one line of JSON.

podrun --num-replicas 16 benchmarks/weak_scaling_step.py digits
"""

from __future__ import annotations

import getpass
import json
import os
import statistics
import sys
import time

import mlp
import psutil

from podrun.device.connection import AttachRequest
from podrun.device.host.connecting import connect
from podrun.partition.client.vipu_client import VipuClient
from podrun.popdist.core import layout

NETWORKS = {"digits": ((64, 128, 10), 32), "784-512-512-10": ((784, 512, 512, 10), 32)}
LEAST, MOST = 12, 100


def main() -> None:
    """Load, warm up, step, print."""
    mlp.SIZES, mlp.BATCH = NETWORKS[sys.argv[1]]
    here = layout()
    assert here is not None, "run this under podrun"
    mlp.RATE = 0.2 / here.total_replicas  # Gradients are summed over replicas.
    connection = connect(os.environ)
    request = AttachRequest(here.job, here.ipus, os.getpid(), getpass.getuser(), sys.argv[0])
    refusal = connection.try_attach(request)
    if refusal is not None:
        sys.exit(refusal)
    began = time.perf_counter()
    connection.load(mlp.executable(here.total_replicas))
    connection.write_variables(mlp.weights())
    data = mlp.inputs(here.part.local_replicas)
    losses = [float(connection.run(1, data).anchors["loss"].mean()) for _ in range(2)]
    ready = time.perf_counter() - began
    taken = []
    # All instances have to take equally many steps, so their number follows from the size, not from the clock.
    for _ in range(max(LEAST, MOST * 4 // here.total_replicas)):
        begin = time.perf_counter()
        losses.append(float(connection.run(1, data).anchors["loss"].mean()))
        taken.append(time.perf_counter() - begin)
    if not losses[-1] < losses[0]:
        sys.exit(f"the network does not learn: {losses}")
    if here.part.first_replica == 0:
        print(json.dumps(figures(here.total_replicas, taken, ready)), flush=True)
    connection.close()


def figures(replicas: int, taken: list[float], ready: float) -> dict[str, float | int]:
    """Times, and what the machines' processes take of the host."""
    with VipuClient(os.environ["IPUOF_VIPU_API_HOST"], int(os.environ["IPUOF_VIPU_API_PORT"])) as client:
        reports = client.machine_reports(os.environ["IPUOF_VIPU_API_PARTITION_ID"])
    processes = {report.pid for report in reports}
    memory = sum(psutil.Process(pid).memory_full_info().pss for pid in processes)
    step = statistics.median(taken)
    return {
        "replicas": replicas,
        "machines": len(reports),
        "processes": len(processes),
        "load_s": round(ready, 2),
        "step_ms": round(step * 1e3, 3),
        "us_per_sample": round(step * 1e6 / (replicas * mlp.BATCH), 3),
        "machines_mb": round(memory / 1e6),
    }


if __name__ == "__main__":
    main()
