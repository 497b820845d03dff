"""A training step of TensorFlow programs on IPUs against plain TensorFlow on the same cores, in one run.

    python benchmarks/tensorflow_step.py [--json FILE] [--rounds N] [--match NAME]

``step``: ResNet-18 (batch 16 of 64x64x3), BERT-tiny (4 sentences of 128 tokens) and 784-512-512-10 (batch 128) with
plain descent, in a loop of version 1 with an infeed; and the last one with 16 replicas of 32 samples against one plain
process with all 512 (``mlp16_ratio``). A worker process for each side takes turns with the other, a few steps each;
TensorFlow has ``--threads`` threads. Each ratio is that of the medians; ``..._cpu_ratio`` is that of processor times.
Losses of the first steps must agree, or the run fails. ``mlp16_limit_ms``: the large products, sums and updates of the
four machines of 16 replicas by bare calls in as many processes (`bare_step`), in the same turns.

``first_step_cold_s`` and ``first_step_cached_s``: seconds from the end of TensorFlow's own import to the first loss of
784-512-512-10, in a fresh process with empty caches, and in another with what the first has left.
``trace_resnext101_s``: seconds to trace ResNeXt-101 for inference and read it into the runtime's graph.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bare_step import bare_steps
from short_mode import add_short

STEPS, CHECKED, ROUNDS = 5, 2, 5
TOLERANCE = 2e-3
"""Difference of the first losses over the loss."""
RATE = 0.001
REPLICAS = {"mlp16": 16}
IPUS_PER_MACHINE, SAMPLES = 4, 32
"""Replicas of a machine, and samples of a replica, of the networks with replicas."""


def _imported() -> tuple[Any, Any]:
    """TensorFlow of version 1, and the SDK's part of it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    tf.compat.v1.disable_v2_behavior()
    return tf.compat.v1, tf


def _plain(name: str, threads: int) -> Any:
    tf, _ = _imported()
    from tensorflow_networks import NETWORKS

    network = NETWORKS[name]
    samples = network.samples(REPLICAS.get(name, 1))
    x, y = (tf.constant(v) for v in samples)
    loss = network.loss(x, y)
    with tf.control_dependencies([tf.train.GradientDescentOptimizer(RATE).minimize(loss)]):
        result = tf.identity(loss)
    options = {"intra_op_parallelism_threads": threads, "inter_op_parallelism_threads": threads}
    session = tf.Session(config=tf.ConfigProto(**options))
    session.run(tf.global_variables_initializer())
    return lambda count: [float(session.run(result)) for _ in range(count)]


def _ours(name: str, threads: int) -> Any:
    tf, module = _imported()
    from podrun.compat._tensorflow import add_sdk

    add_sdk(module)
    from tensorflow.python import ipu
    from tensorflow_networks import NETWORKS

    network, replicas = NETWORKS[name], REPLICAS.get(name, 1)
    x, y = network.samples(replicas)
    parts = [v.reshape(replicas, -1, *v.shape[1:]) for v in (x, y)]
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(
        tf.data.Dataset.from_tensor_slices(tuple(parts)).repeat(), prefetch_depth=16
    )
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def step(images: Any, labels: Any) -> Any:
        loss = network.loss(images, labels)
        optimizer = tf.train.GradientDescentOptimizer(RATE)
        if replicas > 1:
            optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
        with tf.control_dependencies([optimizer.minimize(loss)]):
            return outfeed.enqueue(loss)

    count = tf.placeholder(tf.int32, [])
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = replicas
    config.configure_ipu_system()
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        run = ipu.ipu_compiler.compile(
            lambda n: ipu.loops.repeat(n, step, infeed_queue=infeed), inputs=[count]
        )
    dequeued = outfeed.dequeue()
    session = tf.Session()
    session.run(tf.global_variables_initializer())
    session.run(infeed.initializer)

    def steps(wanted: int) -> list[float]:
        session.run(run, {count: wanted})
        losses = session.run(dequeued)
        return [float(v.mean()) for v in losses]

    return steps


def work(side: str, name: str, threads: int) -> None:
    """A worker: for each line of standard input as many steps as it says; the answer is seconds and losses."""
    step = _plain(name, threads) if side == "tensorflow" else _ours(name, threads)
    for line in sys.stdin:
        start, spent = time.perf_counter(), time.process_time()
        losses = step(int(line))
        times = [(time.perf_counter() - start) / int(line), (time.process_time() - spent) / int(line)]
        print("@" + json.dumps([times, losses]), flush=True)


def first_step() -> None:
    """In a fresh process: seconds from TensorFlow's import to the first loss."""
    _imported()
    start = time.perf_counter()
    losses = _ours("mlp", 2)(1)
    print("@" + json.dumps([time.perf_counter() - start, losses]))


def trace() -> None:
    """In a fresh process: seconds to trace ResNeXt-101 and read it."""
    tf, module = _imported()
    from podrun.compat._tensorflow import add_sdk

    add_sdk(module)
    from tensorflow.python import ipu
    from tensorflow_networks import Options, resnext101

    Options.plain = True

    x = tf.placeholder(tf.float32, [1, 224, 224, 3])
    start = time.perf_counter()
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        ipu.ipu_compiler.compile(resnext101, [x])
    print("@" + json.dumps([time.perf_counter() - start, []]))


class Worker:
    """A process that takes steps."""

    def __init__(self, side: str, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", side, "--match", name, "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def steps(self, count: int) -> tuple[tuple[float, float], list[float]]:
        """Seconds and seconds of the cores of a step, and losses, of so many steps."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("@["):
                (seconds, spent), losses = json.loads(line[1:])
                return (seconds, spent), losses
        raise SystemExit(f"a worker ended with code {self.process.wait()}")

    def end(self) -> None:
        """Let the process go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def measure(name: str, rounds: int, threads: int) -> dict[str, float]:
    """Medians of both sides, and the ratio of ours to TensorFlow's."""
    sides = {side: Worker(side, name, threads) for side in ("tensorflow", "podrun")}
    first = {side: worker.steps(CHECKED)[1] for side, worker in sides.items()}
    for ours, theirs in zip(first["podrun"], first["tensorflow"], strict=True):
        if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
            raise SystemExit(f"{name}: losses differ: {first}")
    for worker in sides.values():
        worker.steps(STEPS)
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    bounds: list[float] = []
    replicas = REPLICAS.get(name, 0)
    machines = replicas // IPUS_PER_MACHINE
    samples = IPUS_PER_MACHINE * SAMPLES
    with bare_steps(machines, samples, STEPS) if machines else nullcontext() as bare:
        for _ in range(rounds):
            for side, worker in sides.items():
                seconds[side].append(worker.steps(STEPS)[0])
            bounds += [bare()] if bare is not None else []
    for worker in sides.values():
        worker.end()
    medians = {side: statistics.median(wall for wall, _ in times) for side, times in seconds.items()}
    spent = {side: statistics.median(cores for _, cores in times) for side, times in seconds.items()}
    figures = {f"{name}_{side}_ms": median * 1e3 for side, median in medians.items()}
    figures |= {f"{name}_{side}_cpu_ms": median * 1e3 for side, median in spent.items()}
    if bounds:
        limit = statistics.median(bounds)
        figures |= {f"{name}_limit_ms": limit * 1e3, f"{name}_step_vs_limit": medians["podrun"] / limit}
        figures[f"{name}_limit_vs_tensorflow"] = limit / medians["tensorflow"]
    figures[f"{name}_cpu_ratio"] = spent["podrun"] / spent["tensorflow"]
    return figures | {f"{name}_ratio": medians["podrun"] / medians["tensorflow"]}


def alone(kind: str, cache: str, bytecode: str = "") -> float:
    """What a fresh process measures, with podrun's caches in a folder. ``bytecode``: where Python keeps its own."""
    command = [sys.executable, __file__, "--worker", kind]
    environment = {**os.environ}
    if cache:
        environment |= {"TF_POPLAR_FLAGS": f"--executable_cache_path={cache}", "PODRUN_CACHE_DIR": cache}
    if bytecode:
        environment |= {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if not lines:
        raise SystemExit(done.stderr)
    return float(json.loads(lines[0][1:])[0])


def main() -> None:
    """Measure, print a line for each network, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--match", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--worker", choices=("tensorflow", "podrun", "first", "trace"), help=argparse.SUPPRESS
    )
    add_short(parser, match="mlp", rounds=2)
    asked = parser.parse_args()
    if asked.worker in ("first", "trace"):
        first_step() if asked.worker == "first" else trace()
        return
    if asked.worker:
        work(asked.worker, asked.match, asked.threads)
        return
    figures = step_figures(asked)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")


def first_step_figures() -> dict[str, float]:
    """Seconds to the first step with empty caches and with full ones. Python has bytecode, as of installed modules."""
    with tempfile.TemporaryDirectory() as folder:
        caches, bytecode = (os.path.join(folder, name) for name in ("caches", "bytecode"))
        alone("first", os.path.join(folder, "others"), bytecode)
        return {f"first_step_{name}_s": alone("first", caches, bytecode) for name in ("cold", "cached")}


def step_figures(asked: argparse.Namespace) -> dict[str, float]:
    """All networks that match, the geometric mean of those without replicas, and what fresh processes measure."""
    figures: dict[str, float] = {}
    for name in ("resnet18", "bert_tiny", "mlp", "mlp16"):
        if asked.match not in name:
            continue
        results = measure(name, asked.rounds, asked.threads)
        print({key: round(value, 3) for key, value in results.items()}, flush=True)
        figures |= results
    ratios = [
        v for k, v in figures.items() if k.endswith("_ratio") and "cpu" not in k and not k.startswith("mlp16")
    ]
    if ratios:
        figures["geometric_mean_ratio"] = math.exp(statistics.fmean(map(math.log, ratios)))
    if asked.match in "mlp":
        figures |= first_step_figures()
    if not asked.match:
        figures["trace_resnext101_s"] = alone("trace", "")
    print(
        {key: round(value, 3) for key, value in figures.items() if not key.startswith(("mlp", "res", "bert"))}
    )
    return figures


if __name__ == "__main__":
    main()
