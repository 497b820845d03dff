"""ONNX models as an estimate takes them: read from a file, with outputs and without optimizer state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from podrun.core.errors import ConfigError, UsageError
from podrun.session.names import STATE_PREFIXES

if TYPE_CHECKING:
    import onnx

_SAVE = "Name a model in ONNX's format, such as builder.saveModelProto or session.modelToHost writes."


def load_model(path: Path) -> onnx.ModelProto:
    """The ONNX model in a file.

    Raises:
        ConfigError: there is no such file, or it holds no model.
    """
    from podrun.onnx_models.model_loader import read_model

    if path.is_dir():
        raise ConfigError(f"{path} is a directory", hint=f"Name a model in it: ls {path}")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", hint=f"Look for one: ls {path.parent}")
    try:
        model = read_model(path)
    except UsageError as error:
        raise ConfigError(f"{path} holds no ONNX model that can be read: {error}", hint=_SAVE) from error
    if not model.graph.node:
        raise ConfigError(f"{path} holds no ONNX model: its graph has no operators", hint=_SAVE)
    return model


def completed(model: onnx.ModelProto) -> onnx.ModelProto:
    """``model`` as it can be traced. Where it has no outputs (PopART's need none), they are the tensors that no
    operator reads, those that most of the model is needed for first. Optimizer state that modelToHost wrote into it is
    left out: the layout says what state there is.
    """
    from onnx import ModelProto

    graph = model.graph
    held = {t.name for t in graph.initializer if t.name.startswith(STATE_PREFIXES)}
    read = {name for node in graph.node for name in node.input}
    state = held - read
    if graph.output and not state:
        return model
    made = ModelProto()
    made.CopyFrom(model)
    tensors = [tensor for tensor in graph.initializer if tensor.name not in state]
    inputs = [value for value in graph.input if value.name not in state]
    del made.graph.initializer[:], made.graph.input[:]
    made.graph.initializer.extend(tensors)
    made.graph.input.extend(inputs)
    if not graph.output:
        for name in _unread(graph):
            made.graph.output.add(name=name)
    return made


def _unread(graph: onnx.GraphProto) -> list[str]:
    """What nodes make and none reads: what needs most nodes first, as a loss does, and of those alike the last."""
    needs: dict[str, frozenset[int]] = {}
    inner = {
        name for node in graph.node for a in node.attribute for g in (a.g, *a.graphs) for name in _reads(g)
    }
    for number, node in enumerate(graph.node):
        own = frozenset({number}).union(*(needs.get(name, frozenset()) for name in node.input))
        needs |= dict.fromkeys(filter(None, node.output), own)
    read = inner.union(*(node.input for node in graph.node))
    unread = [name for name in reversed(needs) if name not in read]
    return sorted(unread, key=lambda name: -len(needs[name]))


def _reads(graph: onnx.GraphProto) -> set[str]:
    found = {name for node in graph.node for name in node.input}
    nested = (g for node in graph.node for a in node.attribute for g in (a.g, *a.graphs))
    return found.union(*(_reads(g) for g in nested))


def model_batch(model: onnx.ModelProto) -> int | None:
    """The micro-batch that the model was written for: the first dimension of its first input, if it is
    fixed.
    """
    initial = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in initial and dims:
            return int(dims[0].dim_value) or None
    return None


def batched_shapes(model: onnx.ModelProto, micro_batch: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the inputs at a micro-batch. UsageError for a model that has no inputs, or other open dimensions."""
    initial = {tensor.name for tensor in model.graph.initializer}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in model.graph.input:
        if value.name in initial:
            continue
        dims = value.type.tensor_type.shape.dim
        rest = tuple(int(dim.dim_value) for dim in dims[1:])
        if any(dim <= 0 for dim in rest):
            raise UsageError(
                f"input {value.name!r} leaves a dimension open that is not the first (the batch)",
                hint="Fix the other dimensions in the model.",
            )
        shapes[value.name] = (micro_batch, *rest) if len(dims) else ()
    if not shapes:
        raise UsageError("the model has no inputs", hint="Samples come in through the model's inputs.")
    return shapes
