"""Serves a model with Ray Serve on two nodes, loses a machine under load, and prints what came of it as JSON.

Run by `test_two_nodes` with the variables of a partition of two machines: MODEL HTTP_PORT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

import numpy as np

from podrun.core.errors import DeadlineError, PodrunError
from podrun.serving.ray import PodClient, RayServiceOptions, deployment
from tests.serving.test_runner import expected, rows_of

PARTITION = os.environ["IPUOF_VIPU_API_PARTITION_ID"]


def until(true: Any, seconds: float = 240.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.2)
    return False


def replicas(name: str) -> int:
    from ray import serve

    state = serve.status().applications["net"].deployments[name]
    return int(state.replica_states.get("RUNNING", 0))


def right(y: np.ndarray, x: np.ndarray) -> bool:
    return bool(np.allclose(y, expected(x), rtol=1e-5, atol=1e-6))


def load(client: PodClient, seconds: float, threads: int, counts: Counter[str]) -> None:
    """Ask for that long; count the kinds of answers, and answers that came after their deadline."""
    end = time.monotonic() + seconds

    def work(seed: int) -> None:
        turn = 0
        while time.monotonic() < end:
            x = rows_of(1 + turn % 7, 1000 * seed + turn)
            begin = time.monotonic()
            try:
                kind = "right" if right(client.predict({"x": x}, 20.0, f"{seed}-{turn}")["y"], x) else "wrong"
            except PodrunError as error:
                kind = type(error).__name__
            counts[kind] += 1
            counts["late"] += time.monotonic() - begin > 25.0
            turn += 1

    workers = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(seconds + 60)


def over_http(port: int, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/net", body)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def main() -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    model, port = sys.argv[1], int(sys.argv[2])
    told: dict[str, Any] = {}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        options = RayServiceOptions(
            least_replicas=3, most_replicas=4, cpus=1.0, ongoing=2.0, health_seconds=2.0
        )
        handle = serve.run(deployment(model, "net", options), name="net", route_prefix="/net")
        told["replicas"] = replicas("net")
        nodes = {actor["NodeID"] for actor in _replica_actors()}
        told["nodes"] = len(nodes)
        once, again = PodClient(handle), PodClient(handle, attempts=4)
        x = rows_of(5)
        told["right"] = right(once.predict({"x": x})["y"], x)
        code, answer = over_http(port, json.dumps({"instances": x.tolist()}).encode())
        told["http"] = [code, right(np.array(answer["predictions"]), x)]
        told["http wrong"] = [over_http(port, body) for body in (b"{", b'{"instances": [["a"]]}')]
        try:
            once.predict({"x": x}, 1e-6)
        except DeadlineError:
            told["deadline"] = True
        under_load: Counter[str] = Counter()
        asking = threading.Thread(target=load, args=(again, 40.0, 12, under_load), daemon=True)
        asking.start()
        told["scaled"] = until(lambda: replicas("net") == 4, 120)
        asking.join(120)
        told["under load"] = dict(under_load)
        lost: Counter[str] = Counter()
        asking = threading.Thread(target=load, args=(once, 20.0, 4, lost), daemon=True)
        asking.start()
        time.sleep(2)
        injected = subprocess.run(
            ["podrun", "inject", PARTITION, "machine:1@batch=+5:lost"],
            capture_output=True,
            text=True,
            check=False,
        )
        told["injected"] = injected.stdout + injected.stderr
        asking.join(120)
        told["lost"] = dict(lost)
        told["again"] = until(lambda: _answers(once), 120)
        healed: Counter[str] = Counter()
        load(again, 5.0, 4, healed)
        told["healed"] = dict(healed)
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(told))


def _answers(client: PodClient) -> bool:
    try:
        return right(client.predict({"x": rows_of(2)}, 20.0)["y"], rows_of(2))
    except PodrunError:
        return False


def _replica_actors() -> list[dict[str, Any]]:
    from ray._private.state import actors  # Ray's public state API needs its dashboard.

    return [
        {"NodeID": actor["Address"]["NodeID"]}
        for actor in actors().values()
        if "IpuReplica" in str(actor.get("ActorClassName", "")) + str(actor.get("Name", ""))
        or "ServeReplica" in str(actor.get("ActorClassName", ""))
    ]


if __name__ == "__main__":
    main()
