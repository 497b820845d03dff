"""Reading models (ONNX files, and TensorFlow's SavedModels through tf2onnx) and writing them, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto

from podrun.core.errors import MissingPackageError, NotFoundError, UnsupportedError, UsageError
from podrun.onnx_models.model_loader import MOST_MODEL_BYTES, load_model


class OnnxFrontend:
    """A file of ONNX, or a folder that holds exactly one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def load_model(self) -> ModelProto:
        """The model, checked. UsageError for a file that is none, and for a folder with none or several."""
        return load_model(self._file())

    def _file(self) -> Path:
        if not self.path.is_dir():
            return self.path
        files = sorted(self.path.glob("*.onnx"))
        if len(files) != 1:
            named = ", ".join(file.name for file in files) or "none"
            raise UsageError(
                f"{str(self.path)!r} holds {len(files)} ONNX files ({named}); one is wanted",
                hint="Name a file: poprt -i MODEL.onnx",
            )
        return files[0]


class TensorflowFrontend:
    """A SavedModel of TensorFlow. ``inputs_as_nchw`` and ``outputs_as_nchw``: images that are laid out anew."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        saved_model: bool = True,
        signature_def: str = "",
        tag: str = "",
        opset: int = 11,
        inputs_as_nchw: str | Sequence[str] | None = None,
        outputs_as_nchw: str | Sequence[str] | None = None,
        inputs: str | Sequence[str] | None = None,
        input_shape: Mapping[str, Sequence[int]] | None = None,
        outputs: str | Sequence[str] | None = None,
    ) -> None:
        if not saved_model:
            raise UnsupportedError(
                "frozen graphs of TensorFlow are not read",
                hint="Save the model: tf.saved_model.save(model, folder).",
            )
        self.path, self.opset = Path(path), opset
        self.signature_def, self.tag = signature_def, tag
        self.inputs, self.outputs = _names(inputs), _names(outputs)
        self.inputs_as_nchw, self.outputs_as_nchw = _names(inputs_as_nchw), _names(outputs_as_nchw)
        self.input_shape = dict(input_shape or {})

    def load_model(self) -> ModelProto:
        """The model in ONNX. NotFoundError for a folder that is no SavedModel, MissingPackageError without tf2onnx."""
        if not any((self.path / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
            raise NotFoundError(
                f"{str(self.path)!r} holds no saved_model.pb", hint="Name the SavedModel's folder."
            )
        loader, convert = _converter()
        try:
            graph, inputs, outputs, *rest = loader.from_saved_model(
                str(self.path),
                self.inputs or None,
                self.outputs or None,
                tag=self.tag or None,
                signatures=[self.signature_def] if self.signature_def else None,
                return_initialized_tables=True,
                return_tensors_to_rename=True,
            )
            proto, _ = convert(
                graph,
                input_names=inputs,
                output_names=outputs,
                opset=self.opset,
                tensors_to_rename=rest[-1] if rest else None,
                initialized_tables=rest[0] if rest else None,
                inputs_as_nchw=self.inputs_as_nchw or None,
                outputs_as_nchw=self.outputs_as_nchw or None,
                shape_override={name: list(shape) for name, shape in self.input_shape.items()} or None,
            )
        except (ValueError, KeyError, RuntimeError, AssertionError, TypeError) as error:
            raise UnsupportedError(f"tf2onnx cannot convert {str(self.path)!r}: {error}") from error
        model: ModelProto = proto
        return model


def _names(told: str | Sequence[str] | None) -> list[str]:
    if told is None:
        return []
    return [n for n in told.split(",") if n] if isinstance(told, str) else list(told)


def _converter() -> tuple[Any, Any]:
    """tf2onnx's loader, and its function from a graph to ONNX."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow as tf
        import tf2onnx
        from tf2onnx import tf_loader
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"reading SavedModels needs {error.name}", hint="pip install 'podrun[tensorflow]'"
        ) from error

    def convert(graph_def: Any, **options: Any) -> tuple[ModelProto, Any]:
        shapes = options.pop("shape_override")
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(graph_def, name="")
            internal = tf2onnx.tfonnx.process_tf_graph(graph, shape_override=shapes, **options)
        return tf2onnx.optimizer.optimize_graph(internal).make_model("converted from TensorFlow"), None

    return tf_loader, convert


def get_frontend(
    path: str | os.PathLike[str], framework: str = "onnx", **options: Any
) -> OnnxFrontend | TensorflowFrontend:
    """The reader of a model. ``framework``: onnx or tensorflow, whose options are those of `TensorflowFrontend`."""
    if framework == "onnx":
        return OnnxFrontend(path)
    if framework == "tensorflow":
        return TensorflowFrontend(path, **options)
    raise UsageError(f"there is no frontend {framework!r}", hint="Frontends are onnx and tensorflow.")


def write_model(model: ModelProto, path: Path) -> Path:
    """Write a model; what stands there is replaced when all is written. UsageError naming the file and the reason where
    it cannot be written, as on a full disk.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    weights = path.with_name(f"{path.name}.weights")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if model.ByteSize() > MOST_MODEL_BYTES:
            _with_weights_apart(model, part, weights)
        else:
            with part.open("wb") as file:
                file.write(model.SerializeToString())
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {str(path)!r}: {error.strerror or error}", hint=_hint(path.parent)
        ) from error
    return path


def _with_weights_apart(model: ModelProto, part: Path, weights: Path) -> None:
    weights.unlink(missing_ok=True)
    copy = ModelProto()
    copy.CopyFrom(model)
    onnx.save_model(copy, str(part), save_as_external_data=True, location=weights.name, size_threshold=1024)


def _hint(folder: Path) -> str:
    return f"See who may write there and how much is free: ls -ld {folder}; df -h {folder}"
