"""Random small training programs for PopART, and what they must compute, in float64 NumPy.

`Program(seed)` draws operators (`generated_operators`), loss, optimizer, accumulation, replicas, placement and
recomputation. `Program.ours` runs it in a session; `Program.reference` runs the same from the operators' definitions:
gradients are central differences, updates are `optimizer_references`. As a script it goes through seeds for as long as
it is told:

    python -m tests.popart.generated_training --seconds 600 --first 0
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import podrun.popart as popart
from tests.popart.generated_operators import (
    IMAGES,
    ROWS,
    Model,
    Random,
    Values,
    Weights,
    convolved,
    gemm,
    loss_of,
    matmul,
    unary,
)
from tests.popart.optimizers import optimizer_references as references

STEPS, STEP = 3, 1e-5
"""Runs of a program, and the step of central differences."""
IDLE = 1e-7
"""Gradients below it are rounding. LAMB makes steps of whole length of them, in any direction."""


@dataclass
class Rule:
    """An optimizer on both sides. ``scale``: its loss scaling; ``scaled``: what it clips is multiplied by it."""

    ours: popart.Optimizer
    theirs: Callable[[np.ndarray, Iterator[np.ndarray]], Iterator[np.ndarray]]
    scale: float
    bound: float | None
    words: str
    scaled: bool = True


def rule_of(random: Random) -> Rule:
    def pick(*choices: Any) -> Any:
        return choices[random.integers(len(choices))]

    const, scale = bool(pick(0, 1)), float(pick(1.0, 8.0, 1024.0))
    lr, wd = pick(0.05, 0.01), pick(0.0, 0.1)
    values = {
        "defaultLearningRate": (lr, const),
        "defaultWeightDecay": (wd, const),
        "lossScaling": (scale, const),
    }
    kind = pick("sgd", "momentum", "adam", "adaptive")
    bound = pick(None, 0.3) if kind in ("sgd", "adam") else None
    clip = [popart.ClipNormSettings.clipAllWeights(bound)] if bound else []
    l2 = bool(pick(0, 1))
    mode = popart.WeightDecayMode.L2Regularization if l2 else popart.WeightDecayMode.Decay
    words = f"{kind} {values} clip {bound}"
    if kind == "sgd":
        dm = pick(0.0, 0.2)
        ours = popart.SGD(values | {"defaultDampening": (dm, const)}, clip)
        return Rule(
            ours, lambda w, g: references.sgd(w, g, lr=lr, wd=wd, dm=dm), scale, bound, words + f" dm {dm}"
        )
    if kind == "momentum":
        mm, vs, nesterov = pick(0.9, 0.5), pick(1.0, 4.0), bool(pick(0, 1))
        dm = 0.0 if nesterov else pick(0.0, 0.3)
        separate = popart.SGDAccumulatorAndMomentum(pick(0, 1))
        more = {"defaultMomentum": (mm, const), "defaultVelocityScaling": (vs, const)}
        more |= {"defaultDampening": (dm, const), "nesterov": (float(nesterov), True)}
        ours = popart.SGD(values | more, accumulatorAndMomentum=separate)
        words += f" {more} {separate}"
        return Rule(
            ours,
            lambda w, g: references.sgd(w, g, lr=lr, wd=wd, mm=mm, dm=dm, vs=vs, nesterov=nesterov),
            scale,
            None,
            words,
        )
    if kind == "adam":
        how = pick(*popart.AdamMode)
        b1, b2, eps, most = pick(0.9, 0.5), pick(0.99, 0.8), 1e-2, pick(0.0, 0.5, 10.0)
        more = {"defaultBeta1": (b1, const), "defaultBeta2": (b2, const), "defaultEps": (eps, const)}
        more |= {"defaultMaxWeightNorm": (most, const)}
        scaled = bool(pick(0, 1))
        l2 = l2 and not bound
        mode = popart.WeightDecayMode.L2Regularization if l2 else popart.WeightDecayMode.Decay
        ours = popart.Adam(
            values | more,
            mode=how,
            weight_decay_mode=mode,
            clip_norm_settings=clip,
            scaled_optimizer_state=scaled,
        )
        name = how.name
        given = {"l2": l2, "bias": "NoBias" not in name, "adamax": name == "AdaMax"}
        lamb = most if name.startswith("Lamb") else None
        return Rule(
            ours,
            lambda w, g: references.adam(w, g, lr=lr, b1=b1, b2=b2, eps=eps, wd=wd, lamb=lamb, **given),
            scale,
            bound,
            f"{words} {more} {how} l2 {l2} scaled {scaled}",
            scaled,
        )
    how = pick("AdaGrad", "RMSProp", "CenteredRMSProp", "AdaDelta")
    tf = how in ("RMSProp", "CenteredRMSProp") and bool(pick(0, 1))
    alpha, momentum, eps = pick(0.9, 0.5), pick(0.0, 0.5), 1e-2
    more = {"defaultAlpha": (alpha, const), "defaultMomentum": (momentum, const), "defaultEps": (eps, const)}
    ours = popart.Adaptive(values | more, getattr(popart.AdaptiveMode, how), mode, rmsprop_tf_variant=tf)
    return Rule(
        ours,
        lambda w, g: references.adaptive(
            w, g, mode=how, lr=lr, alpha=alpha, eps=eps, momentum=momentum, wd=wd, l2=l2, tf=tf
        ),
        scale,
        None,
        f"{words} {more} {how} l2 {l2} tf {tf}",
    )


class Feed(Iterator[np.ndarray]):
    """A source that returns the last gradient given to it, as often as asked."""

    value: np.ndarray

    def __next__(self) -> np.ndarray:
        return self.value


@dataclass
class Program:
    """A program with everything that follows from its seed."""

    seed: int
    model: Model = field(init=False)
    idle: set[str] = field(default_factory=set)
    """Weights on which the loss did not depend in some batch (a bias before a normalisation)."""

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        m = self.model = Model(random)
        images = bool(m.pick(0, 1))
        x = m.input((3, 2, 4, 4) if images else (3, 3))
        for layer in range(m.pick(1, 2, 3) if images else 0):
            x = m.pick(*IMAGES)(m, x) if layer else convolved(m, x)
        if images:
            n, *rest = m.shapes[x]
            width = int(np.prod(rest))
            x = m.add(m.onnx.flatten([x], 1), lambda v: v.reshape(n, width), x)
            x = matmul(m, x)
        else:
            x = matmul(m, x)
            for _ in range(m.pick(1, 2, 3)):
                x = m.pick(*ROWS)(m, x)
        m.ids.append([])
        x = m.pick(gemm, matmul)(m, x)
        x = unary(m, x)
        self.loss = loss_of(m, x)
        self.rule = rule_of(random)
        self.batches, self.accumulation = m.pick((1, 1), (1, 2), (2, 1), (2, 2), (1, 4))
        self.replicas = m.pick(1, 1, 2)
        self.mean, self.running = bool(m.pick(0, 1)), bool(m.pick(0, 1))
        self.how = m.pick("one", "one", "sharded", "pipelined")
        if self.how == "pipelined":
            self.accumulation = max(self.accumulation, 3)
        self.recompute = m.pick(*popart.RecomputationType)
        if self.recompute is popart.RecomputationType.Pipeline and self.how != "pipelined":
            self.recompute = popart.RecomputationType.Standard
        self.returns = m.pick("All", "Final", "Sum")

    @property
    def words(self) -> str:
        return (
            f"seed {self.seed}: {' '.join(self.model.words)}; {self.rule.words}; batches {self.batches}, accumulation "
            f"{self.accumulation}, replicas {self.replicas}, mean {self.mean} running {self.running}, {self.how}, "
            f"{self.recompute.name}, {self.returns}"
        )

    def data(self) -> list[Values]:
        """Of each run: ``[batches, micro-batches, replicas, *shape]`` of each input."""
        random = np.random.default_rng(self.seed + 1)
        lead = (self.batches, self.accumulation, self.replicas)
        found = []
        for _ in range(STEPS):
            step = {}
            for name, (shape, below) in self.model.inputs.items():
                size = (*lead, *shape)
                value = random.integers(below, size=size) if below else random.standard_normal(size)
                step[name] = value.astype(np.int32 if below else np.float32)
            found.append(step)
        return found

    def options(self) -> popart.SessionOptions:
        options = popart.SessionOptions()
        if self.accumulation > 1:
            options.enableGradientAccumulation, options.accumulationFactor = True, self.accumulation
        if self.replicas > 1:
            options.enableReplicatedGraphs, options.replicatedGraphCount = True, self.replicas
        if self.mean:
            options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
            strategy = popart.MeanReductionStrategy
            options.meanAccumulationAndReplicationReductionStrategy = (
                strategy.Running if self.running else strategy.Post
            )
        options.autoRecomputation = self.recompute
        if self.how != "one":
            options.virtualGraphMode = popart.VirtualGraphMode.Manual
            for stage, ids in enumerate(self.model.ids):
                for name in ids:
                    self.model.builder.virtualGraph({name} if isinstance(name, str) else set(name), stage)
                    if self.how == "pipelined":
                        self.model.builder.pipelineStage(
                            {name} if isinstance(name, str) else set(name), stage
                        )
            options.enablePipelining = self.how == "pipelined"
            schedule = popart.AccumulateOuterFragmentSchedule
            options.accumulateOuterFragmentSettings = popart.AccumulateOuterFragmentSettings(
                schedule.Scheduler
            )
        return options

    def ours(self) -> Iterator[tuple[np.ndarray, Weights]]:
        """The loss's anchor and the weights after each run."""
        options = self.options()
        device = popart.DeviceManager({}).acquireAvailableDevice(
            self.replicas * (1 if self.how == "one" else 2)
        )
        try:
            session = popart.TrainingSession(
                self.model.builder.getModelProto(),
                popart.DataFlow(self.batches, {self.loss: popart.AnchorReturnType(self.returns)}),
                self.loss,
                self.rule.ours,
                device,
                userOptions=options,
            )
            session.prepareDevice()
            session.weightsFromHost()
            held = {name: np.zeros(value.shape, np.float32) for name, value in self.model.start.items()}
            for data in self.data():
                anchors = session.initAnchorArrays()
                session.run(popart.PyStepIO(data, anchors))
                session.weightsToHost()
                session.readWeights(popart.PyWeightsIO(held))
                yield anchors[self.loss].copy(), {name: value.copy() for name, value in held.items()}
        finally:
            device.detach()

    def reference(self) -> Iterator[tuple[np.ndarray, Weights]]:
        """The same in float64."""
        m = self.model
        weights = {name: value.copy() for name, value in m.start.items()}
        kept = {r: {} for r in range(self.replicas)}
        feeds = {name: Feed() for name in weights}
        rules = {name: self.rule.theirs(weights[name], feeds[name]) for name in weights}
        moved = self._trained(weights)
        for data in self.data():
            losses = np.zeros((self.batches, self.accumulation, self.replicas))
            for batch in range(self.batches):
                total = {name: np.zeros_like(weights[name]) for name in moved}
                for micro in range(self.accumulation):
                    for replica in range(self.replicas):
                        values = {n: v[batch, micro, replica].astype(np.float64) for n, v in data.items()}
                        values |= {n: data[n][batch, micro, replica] for n, (_, b) in m.inputs.items() if b}
                        own = weights | kept[replica]
                        found = m.forward(values, own)
                        for name in moved:
                            total[name] += self._gradient(found, own, name)
                        losses[batch, micro, replica] = found[self.loss]
                        for keep in m.statistics:
                            keep(found, own)
                        kept[replica] = {n: own[n] for n in own if n not in moved and n in weights}
                self.idle |= {name for name, value in total.items() if np.abs(value).max() < IDLE}
                divisor = self.accumulation * self.replicas if self.mean else 1
                self._clip(total, divisor)
                for name, value in total.items():
                    feeds[name].value = value
                    weights[name] = next(rules[name])
            yield self._returned(losses), weights | kept[0]

    def _clip(self, total: Weights, divisor: float) -> None:
        """Average and clip. What clipping sees is still to be averaged where SGD updates do that, and still scaled
        where updates or optimizer state are (as PopART orders it).
        """
        later = divisor if isinstance(self.rule.ours, popart.SGD) and not self.running else 1.0
        seen = later * (self.rule.scale if self.rule.scaled else 1.0)
        for name in total:
            total[name] = total[name] * (seen / divisor)
        if self.rule.bound:
            total.update(references.clipped(total, self.rule.bound))
        for name in total:
            total[name] = total[name] / seen

    def _trained(self, weights: Weights) -> list[str]:
        """Weights that operators read and that are not statistics."""
        before = {name: value.copy() for name, value in weights.items()}
        random = np.random.default_rng(5)
        values = {
            n: random.integers(b, size=s) if b else random.standard_normal(s)
            for n, (s, b) in self.model.inputs.items()
        }
        after = dict(before)
        found = self.model.forward(values, after)
        for keep in self.model.statistics:
            keep(found, after)
        return [name for name in self.model.first if name in weights and after[name] is before[name]]

    def _gradient(self, values: Values, weights: Weights, name: str) -> np.ndarray:
        result, begin = np.zeros_like(weights[name]), self.model.first[name]
        for place in np.ndindex(result.shape):
            ends = []
            for sign in (1, -1):
                changed = weights[name].copy()
                changed[place] += sign * STEP
                ends.append(self.model.forward(dict(values), {**weights, name: changed}, begin)[self.loss])
            result[place] = (ends[0] - ends[1]) / (2 * STEP)
        return result

    def _returned(self, losses: np.ndarray) -> np.ndarray:
        if self.returns == "Final":
            losses = losses[-1, -1]
        elif self.returns == "Sum":
            losses = losses.sum((0, 1))
        return losses.reshape([size for size in losses.shape if size != 1])


def check(seed: int) -> Program:
    """AssertionError, with what the program is, if it does not compute what it must."""
    program = Program(seed)
    for run, ((loss, weights), (wanted, expected)) in enumerate(
        zip(program.ours(), program.reference(), strict=True)
    ):
        if program.model.saturated:
            break
        where = f"run {run} of {program.words}"
        np.testing.assert_allclose(
            loss.reshape(wanted.shape), wanted, rtol=3e-4, atol=3e-5, err_msg=f"loss, {where}"
        )
        if program.idle and "Lamb" in program.rule.words:
            continue
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=3e-4, atol=5e-5, err_msg=f"{name}, {where}")
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="these seeds and no others")
    given = parser.parse_args()
    end, failed, seeds = time.monotonic() + given.seconds, 0, iter(given.only or itertools.count(given.first))
    seed = given.first
    for seed in seeds:
        if time.monotonic() > end:
            break
        try:
            check(seed)
        except Exception as error:  # Whatever is wrong with one program, the next is tried too.
            failed += 1
            print(f"--- {type(error).__name__} with seed {seed}: {error}\n    {getattr(error, 'hint', '')}")
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-3, file=sys.stdout)
    print(f"up to seed {seed}: {failed} failed")


if __name__ == "__main__":
    main()
