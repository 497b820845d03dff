"""The tensors of a session: those of the model, and those that PopART gives reserved names (`podrun.session.names`)."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import FACTOR, RNG, Forward, Tensors
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.names import NORM_ANCHOR
from podrun.session import names
from podrun.session.dataflow import DataFlow
from podrun.session.enums import AnchorReturnTypeId
from podrun.session.exceptions import popart_exception
from podrun.session.optimizers.sgd import SgdRule
from podrun.session.pipelining import RESTORED
from podrun.session.program.derived import ACCUM, REDUCED, scaling_anchors, update_specs
from podrun.session.program.loss_scaling import scaling_type
from podrun.session.program.lowering_models import differentiable, near
from podrun.session.session_options import SessionOptions
from podrun.session.tensor_info import TensorInfo, data_type_of

if TYPE_CHECKING:
    from podrun.onnx_models.lowering import Lowered
    from podrun.session.optimizers.rules import Rule

GRADIENT = names.PREFIXES["Gradient"]
UPDATED = names.PREFIXES["UpdatedVar"]


def info_of(spec: TensorSpec) -> TensorInfo:
    """Type and shape as PopART gives them."""
    return TensorInfo(data_type_of(numpy_dtype(spec.dtype)), spec.shape)


def tensor_infos(
    lowered: Lowered,
    trained: Collection[str],
    rule: Rule | None,
    loss: str | None,
    loss_scaling: float | str,
    accumulates: bool,
) -> dict[str, TensorInfo]:
    """Infos of the graph's tensors, and of gradients, updated weights, optimizer state and streamed scalars."""
    infos = {tensor: info_of(spec) for tensor, spec in lowered.tensors.items()}
    if loss is None:
        return infos
    infos |= {GRADIENT + name: infos[name] for name in differentiable(lowered, loss)}
    if isinstance(loss_scaling, str):
        infos[loss_scaling] = TensorInfo("FLOAT", [])
        if rule is not None and rule.context.automatic:
            infos[FACTOR] = TensorInfo("FLOAT", [])
        for name in scaling_anchors(rule, sorted(trained), scaling_type(lowered, loss)):
            infos[name] = TensorInfo("FLOAT16" if name.endswith("FLOAT16") else "FLOAT", [])
    if rule is not None:
        groups = range(len(rule.optimizer.clip_norm_settings))
        infos |= {f"{NORM_ANCHOR}{number}": TensorInfo("FLOAT", []) for number in groups}
    for name in trained:
        infos |= _of_weight(name, lowered.parameters[name], rule, accumulates)
    return infos


def _of_weight(name: str, spec: TensorSpec, rule: Rule | None, accumulates: bool) -> dict[str, TensorInfo]:
    """Infos of what an update reads and writes of one weight."""
    found = {UPDATED + name: info_of(spec)}
    if rule is None:
        return found
    form = rule.form(name) if isinstance(rule, SgdRule) else None
    gradient = TensorInfo(data_type_of(numpy_dtype(rule.gradient_dtype(spec))), spec.shape)
    if form == 0:
        found[REDUCED + name] = gradient
    if accumulates and form != 1:
        found[ACCUM + name] = gradient
    found |= {state.name: info_of(state) for state, _ in rule.state(spec).values()}
    found |= {anchor: info_of(made) for anchor, made in update_specs(rule, spec).items()}
    return found | {scalar: TensorInfo("FLOAT", []) for scalar in rule.scalars(name).keys() - {RNG}}


def check_anchors(flow: DataFlow, infos: Mapping[str, TensorInfo]) -> None:
    """popart_exception for an anchor that is no tensor, saying why where that can be told."""
    for anchor in flow.anchors():
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
        elif anchor.startswith(names.PREFIXES["Stashed"]):
            hint = f" A stash is a ring in an IPU's memory: {RESTORED + anchor[10:]} is what comes out of it."
        raise popart_exception(f"Anchor tensor `{anchor}' not in Ir Tensors.{hint}{near(anchor, infos)}")


def anchor_alias(anchor: str, inputs: Container[str]) -> str:
    """The name an anchor has in the Program: its own, but for inputs, whose names the streams to the device
    have.
    """
    return f"Input___{anchor}" if anchor in inputs else anchor


def updated_when_copied(flow: DataFlow, trained: Collection[str], options: SessionOptions) -> set[str]:
    """The anchored weights that have been updated when they are copied to the host.

    Weights are copied when the backward pass is done, with Final when the step is. Without gradient accumulation the
    update is part of the backward pass, in a pipeline of that of the weight's stage; with it, the update comes after
    the last micro-batch. (Source: graphcore/popart, willow/src/popx/irlowering.cpp: copies wait for the weight's update
    and come with the highest stage that reads it; and tests/integration/external_tensorproto_data_test.py.)
    """
    early = not options.enableGradientAccumulation
    final = AnchorReturnTypeId.Final
    return {name for name in flow.anchors() if name in trained and (early or flow.art(name).id() is final)}


def aliasing(lowered: Lowered, anchors: Sequence[str]) -> Forward:
    """The forward function that also gives anchored inputs, under their aliases."""
    anchored = [anchor for anchor in anchors if anchor in lowered.inputs]
    if not anchored:
        return lowered.forward

    def forward(parameters: Tensors, inputs: Tensors, key: Any) -> dict[str, Any]:
        values = lowered.forward(parameters, inputs, key)
        return values | {anchor_alias(name, lowered.inputs): inputs[name] for name in anchored}

    return forward
