"""From a session's ONNX model to the function that is compiled: optimizer state taken out, the rest lowered."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.onnx_models import loader
from podrun.session import names
from podrun.session.attributes import CUT, PIPELINE_STAGE, VIRTUAL_GRAPH
from podrun.session.exceptions import popart_exception
from podrun.session.placing.pipelining import RESTORED
from podrun.session.program.gradient_paths import differentiable
from podrun.session.program.request import Request
from podrun.session.step_data.dataflow import DataFlow

if TYPE_CHECKING:
    from onnx import ModelProto

    from podrun.onnx_models.light_model import LightModel
    from podrun.onnx_models.lowering import Lowered

GRADIENT = names.PREFIXES["Gradient"]
_PRUNED = "All operations in the main graph were pruned, nothing to compute"


def metadata(model: ModelProto, key: str, default: Any) -> Any:
    """A podrun entry of a model's metadata_props."""
    for entry in model.metadata_props:
        if entry.key == key:
            return json.loads(entry.value)
    return default


def take_state(model: LightModel) -> tuple[dict[str, np.ndarray], LightModel]:
    """Optimizer state that modelToHost wrote into a model, and the model without it: the same one if there is none."""
    whole = model.proto.graph
    state = {t.name: model.value(t) for t in whole.initializer if t.name.startswith(names.STATE_PREFIXES)}
    if not state:
        return state, model
    pruned = model.copy()
    graph = pruned.proto.graph
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(t for t in whole.initializer if t.name not in state)
    graph.input.extend(value for value in whole.input if value.name not in state)
    return state, pruned


def lower_model(model: LightModel, asked: Request, observed: Sequence[str] = ()) -> Lowered:
    """The model's main graph as far as anchors, loss and ``observed`` tensors need it. popart_exception for a loss that
    there is not or that is no scalar, or if nothing is needed.
    """
    from podrun.onnx_models.lowering import lower
    from podrun.onnx_models.ops.sdk import Sdk, detached_or_training

    flow, options, loss = asked.flow, asked.options, asked.loss
    wanted = _wanted(tensors_of(model.proto), flow, loss, observed)
    if loss is not None and not options.automaticLossScalingSettings.enabled:
        model = _joined(model, flow.anchors())
    fixed = loader.input_shapes(model.proto, asked.shapes)
    casting = options.enableSupportedDataTypeCasting

    def lowered(outputs: list[str]) -> Lowered:
        return lower(
            model.proto,
            initial=model.values,
            training=asked.training,
            outputs=outputs,
            input_shapes=fixed,
            casting=casting,
            replicas=options.getGlobalReplicationFactor(),
            sdk=Sdk(strided_groups=options.groupNormStridedChannelGrouping),
        )

    found = lowered(wanted)
    if not found.graph.nodes:
        raise popart_exception(_PRUNED, hint="Anchor a tensor that an operator makes.")
    extra = [target for target in found.state_updates.values() if target not in wanted]
    if extra:
        found = lowered([*wanted, *extra])
    if loss is not None and found.tensors[loss].size != 1:
        raise popart_exception(
            f"Loss tensor, '{loss}', must be a scalar tensor",
            hint=f"It has shape {list(found.tensors[loss].shape)}: reduce it, for example with "
            "aiGraphcore.identityloss.",
        )
    if loss is not None:
        detached_or_training(found.graph.nodes, differentiable(found, loss))
    return found


def _wanted(known: Collection[str], flow: DataFlow, loss: str | None, observed: Sequence[str]) -> list[str]:
    """The tensors of the main graph that the function has to give: for anchors, gradients, observers and the loss."""
    wanted = dict.fromkeys(anchor for anchor in (*flow.anchors(), *observed) if anchor in known)
    if loss is not None:
        if loss not in known:
            raise popart_exception(
                f"The loss {loss!r} is no tensor of the model's main graph.{near(loss, known)}"
            )
        wanted[loss] = None
    for anchor in flow.anchors():
        subject = anchor.removeprefix(GRADIENT).removeprefix(RESTORED)
        if subject != anchor and subject in known:
            wanted[subject] = None
    if not wanted and flow.anchors():
        first = flow.anchors()[0]
        raise popart_exception(f"Anchor tensor `{first}' not in Ir Tensors.{near(first, known)}")
    if not wanted:
        raise popart_exception(_PRUNED, hint="Anchor a tensor that an operator makes.")
    return list(wanted)


def _joined(model: LightModel, anchors: Collection[str]) -> LightModel:
    """The model with the logits as a third input of every Nll whose probabilities a Softmax beside it makes.

    As PopART's default patterns do, unless the gradient of the probabilities is anchored.
    """
    from onnx import helper

    from podrun.onnx_models.ops.training import SOFTMAX_AXIS

    joined = model.copy()
    graph = joined.proto.graph
    makers = {output: node for node in graph.node for output in node.output}
    version = max((o.version for o in model.proto.opset_import if o.domain in ("", "ai.onnx")), default=1)
    for node in graph.node:
        maker = makers.get(node.input[0]) if node.op_type == "Nll" and len(node.input) == 2 else None
        if maker is None or maker.op_type != "Softmax" or GRADIENT + node.input[0] in anchors:
            continue
        here, there = ({a.name: a.i for a in item.attribute} for item in (node, maker))
        if here.get("inputIsLogProbability") or any(
            here.get(k) != there.get(k) for k in (VIRTUAL_GRAPH, PIPELINE_STAGE, CUT)
        ):
            continue
        node.input.append(maker.input[0])
        axis = there.get("axis", -1 if version >= 13 else 1)
        node.attribute.append(helper.make_attribute(SOFTMAX_AXIS, axis))
    return joined


def tensors_of(model: ModelProto) -> set[str]:
    """The names of the main graph's tensors."""
    graph = model.graph
    found = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return found | {output for node in graph.node for output in node.output if output}


MOST_NAMES = 8
"""Names that a message lists where none is like the wrong one."""


def near(name: str, known: Iterable[str]) -> str:
    """The names most like ``name``, else the first of all, as the end of an error message."""
    names = sorted(known)
    found = difflib.get_close_matches(name, names, n=2)
    if found:
        return f" Did you mean {' or '.join(repr(item) for item in found)}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f" There are {', '.join(repr(item) for item in names[:MOST_NAMES])}{more}." if names else ""
