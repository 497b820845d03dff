"""A model of TensorFlow in TensorFlow itself, with the calls of the other sessions: what conversions are compared with.

session = TensorflowSession("saved_model", batch=1)
session.set_output_names(["dense/Relu:0"])           # any tensors of the graph, not only its results
inputs, outputs = session.get_io_info()
y, = session.run(None, {"x:0": x})
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.errors import MissingPackageError, NotFoundError, UsageError

if TYPE_CHECKING:
    import tensorflow as tf

Ends = dict[str, tuple[list[int], Any]]
"""Shape and dtype by name; a size that is open is the batch on axis 0, and 0 elsewhere."""
_WITHOUT_RESULT = ("Const", "NoOp", "Placeholder", "Assert")


class TensorflowSession:
    """A frozen graph (bytes of a GraphDef, or a file of it) or a SavedModel's folder, whose signature
    ``serving_default`` is frozen. ``batch``: size of axis 0 where the model leaves it open.

    Without `set_input_names` the inputs are the graph's placeholders, without `set_output_names` the outputs are the
    results that nothing in the graph uses. Names are those of tensors; ``name`` stands for ``name:0``.
    """

    def __init__(self, model: str | bytes | os.PathLike[str], batch: int | None = None) -> None:
        self._model, self._batch = model, batch
        self._names: dict[str, list[str]] = {}
        self._graph: tf.Graph
        """There once the model is loaded."""
        self._session: tf.compat.v1.Session | None = None

    def set_input_names(self, names: Sequence[str]) -> None:
        """The tensors that `run` is given values of. UsageError for one that the graph does not have."""
        self._set("inputs", names)

    def set_output_names(self, names: Sequence[str]) -> None:
        """The tensors that `run` gives back. UsageError for one that the graph does not have."""
        self._set("outputs", names)

    def load(self) -> tf.compat.v1.Session:
        """Read the model; returns TensorFlow's own session."""
        if self._session is None:
            tf = _tensorflow()
            self._graph = tf.Graph()
            definition = _frozen(tf, self._model)
            with self._graph.as_default():
                tf.import_graph_def(definition, name="")
            self._session = tf.compat.v1.Session(graph=self._graph)
        return self._session

    def get_io_info(self) -> tuple[Ends, Ends]:
        """Shape and dtype of each input, and of each output."""
        self.load()
        inputs, outputs = (
            {tensor.name: (self._shape(tensor), np.dtype(tensor.dtype.as_numpy_dtype)) for tensor in end}
            for end in (self._inputs(), self._outputs())
        )
        return inputs, outputs

    def run(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, np.ndarray],
        run_options: object = None,
    ) -> list[np.ndarray]:
        """The outputs in order; all of them without names. UsageError for names that the graph does not have, and for
        inputs that are missing.
        """
        session = self.load()
        feed = {self._tensor(name): value for name, value in inputs.items()}
        if missing := [tensor.name for tensor in self._inputs() if tensor not in feed]:
            raise UsageError(f"input {missing[0]!r} has no value")
        wanted = [self._tensor(name) for name in output_names] if output_names else self._outputs()
        return [np.asarray(value) for value in session.run(wanted, feed)]

    def close(self) -> None:
        """End TensorFlow's session. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _set(self, end: str, names: Sequence[str]) -> None:
        if isinstance(names, str) or not names:
            raise UsageError(f"set_{end[:-1]}_names takes a list of names", hint='As in ["x:0"].')
        self.load()
        self._names[end] = [self._tensor(name).name for name in names]

    def _inputs(self) -> list[tf.Tensor]:
        if "inputs" in self._names:
            return [self._tensor(name) for name in self._names["inputs"]]
        return [op.outputs[0] for op in self._graph.get_operations() if op.type == "Placeholder"]

    def _outputs(self) -> list[tf.Tensor]:
        if "outputs" in self._names:
            return [self._tensor(name) for name in self._names["outputs"]]
        return [
            tensor
            for op in self._graph.get_operations()
            for tensor in op.outputs
            if op.type not in _WITHOUT_RESULT and not tensor.consumers()
        ]

    def _tensor(self, name: str) -> tf.Tensor:
        try:
            return self._graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
        except (KeyError, ValueError) as error:
            raise UsageError(f"the graph has no tensor {name!r}", hint="As in x:0.") from error

    def _shape(self, tensor: tf.Tensor) -> list[int]:
        sizes = tensor.shape.as_list() if tensor.shape.rank is not None else []
        return [
            (self._batch or 0 if axis == 0 else 0) if size is None else int(size)
            for axis, size in enumerate(sizes)
        ]


def _tensorflow() -> ModuleType:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "a session of TensorFlow needs TensorFlow", hint="pip install 'podrun[tensorflow]'"
        ) from error
    module: ModuleType = tensorflow
    return module


def _frozen(tf: ModuleType, model: str | bytes | os.PathLike[str]) -> tf.compat.v1.GraphDef:
    """The graph of a model with its weights in it. NotFoundError for a file that is not there, UsageError for one that
    holds none.
    """
    if not isinstance(model, bytes):
        path = Path(model)
        if path.is_dir():
            return _of_saved_model(tf, path)
        if not path.is_file():
            raise NotFoundError(
                f"there is no file {str(path)!r}", hint="Name a SavedModel's folder or a frozen graph."
            )
        model = path.read_bytes()
    definition = tf.compat.v1.GraphDef()
    try:
        definition.ParseFromString(model)
    except Exception as error:  # protobuf's error; the library that raises it is TensorFlow's.
        raise UsageError(
            "the model is no graph of TensorFlow", hint="A GraphDef is wanted, or a SavedModel's folder."
        ) from error
    return definition


def _of_saved_model(tf: ModuleType, path: Path) -> tf.compat.v1.GraphDef:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    if not any((path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
        raise NotFoundError(f"{str(path)!r} holds no saved_model.pb", hint="Name the SavedModel's folder.")
    signatures = tf.saved_model.load(str(path)).signatures
    if "serving_default" not in signatures:
        raise UsageError(
            f"{str(path)!r} has no signature serving_default; it has {sorted(signatures)}",
            hint="tf.saved_model.save(model, folder, signatures=function) gives it one.",
        )
    return convert_variables_to_constants_v2(signatures["serving_default"]).graph.as_graph_def()
