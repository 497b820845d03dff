"""Models ready to run, from Python: `Backend` on IPUs, and `get_session` for it or for onnxruntime.

session = Backend("model.onnx", compiler_options=CompilerOptions(num_ipus=1))
y, = session.run(["y"], {"x": x})
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from podrun.core.errors import UnsupportedError, UsageError
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import Compiler, ServedModel, model_proto
from podrun.serving.compiler_options import CompilerOptions
from podrun.serving.convert.reference_runs import ORTBackend
from podrun.serving.convert.tensorflow_session import TensorflowSession
from podrun.serving.loaded_model import LoadedModel

EndInfo = dict[str, tuple[list[int], np.dtype]]
"""Shape and dtype by name."""


class Backend(ClosedAtEnd):
    """A model compiled for IPUs and loaded. ``path_or_bytes``: an ONNX model. ``export_popef``: where the compiled file
    is kept too. ``align_output_dtype``: outputs have the types that the ONNX model states. ``runtime_options`` are
    those of runners; one request at a time needs none.
    """

    def __init__(
        self,
        path_or_bytes: str | bytes | os.PathLike[str],
        *,
        export_popef: str | os.PathLike[str] | None = None,
        compiler_options: CompilerOptions | Mapping[str, Any] | None = None,
        runtime_options: object = None,
        align_output_dtype: bool = False,
        logger: logging.Logger | None = None,
    ) -> None:
        self._model = model_proto(path_or_bytes)
        if isinstance(compiler_options, Mapping):
            compiler_options = CompilerOptions.from_dict(compiler_options)
        self.compiler_options = compiler_options or CompilerOptions()
        self.runtime_options, self.align_output_dtype = runtime_options, align_output_dtype
        self._export, self._logger = export_popef, logger or logging.getLogger("poprt")
        self._loaded: LoadedModel | None = None

    def load(self) -> LoadedModel:
        """Compile and load, once. OutOfMemoryException, a RuntimeError, if it does not fit the tiles."""
        if self._loaded is None:
            if self._export is not None:
                path = Path(self._export)
                Compiler.compile_and_export(self._model, None, path, self.compiler_options)
                compiled = ServedModel(path / "executable.popef" if path.is_dir() else path)
            else:
                compiled = Compiler.compile(self._model, None, self.compiler_options)
            self._loaded = LoadedModel(compiled)
            self._logger.debug("the model is loaded")
        return self._loaded

    def close(self) -> None:
        """Give the IPUs back. Idempotent."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def get_io_info(self) -> tuple[EndInfo, EndInfo]:
        """Shape and dtype of each input, and of each output."""
        loaded = self.load()
        inputs, outputs = (
            {name: (list(one.shape), one.dtype) for name, one in end.items()}
            for end in (loaded.inputs, loaded.outputs)
        )
        return inputs, outputs

    def run(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, np.ndarray],
        align_output_dtype: bool = False,
    ) -> list[np.ndarray]:
        """The outputs in order; all of them without names. UsageError for names, shapes and types that do not fit."""
        loaded = self.load()
        names = list(output_names) if output_names else list(loaded.outputs)
        if unknown := [name for name in names if name not in loaded.outputs]:
            raise UsageError(f"the model has no output {unknown[0]!r}; it has {', '.join(loaded.outputs)}")
        results, _ = loaded.run(_checked(loaded, inputs), self.compiler_options.batches_per_step)
        if not (align_output_dtype or self.align_output_dtype):
            return [results[name] for name in names]
        stated = {v.name: v.type.tensor_type.elem_type for v in self._model.graph.output}
        return [results[name].astype(helper.tensor_dtype_to_np_dtype(stated[name])) for name in names]


def _checked(loaded: LoadedModel, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs as they are run: 64-bit types are narrowed as on the device."""
    checked = {}
    for name in inputs:
        if name not in loaded.inputs:
            raise UsageError(f"the model has no input {name!r}; it has {', '.join(loaded.inputs)}")
    for name, told in loaded.inputs.items():
        if name not in inputs:
            raise UsageError(f"input {name!r} has no value")
        value = np.asarray(inputs[name])
        whole = value.dtype.kind in "iu" and told.dtype.kind in "iu"
        if value.dtype != told.dtype and not whole and value.dtype != np.float64:
            raise UsageError(f"input {name!r} is {told.dtype}, not {value.dtype}")
        if value.size == 0 or value.size % max(int(np.prod(told.shape, dtype=np.int64)), 1):
            raise UsageError(f"input {name!r} is {list(told.shape)}, not {list(value.shape)}")
        checked[name] = value.astype(told.dtype)
    return checked


class ModelSession:
    """A model in one of several engines; see `get_session`."""

    def __init__(self, engine: Backend | ORTBackend | TensorflowSession) -> None:
        self._engine = engine

    def load(self) -> Backend | ORTBackend | TensorflowSession:
        """Make the model ready; returns the engine's own session."""
        self._engine.load()
        return self._engine

    def set_input_names(self, names: Sequence[str]) -> None:
        """The tensors of a TensorFlow model that `run` is given values of. UnsupportedError for ONNX models."""
        self._of_tensorflow("set_input_names").set_input_names(names)

    def set_output_names(self, names: Sequence[str]) -> None:
        """The tensors of a TensorFlow model that `run` gives back. UnsupportedError for ONNX models."""
        self._of_tensorflow("set_output_names").set_output_names(names)

    def _of_tensorflow(self, call: str) -> TensorflowSession:
        if not isinstance(self._engine, TensorflowSession):
            raise UnsupportedError(
                f"{call} is for models of TensorFlow: an ONNX model names its inputs and outputs itself",
                hint="poprt --checkpoints NAME,NAME makes tensors within a model its outputs.",
            )
        return self._engine

    def get_io_info(self) -> tuple[Any, Any]:
        """Shape and dtype of each input, and of each output."""
        return self._engine.get_io_info()

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs in order; all of them without names."""
        return self._engine.run(output_names, inputs)


def get_session(
    model: str | bytes,
    batch: int | None = None,
    backend: str = "poprt",
    options: Mapping[str, Any] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    export_popef: bool = False,
) -> ModelSession:
    """A session of ``poprt`` or ``onnxruntime``, of an ONNX model, or of ``tensorflow``, of a SavedModel or a frozen
    graph. ``batch``: size of axis 0 where the model leaves it open; ``options``: those of the compiler.
    """
    if backend == "tensorflow":
        return ModelSession(TensorflowSession(model, batch))
    if backend not in ("poprt", "onnxruntime"):
        raise UsageError(
            f"there is no backend {backend!r}", hint="Backends are poprt, onnxruntime and tensorflow."
        )
    proto = model_proto(model)
    if batch is not None:
        from podrun.serving.convert.structure_passes import ConstBatchSize

        proto = ConstBatchSize(batch, 0).run(proto)
    if backend == "onnxruntime":
        return ModelSession(ORTBackend(proto.SerializeToString(), lazy_load=True))
    where = Path(output_dir or ".") if export_popef else None
    chosen = CompilerOptions.from_dict(options or {})
    return ModelSession(Backend(proto.SerializeToString(), export_popef=where, compiler_options=chosen))
