"""Running a model by onnxruntime, which only checks: it is not needed to convert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from podrun.core.errors import MissingPackageError, UsageError

_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int16)": np.int16,
    "tensor(uint16)": np.uint16,
    "tensor(uint32)": np.uint32,
    "tensor(uint64)": np.uint64,
    "tensor(bool)": np.bool_,
}


def onnxruntime_session(model: ModelProto | bytes | str, **options: Any) -> Any:
    """An onnxruntime.InferenceSession on the CPU. MissingPackageError without onnxruntime, UsageError for a model that
    it does not take.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "checks against the original need onnxruntime", hint="pip install onnxruntime"
        ) from error
    source = model.SerializeToString() if isinstance(model, ModelProto) else model
    settings = options.pop("sess_options", None) or onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base that it publishes.
        raise UsageError(f"onnxruntime does not take the model: {error}") from error


def run_onnxruntime(
    model: ModelProto, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] | None = None
) -> dict[str, np.ndarray]:
    """Outputs by name. Inputs are cast to the types that the model states."""
    session = onnxruntime_session(model)
    feed: dict[str, np.ndarray] = {}
    for value in session.get_inputs():
        if value.name not in inputs:
            raise UsageError(f"input {value.name!r} has no value")
        feed[value.name] = np.asarray(inputs[value.name]).astype(_TYPES.get(value.type, np.float32))
    names = list(outputs) if outputs is not None else [value.name for value in session.get_outputs()]
    try:
        results = session.run(names, feed)
    except Exception as error:  # See above.
        raise UsageError(f"onnxruntime cannot run the model: {error}") from error
    return dict(zip(names, results, strict=True))


class ORTBackend:
    """A model in onnxruntime, with the calls of `onnxruntime.InferenceSession`: what others are compared with.

    ``path``: a file, bytes or a ModelProto. ``sess_options``, ``providers`` and ``provider_options`` are accepted and
    have no effect, as those of ``run``. ``lazy_load``: read the model at the first run.
    """

    def __init__(
        self,
        path: str | bytes | ModelProto,
        sess_options: object = None,
        providers: object = None,
        provider_options: object = None,
        lazy_load: bool = False,
        **options: object,
    ) -> None:
        self._source, self._session = path, None
        if not lazy_load:
            self.load()

    def load(self) -> Any:
        """Read the model; returns onnxruntime's session."""
        if self._session is None:
            self._session = onnxruntime_session(self._source)
        return self._session

    def get_inputs(self) -> list[Any]:
        """onnxruntime's descriptions of the inputs."""
        return list(self.load().get_inputs())

    def get_outputs(self) -> list[Any]:
        """onnxruntime's descriptions of the outputs."""
        return list(self.load().get_outputs())

    def get_io_info(self) -> tuple[dict[str, tuple[list[int], Any]], dict[str, tuple[list[int], Any]]]:
        """Shape and dtype of each input, and of each output."""
        ends = (self.get_inputs(), self.get_outputs())
        inputs, outputs = ({v.name: (v.shape, np.dtype(_TYPES[v.type])) for v in end} for end in ends)
        return inputs, outputs

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, np.ndarray],
        run_options: object = None,
    ) -> list[np.ndarray]:
        """The outputs in order; all of them without names."""
        return list(self.load().run(output_names, dict(input_feed)))
