"""The tensors of a session by name: those of its graph, and the reserved ones of gradients, updates and states."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from podrun.compiler.program import FACTOR, RNG
from podrun.core.errors import UsageError
from podrun.core.executable import Retrieval, TensorSpec
from podrun.core.names import NORM_ANCHOR
from podrun.runtime.derived_anchors import ACCUM, REDUCED, scaling_anchors, update_specs
from podrun.runtime.loss_scaling import scaling_type
from podrun.runtime.model_lowering import differentiable, near
from podrun.runtime.optimizers.sgd import SgdRule
from podrun.runtime.pipelining import RESTORED
from podrun.runtime.settings import RunPlan, RunSettings
from podrun.runtime.tensor_names import PREFIXES

if TYPE_CHECKING:
    from podrun.runtime.lowering import Lowered
    from podrun.runtime.optimizers.rules import Rule


_SCALAR = TensorSpec("", "float32", ())
"""Type and shape of a streamed scalar."""
GRADIENT = PREFIXES["Gradient"]
UPDATED = PREFIXES["UpdatedVar"]


def tensor_infos(
    lowered: Lowered,
    trained: Collection[str],
    rule: Rule | None,
    loss: str | None,
    loss_scaling: float | str,
    accumulates: bool,
) -> dict[str, TensorSpec]:
    """Infos of the graph's tensors, and of gradients, updated weights, optimizer state and streamed scalars."""
    infos = dict(lowered.tensors)
    if loss is None:
        return infos
    infos |= {GRADIENT + name: infos[name] for name in differentiable(lowered, loss)}
    if isinstance(loss_scaling, str):
        infos[loss_scaling] = _SCALAR
        if rule is not None and rule.context.automatic:
            infos[FACTOR] = _SCALAR
        for name in scaling_anchors(rule, sorted(trained), scaling_type(lowered, loss)):
            infos[name] = TensorSpec(name, "float16" if name.endswith("FLOAT16") else "float32", ())
    if rule is not None:
        groups = range(len(rule.values.clipping))
        infos |= {f"{NORM_ANCHOR}{number}": _SCALAR for number in groups}
    for name in trained:
        infos |= _of_weight(name, lowered.parameters[name], rule, accumulates)
    return infos


def _of_weight(name: str, spec: TensorSpec, rule: Rule | None, accumulates: bool) -> dict[str, TensorSpec]:
    """Infos of what an update reads and writes of one weight."""
    specs = {UPDATED + name: spec}
    if rule is None:
        return specs
    form = rule.form(name) if isinstance(rule, SgdRule) else None
    gradient = TensorSpec(name, rule.gradient_dtype(spec), spec.shape)
    if form == 0:
        specs[REDUCED + name] = gradient
    if accumulates and form != 1:
        specs[ACCUM + name] = gradient
    specs |= {state.name: state for state, _ in rule.state(spec).values()}
    specs |= update_specs(rule, spec)
    return specs | dict.fromkeys(rule.scalars(name).keys() - {RNG}, _SCALAR)


def check_anchors(anchors: Iterable[str], infos: Mapping[str, TensorSpec]) -> None:
    """UsageError for an anchor that is not a tensor, with the reason where it is known."""
    for anchor in anchors:
        if anchor in infos:
            continue
        hint = ""
        if anchor.startswith(GRADIENT):
            subject = anchor.removeprefix(GRADIENT)
            hint = (
                f" No gradient path leads from the loss to {subject!r}."
                if subject in infos
                else f" There is no tensor {subject!r} either."
            )
        elif anchor.startswith(PREFIXES["Stashed"]):
            hint = f" A stash is a ring in an IPU's memory: {RESTORED + anchor[10:]} is what comes out of it."
        raise UsageError(f"Anchor tensor `{anchor}' not in Ir Tensors.{hint}{near(anchor, infos)}")


def anchor_alias(anchor: str, inputs: Container[str]) -> str:
    """The name of an anchor in the Program: its own, except for inputs, because the streams to the device have their
    names.
    """
    return f"Input___{anchor}" if anchor in inputs else anchor


def updated_when_copied(plan: RunPlan, trained: Collection[str], settings: RunSettings) -> set[str]:
    """The anchored weights that have been updated when they are copied to the host.

    Weights are copied when the backward pass is done, with Final when the step is. Without gradient accumulation the
    update is part of the backward pass, in a pipeline of that of the weight's stage; with it, the update comes after
    the last micro-batch. (Source: graphcore/popart, willow/src/popx/irlowering.cpp: copies wait for the weight's update
    and come with the highest stage that reads it; and tests/integration/external_tensorproto_data_test.py.)
    """
    early, final = not settings.accumulates, Retrieval.FINAL
    return {n for n, kind in plan.returned.items() if n in trained and (early or kind.retrieval is final)}
