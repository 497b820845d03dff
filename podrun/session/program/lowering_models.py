"""From a session's ONNX model to the function that is compiled: optimizer state taken out, the rest lowered.

`Request` states what a session needs of its model. `gradient_paths` are the tensors from which a path leads to the
loss, and the weights among them: these have gradients.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.executable import numpy_dtype
from podrun.onnx_models import loader
from podrun.session import names
from podrun.session.dataflow import DataFlow
from podrun.session.exceptions import popart_exception
from podrun.session.names import CUT, PIPELINE_STAGE, VIRTUAL_GRAPH, reserved_prefix_of
from podrun.session.optimizers.base import Optimizer
from podrun.session.pipelining import RESTORED
from podrun.session.session_options import SessionOptions
from podrun.session.tensor_info import InputShapeInfo

if TYPE_CHECKING:
    from onnx import ModelProto

    from podrun.onnx_models.light_model import LightModel
    from podrun.onnx_models.lowering import Lowered


@dataclass(frozen=True, slots=True)
class Request:
    """Which tensors, trained by what, on how many IPUs. ``as_in_training``: operators drop out and change running
    statistics although there is no loss. ``own_copies``: each machine keeps and updates all weights by itself.
    """

    name: str
    flow: DataFlow
    options: SessionOptions
    shapes: InputShapeInfo
    ipus_per_replica: int
    loss: str | None = None
    optimizer: Optimizer | None = None
    as_in_training: bool = False
    own_copies: bool = False

    @property
    def training(self) -> bool:
        """Whether operators behave as in training."""
        return self.as_in_training or self.loss is not None


_ENDS = frozenset({"Detach", "Shape", "Size"})
"""Operators that pass no gradient on."""


def differentiable(lowered: Lowered, loss: str) -> set[str]:
    """Floating-point tensors from which a path of such tensors leads to the loss, and the loss itself."""
    return _leading_to(lowered, loss, through_integers=False)


def trainable(lowered: Lowered, loss: str, only: Collection[str] | None = None) -> set[str]:
    """Floating-point parameters that the loss depends on, except statistics of norms; ``only`` restricts them."""
    reached = _leading_to(lowered, loss, through_integers=True)
    return {
        name
        for name, spec in lowered.parameters.items()
        if name in reached
        and (only is None or name in only)
        and name not in lowered.state_updates
        and (numpy_dtype(spec.dtype).kind == "f" or spec.dtype == "bfloat16")
    }


def _leading_to(lowered: Lowered, loss: str, *, through_integers: bool) -> set[str]:
    from podrun.onnx_models.lowering.graph import captured

    makers = {output: node for node in lowered.graph.nodes for output in node.outputs if output}
    reached: set[str] = set()
    queue = [loss]
    while queue:
        name = queue.pop()
        if name in reached or not (through_integers or _is_float(lowered, name)):
            continue
        reached.add(name)
        node = makers.get(name)
        if node is not None and node.kind not in _ENDS:
            queue.extend(item for item in node.inputs if item)
            queue.extend(captured(node))
    return reached


def _is_float(lowered: Lowered, name: str) -> bool:
    spec = lowered.tensors.get(name)
    return spec is not None and numpy_dtype(spec.dtype).kind not in "iub"


GRADIENT = names.PREFIXES["Gradient"]
_PRUNED = "All operations in the main graph were pruned, nothing to compute"


def metadata(model: ModelProto, key: str, default: Any) -> Any:
    """A podrun entry of a model's metadata_props."""
    for entry in model.metadata_props:
        if entry.key == key:
            return json.loads(entry.value)
    return default


def take_state(model: LightModel) -> tuple[dict[str, np.ndarray], LightModel]:
    """Optimizer state that modelToHost wrote into a model, and the model without it (the same model if it has none)."""
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


def lower_model(model: LightModel, request: Request, observed: Sequence[str] = ()) -> Lowered:
    """The model's main graph, as far as anchors, loss and ``observed`` tensors need it.

    popart_exception for a loss that does not exist or is not a scalar, or if nothing is needed.
    """
    from podrun.onnx_models.lowering import lower
    from podrun.onnx_models.ops.sdk import Sdk, detached_or_training

    flow, options, loss = request.flow, request.options, request.loss
    wanted = _wanted(tensors_of(model.proto), flow, loss, observed)
    if loss is not None and not options.automaticLossScalingSettings.enabled:
        model = _joined(model, flow.anchors())
    fixed = loader.input_shapes(model.proto, request.shapes)
    casting = options.enableSupportedDataTypeCasting

    def lowered(outputs: list[str]) -> Lowered:
        return lower(
            model.proto,
            initial=model.values,
            training=request.training,
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
    """The tensors of the main graph that the function has to return: for anchors, gradients, observers and the loss."""
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
    """The model in which every Nll whose probabilities come from a Softmax has the logits as a third input.

    PopART's default patterns do the same, unless the gradient of the probabilities is anchored.
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
"""Names that a message lists if none is similar to the wrong one."""


def near(name: str, known: Iterable[str]) -> str:
    """The names most similar to ``name``, else the first of all (the model's own before those that training adds), as
    the end of an error message.
    """
    names = sorted(known, key=lambda item: (reserved_prefix_of(item) is not None, item))
    found = difflib.get_close_matches(name, names, n=2)
    if found:
        return f" Did you mean {' or '.join(repr(item) for item in found)}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f" There are {', '.join(repr(item) for item in names[:MOST_NAMES])}{more}." if names else ""
