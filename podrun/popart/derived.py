"""Anchors that are worked out on the host from others: accumulators as they stand after each micro-batch.

The machines fold replicas and micro-batches, so a replica's own accumulator is nowhere in their memory. It
is the running sum of the replica's gradients, though, and those can be anchored:

* ``Accum___w``: the sum of ``Gradient___w`` over the batch so far, in the accumulator's type;
* ``Accl___w`` of combined SGD with momentum: what the batch started from, plus the scaled sum so far.

So the program gives gradients of all micro-batches, and the return types of PopART are applied here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from podrun.compiler.program import AnchorSpec
from podrun.executable import Retrieval, TensorSpec, numpy_dtype
from podrun.popart import names
from podrun.popart.errors import popart_unimplemented
from podrun.popart.optimizers.rules import Rule
from podrun.popart.optimizers.sgd import SGD1, SgdRule

ACCUM = names.PREFIXES["Accum"]
ACCL = names.PREFIXES["Accl"]


@dataclass(frozen=True, slots=True)
class Derived:
    """An anchor made of others. ``sources`` are program anchors, needed for every micro-batch."""

    name: str
    weight: TensorSpec
    combined: bool
    """True for ``Accl___`` of combined SGD."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The anchors it is made of."""
        gradient = names.gradient(self.weight.name)
        return (gradient, self.name) if self.combined else (gradient,)

    def value(self, anchors: Mapping[str, np.ndarray], rule: Rule) -> np.ndarray:
        """``[batches, micro-batches, replicas, *shape]`` from its sources, which have the same shape."""
        gradients = anchors[names.gradient(self.weight.name)]
        if not self.combined:
            dtype = numpy_dtype(rule.gradient_dtype(self.weight))
            sums: np.ndarray = np.add.accumulate(gradients.astype(dtype), axis=1, dtype=dtype)
            return sums
        scale = np.float32(rule.scalar(SGD1[3], self.weight.name).value)
        total = np.add.accumulate(gradients.astype(np.float32), axis=1, dtype=np.float32)
        start = anchors[self.name]
        value: np.ndarray = (start.astype(np.float32) + scale * total).astype(start.dtype)
        return value


def derived_anchors(
    anchors: Iterable[str], weights: Mapping[str, TensorSpec], rule: Rule | None, replicas: int
) -> dict[str, Derived]:
    """Those of ``anchors`` that are worked out on the host. popart_exception for one that cannot be yet."""
    found = {}
    for anchor in anchors:
        if rule is None:
            break
        if anchor.startswith(ACCUM) and anchor.removeprefix(ACCUM) in weights:
            found[anchor] = Derived(anchor, weights[anchor.removeprefix(ACCUM)], combined=False)
        weight = anchor.removeprefix(ACCL)
        if (
            anchor.startswith(ACCL)
            and weight in weights
            and isinstance(rule, SgdRule)
            and rule.form(weight) == 1
        ):
            if replicas > 1:
                raise popart_unimplemented(
                    f"Anchor {anchor!r}: the velocity of combined SGD, which replicas reduce while they "
                    "accumulate, "
                    "cannot be anchored with several replicas yet.",
                    hint="Use SGDAccumulatorAndMomentum.Separate and anchor Accl1___, or readWeights between runs.",
                )
            found[anchor] = Derived(anchor, weights[weight], combined=True)
    return found


def program_anchors(
    wanted: Mapping[str, AnchorSpec], derived: Mapping[str, Derived]
) -> tuple[AnchorSpec, ...]:
    """What the program hands over: what is wanted, and sources of derived anchors for every micro-batch."""
    specs = {spec.name: spec for name, spec in wanted.items() if name not in derived}
    for item in derived.values():
        specs |= {source: AnchorSpec(source, Retrieval.ALL) for source in item.sources}
    return tuple(specs[name] for name in sorted(specs))


def returned(value: np.ndarray, spec: AnchorSpec) -> np.ndarray:
    """What a return type gives of values ``[batches, micro-batches, replicas, *shape]``."""
    flat: np.ndarray = value.reshape(-1, *value.shape[2:])
    if spec.retrieval is Retrieval.ALL:
        return value
    if spec.retrieval is Retrieval.EVERY_N:
        return flat[spec.period - 1 :: spec.period]
    chosen: np.ndarray = (
        flat if spec.retrieval is Retrieval.FINAL else np.add.accumulate(flat, axis=0, dtype=flat.dtype)
    )
    return np.asarray(chosen[-1])
