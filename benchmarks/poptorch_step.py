"""A training step of PopTorch programs against plain torch, on the same cores, in one run.

    python benchmarks/poptorch_step.py [--json FILE] [--rounds N] [--match NAME] [--prepare]

``step``: ResNet-18 (batch 16 of 3x64x64), BERT tiny and small of transformers (4 sentences of 128 tokens) and
784-512-512-10 (batch 128), with SGD, and the last one with 16 replicas of 32 samples against one plain process with
all 512: its machines in the program's own process (``mlp16_ratio``), and launched by ``podrun --num-replicas 16``, each
in a process of its own (``mlp16_launched_ratio``). A worker process for each side takes turns with the other, a few
steps each; torch has ``--threads`` threads, and both sides the cores that this process may use. Each ratio is that of
the medians. Losses of the first steps must agree, or the run fails.

``--prepare``: instead, how long capture and compiling take of BERT-base for training on four IPUs (pipelined,
accumulation 7) and of ResNet-50, each in a fresh process with empty caches and in another with what the first
has left, and how long the capture of BERT-base takes. Python's bytecode is there, as pip leaves it: a process before
these writes it.
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
from pathlib import Path
from typing import Any

from short_mode import add_short

STEPS = 5
"""Steps of each turn."""
CHECKED = 2
"""Losses that must agree; each step multiplies the roundings of those before."""
TOLERANCE = 2e-3
"""Difference of those losses over the loss."""
RATE = 0.01
REPLICAS = {"mlp16": 16}
ROUNDS = 5


def _plain(name: str, threads: int) -> Any:
    import torch
    from poptorch_networks import NETWORKS

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = NETWORKS[name].make().train()
    samples = NETWORKS[name].samples(REPLICAS.get(name, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(*samples)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _ours(name: str) -> Any:
    import torch
    from poptorch_networks import NETWORKS

    from podrun import poptorch

    torch.manual_seed(0)
    model = NETWORKS[name].make().train()
    replicas = REPLICAS.get(name, 1)
    samples = NETWORKS[name].samples(replicas)
    options = poptorch.Options().replicationFactor(replicas)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=RATE))
    return lambda: float(training(*samples).mean())


def work(side: str, name: str, threads: int) -> None:
    """A worker: for each line of standard input as many steps as it says; the answer is times and losses."""
    step = _plain(name, threads) if side == "torch" else _ours(name)
    for line in sys.stdin:
        seconds, losses = [], []
        for _ in range(int(line)):
            start = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - start)
        print("@" + json.dumps([seconds, losses]), flush=True)


class Worker:
    """A process that takes steps."""

    def __init__(self, side: str, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", side, "--match", name, "--threads", str(threads)]
        if side == "launched":
            podrun = str(Path(sys.executable).with_name("podrun"))
            command = [podrun, f"--num-replicas={REPLICAS[name]}", *command[1:3], "podrun", *command[4:]]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def steps(self, count: int) -> tuple[list[float], list[float]]:
        """Seconds and losses of so many steps."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if "@[" in line:  # podrun writes the instance before it.
                seconds, losses = json.loads(line[line.index("@[") + 1 :])
                return seconds, losses
        raise SystemExit(f"a worker ended with code {self.process.wait()}")

    def end(self) -> None:
        """Let the process go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def measure(name: str, rounds: int, threads: int) -> dict[str, float]:
    """Medians of all sides, and the ratios of ours to torch's."""
    names = ("torch", "podrun", "launched") if name in REPLICAS else ("torch", "podrun")
    sides = {side: Worker(side, name, threads) for side in names}
    first = {side: worker.steps(CHECKED)[1] for side, worker in sides.items()}
    for side in names[1:]:
        for ours, theirs in zip(first[side], first["torch"], strict=True):
            if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
                raise SystemExit(f"{name}: losses differ: {first}")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, worker in sides.items():
            seconds[side] += worker.steps(STEPS)[0]
    for worker in sides.values():
        worker.end()
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    found = {f"{name}_{side}_ms": median * 1e3 for side, median in medians.items()}
    found[f"{name}_ratio"] = medians["podrun"] / medians["torch"]
    if "launched" in medians:
        found[f"{name}_launched_ratio"] = medians["launched"] / medians["torch"]
    return found


def prepare_one(name: str) -> None:
    """In a fresh process: prepare a model; prints seconds of capture, of everything, and processor seconds."""
    import torch

    sys.modules["poptorch"] = __import__("podrun.poptorch", fromlist=["poptorch"])
    import poptorch
    from poptorch_networks import NETWORKS, bert_base_on_four_ipus, resnet50

    from podrun.poptorch.executor import executor
    from podrun.poptorch.operators import table  # noqa: F401  JAX's import is no part of preparing.

    torch.manual_seed(0)
    if name == "mlp":
        model, samples = NETWORKS[name].make(), NETWORKS[name].samples(1)
    else:
        model, samples = bert_base_on_four_ipus() if name == "bert_base" else resnet50()
    options = poptorch.Options()
    options.enableExecutableCaching(os.environ["PODRUN_CACHE_DIR"])
    if name == "bert_base":
        options.Training.gradientAccumulation(7)
        samples = tuple(each.repeat(7, *[1] * (each.dim() - 1)) for each in samples)
    captures = []
    original = executor.capture_module

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        made = original(*args)
        captures.append(time.perf_counter() - start)
        return made

    executor.capture_module = timed
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=RATE))
    start, processor = time.perf_counter(), time.process_time()
    training.compile(*samples)
    print("@" + json.dumps([captures[0], time.perf_counter() - start, time.process_time() - processor]))


def prepare(match: str) -> dict[str, float]:
    """Seconds that models take from a torch module to a loaded program."""
    made = {}
    for name in ("bert_base", "resnet50"):
        if match not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            caches, bytecode = (os.path.join(folder, kind) for kind in ("caches", "bytecode"))
            prepare_alone("mlp", os.path.join(folder, "others"), bytecode)
            for state in ("cold", "cached"):
                seconds = prepare_alone(name, caches, bytecode)
                names = (f"{name}_{state}_{what}_s" for what in ("capture", "whole", "cpu"))
                made.update(zip(names, seconds, strict=True))
                print({k: round(v, 2) for k, v in made.items() if f"{name}_{state}" in k}, flush=True)
    return made


def prepare_alone(name: str, caches: str, bytecode: str) -> list[float]:
    """What `prepare_one` measures in a fresh process. ``bytecode``: where Python keeps its own."""
    os.makedirs(caches, exist_ok=True)
    environment = os.environ | {"PODRUN_CACHE_DIR": caches, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--worker", "prepare", "--match", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
    if not lines:
        raise SystemExit(done.stderr)
    seconds: list[float] = json.loads(lines[0][1:])
    return seconds


def main() -> None:
    """Measure, print a line for each network, write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--match", default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--worker", choices=("torch", "podrun", "prepare"), help=argparse.SUPPRESS)
    add_short(parser, match="mlp", rounds=2)
    asked = parser.parse_args()
    if asked.worker == "prepare":
        prepare_one(asked.match)
        return
    if asked.worker:
        work(asked.worker, asked.match, asked.threads)
        return
    figures = prepare(asked.match) if asked.prepare else step_figures(asked)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")


def step_figures(asked: argparse.Namespace) -> dict[str, float]:
    """All networks that match, and the geometric mean of those without replicas."""
    figures: dict[str, float] = {}
    for name in ("resnet18", "bert_tiny", "bert_small", "mlp", "mlp16"):
        if asked.match not in name:
            continue
        found = measure(name, asked.rounds, asked.threads)
        print({key: round(value, 3) for key, value in found.items()}, flush=True)
        figures |= found
    ratios = [v for k, v in figures.items() if k.endswith("_ratio") and not k.startswith("mlp16")]
    if ratios:
        figures["geometric_mean_ratio"] = math.exp(statistics.fmean(map(math.log, ratios)))
        print({"geometric_mean_ratio": round(figures["geometric_mean_ratio"], 3)})
    return figures


if __name__ == "__main__":
    main()
