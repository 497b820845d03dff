"""NumericsReport: how far two trainings that started alike have moved apart, weight by weight.

``A0`` and ``A1`` are a model's files before and after training in one place, ``B0`` and ``B1`` in another (PyTorch,
say). With dA and dB the changes of a weight, its relative error is ``sum (dA - dB)^2 / (|dA| |dB| + 1e-8)``: 0 if both
moved alike, about 2 if they moved at random by as much (PopART's numerics report).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from podrun.onnx_models import loader
from podrun.onnx_models.tensor_proto import to_array
from podrun.session.exceptions import popart_exception

if TYPE_CHECKING:
    from onnx import ModelProto

Source = str | bytes | os.PathLike[str]


class NumericsReport:
    """See the module docstring. popart_exception if the models do not hold the same weights."""

    def __init__(self, A0: Source, A1: Source, B0: Source, B1: Source) -> None:
        models = {name: _weights(loader.read_model(source)) for name, source in zip(
            ("A0", "A1", "B0", "B1"), (A0, A1, B0, B1), strict=True
        )}  # fmt: skip
        self._models = models
        first = models["A0"]
        for name, weights in models.items():
            for weight in sorted(first.keys() ^ weights.keys()):
                raise popart_exception(
                    f"NumericsReport: only one of A0 and {name} has the weight {weight!r}."
                )
            for weight, value in weights.items():
                if value.shape != first[weight].shape:
                    raise popart_exception(
                        f"NumericsReport: weight {weight!r} has shape {list(value.shape)} in {name}, but "
                        f"{list(first[weight].shape)} in A0."
                    )

    def getRelativeErrors(self) -> dict[str, float]:
        """The relative error of every weight."""
        return {name: self._errors(name)[3] for name in sorted(self._models["A0"])}

    def report(self, id: str) -> str:
        """One weight's changes in words."""
        if id not in self._models["A0"]:
            raise popart_exception(f"NumericsReport: there is no weight {id!r}.")
        a, b, apart, relative = self._errors(id)
        return f"{id}: |dA|^2 = {a:.6g}, |dB|^2 = {b:.6g}, |dA - dB|^2 = {apart:.6g}, relative error = {relative:.6g}"

    def fullReport(self) -> str:
        """All weights, a line each."""
        return "\n".join(self.report(name) for name in sorted(self._models["A0"]))

    def _errors(self, name: str) -> tuple[float, float, float, float]:
        start_a, end_a, start_b, end_b = (self._models[m][name] for m in ("A0", "A1", "B0", "B1"))
        a, b = end_a - start_a, end_b - start_b
        square_a, square_b, apart = float((a * a).sum()), float((b * b).sum()), float(((a - b) ** 2).sum())
        return square_a, square_b, apart, apart / (np.sqrt(square_a * square_b) + 1e-8)


def _weights(model: ModelProto) -> dict[str, np.ndarray]:
    """Floating-point initializers as float64."""
    found = {tensor.name: np.asarray(to_array(tensor)) for tensor in model.graph.initializer}
    return {name: value.astype(np.float64) for name, value in found.items() if value.dtype.kind == "f"}
