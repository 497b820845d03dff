"""The SDK's limits on layers: normalisation, pooling, recurrent networks. See `podrun.onnx_models.ops.sdk`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from podrun.core.errors import UsageError
from podrun.onnx_models.ops.registry import GRAPHCORE
from podrun.onnx_models.ops.sdk_rules import Forms, op, refused, sdk_rule, shown
from podrun.runtime.graph import Node

# --- normalisation, pooling ------------------------------------------------------------------------------------------


@sdk_rule("BatchNormalization")
@sdk_rule("BatchNormalization", domain=GRAPHCORE)
def _batch_normalization(node: Node, forms: Forms) -> None:
    x = forms[0]
    if x is None:
        return
    if x.rank < 3:
        raise refused(node, f"batch norm requires X to have a rank >= 3.  x has rank {x.rank}")
    spatial = node.get("spatial", 1)
    expected = (x.shape[1],) if spatial else x.shape[1:]
    what = "dimension 1" if spatial else "all but the first dimension"
    for name, form in zip(("scale", "B", "mean", "var"), forms[1:5], strict=False):
        if form is not None and form.shape != expected:
            raise refused(
                node,
                f"expected shape of batch norm input tensor {name} ({shown(form.shape)}) to be {shown(expected)} to "
                f"match {what} of X ({shown(x.shape)})",
            )


def detached_or_training(
    nodes: Iterable[Node], differentiated: set[str], has: Callable[[Node], bool]
) -> None:
    """`UsageError` for a batch normalisation by given statistics that a gradient would have to go through.
    ``has``: whether an operator is one of the SDK's.
    """
    for node in nodes:
        if node.op_type != "BatchNormalization" or node.get("training_mode") or len(_made(node)) > 1:
            continue
        if node.outputs[0] in differentiated and has(node):
            raise UsageError(
                f"{op(node)} has one output: it normalises by given statistics, while the model is trained. To use "
                "the BatchNorm Op in inference mode during training, it has to be detached first.",
                hint="Give it 5 outputs (GraphTransformer.prepareNodesForTraining does it for a whole model), or put "
                "aiGraphcore.detach behind it.",
            )


def _made(node: Node) -> list[str]:
    return [name for name in node.outputs if name]


@sdk_rule("AveragePool")
def _average_pool(node: Node, forms: Forms) -> None:
    if node.get("count_include_pad", 0):
        raise refused(node, "`count_include_pad` is not supported")


@sdk_rule("MaxPool")
def _max_pool(node: Node, forms: Forms) -> None:
    if any(d != 1 for d in node.get("dilations") or ()):
        raise refused(node, "Dilations of value other than 1 are currently not supported.")


# --- recurrent networks ----------------------------------------------------------------------------------------------

_SUPPORTED = {"RNN": 1, "GRU": 2, "LSTM": 3}
"""Supported activations of a direction."""
_ONNX_DEFAULTS = {"RNN": ("Tanh", "Tanh")}
"""ONNX's default for both directions, if the model names none."""
_ACTIVATIONS = frozenset({"sigmoid", "relu", "tanh", "gelu", "softmax", "hardsigmoid"})


@sdk_rule(*_SUPPORTED)
def _recurrent(node: Node, forms: Forms) -> None:
    for name in ("activation_alpha", "activation_beta"):
        if node.get(name):
            raise refused(node, f"Attribute `{name}' of {op(node)} is not supported")
    if "clip" in node.attributes:
        raise refused(node, f"Attribute `clip' of {op(node)} is not supported")
    if node.get("input_forget"):
        raise refused(node, f"Attribute `input_forget' of {op(node)} must be set to 0")
    if node.get("direction", "forward") != "forward":
        raise refused(node, f"{op(node)} only supports `forward' direction")
    stated = node.attributes.get("activations")
    if stated is not None and tuple(stated) != _ONNX_DEFAULTS.get(node.op_type):
        _activations(node, stated)
    if len(node.inputs) > 7 and node.inputs[7]:
        raise refused(node, "Popart does not support peephole connections")
    recurrence, size = forms[2] if len(forms) > 2 else None, node.get("hidden_size")
    if recurrence is not None and size is not None and size != recurrence.shape[-1]:
        raise refused(
            node,
            f"{node.op_type}Op hidden_size attribute, {size}, does not match calculated hidden size, "
            f"{recurrence.shape[-1]}.",
        )


def _activations(node: Node, stated: Sequence[str]) -> None:
    for name in stated:
        if name.lower() not in _ACTIVATIONS:
            raise refused(node, f"Activation type '{name}' is not supported for {op(node)}")
    count = _SUPPORTED[node.op_type]
    if len(stated) != count:
        plural = "activation" if count == 1 else "activations"
        raise refused(node, f"{op(node)} only supports {count} {plural}, {len(stated)} were specified")
