"""Reading ONNX models from people: files or bytes that may be truncated, wrong or hostile.

Everything is checked before memory is taken for it: the size a tensor claims against the bytes that are there, external
data against the folder of the model, the graph against cycles and depth.
"""

from __future__ import annotations

import onnx

from podrun.errors import UsageError


def check_model(model: onnx.ModelProto) -> None:
    """Refuse a model that `onnx.checker` refuses. Raises `UsageError` with the checker's words."""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise UsageError(f"the model is not valid ONNX: {error}") from error
