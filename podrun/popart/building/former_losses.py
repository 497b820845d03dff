"""Losses of PopART 1, as its published programs write them: ``losses=[NllLoss(probabilities, labels, "loss")]``.

A loss is an operator now. These objects describe the operator; a session that gets them as ``losses`` adds the
operators to its model and takes their sum as its loss. Each says in a DeprecationWarning what to write instead.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from podrun.popart.building.builder import Builder
from podrun.popart.step_data.dataflow import AnchorReturnType
from podrun.popart.values.enums import ReductionType
from podrun.popart.values.exceptions import popart_exception


class FormerLoss:
    """A loss: its operator, the tensors it reads, the name of its output, where it lies.

    ``virtualGraph`` and ``pipelineStage`` place it, as PopART 1's did.
    """

    _operator = ""
    _instead = ""

    def __init__(self, inputs: Sequence[str], output: str, settings: dict[str, Any]) -> None:
        warnings.warn(
            f"popart.{type(self).__name__} is PopART 1's: {self._instead}, and give TrainingSession its output as loss",
            DeprecationWarning,
            stacklevel=3,
        )
        self._inputs, self._output, self._settings = list(inputs), output, settings
        self._graph: int | None = None
        self._stage: int | None = None

    def output(self, index: int = 0) -> str:
        """The name of the loss tensor."""
        return self._output

    def input(self, index: int) -> str:
        """The name of a tensor that the loss reads."""
        return self._inputs[index]

    def virtualGraph(self, ipu: int) -> None:
        """Compute it on that IPU of the replica."""
        self._graph = ipu

    def pipelineStage(self, stage: int) -> None:
        """Compute it in that stage of the pipeline."""
        self._stage = stage

    def _add(self, builder: Builder) -> str:
        output = getattr(builder.aiGraphcore, self._operator)(self._inputs, **self._settings)
        if self._graph is not None:
            builder.virtualGraph(output, self._graph)
        if self._stage is not None:
            builder.pipelineStage(output, self._stage)
        return str(output)

    @staticmethod
    def into(model: str | bytes | os.PathLike[str], losses: Sequence[FormerLoss]) -> tuple[bytes, str]:
        """A model with the operators of ``losses`` added, each output under its own name, and the name of their sum."""
        import onnx

        builder = Builder(model)
        names = {loss._add(builder): loss._output for loss in losses}
        total = next(iter(names.values()))
        if len(names) > 1:
            total = builder.aiOnnx.sum(list(names))
        proto = onnx.load_from_string(builder.getModelProto())
        for node in proto.graph.node:
            for field in (node.input, node.output):
                field[:] = [names.get(name, name) for name in field]
        return proto.SerializeToString(), total


class NllLoss(FormerLoss):
    """``NllLoss(probabilities, labels, output, reduction=ReductionType.Sum)``."""

    _operator = "nllloss"
    _instead = "write builder.aiGraphcore.nllloss([probabilities, labels])"

    def __init__(
        self,
        probabilities: str,
        labels: str,
        output: str,
        reduction: ReductionType = ReductionType.Sum,
        ignore_index: int | None = None,
    ) -> None:
        settings: dict[str, Any] = {"reduction": reduction}
        if ignore_index is not None:
            settings["ignoreIndex"] = ignore_index
        super().__init__([probabilities, labels], output, settings)


class L1Loss(FormerLoss):
    """``L1Loss(tensor, output, scale, reduction=ReductionType.Sum)``."""

    _operator = "l1loss"
    _instead = "write builder.aiGraphcore.l1loss([x], scale)"

    def __init__(
        self, tensor: str, output: str, scale: float, reduction: ReductionType = ReductionType.Sum
    ) -> None:
        super().__init__([tensor], output, {"lambda": float(scale), "reduction": reduction})


class IdentityLoss(FormerLoss):
    """``IdentityLoss(tensor, output, reduction=ReductionType.Sum)``."""

    _operator = "identityloss"
    _instead = "write builder.aiGraphcore.identityloss([x])"

    def __init__(self, tensor: str, output: str, reduction: ReductionType = ReductionType.Sum) -> None:
        super().__init__([tensor], output, {"reduction": reduction})


class AnchorReturnTypes:
    """``AnchorReturnTypes.ALL`` and the others, from the time before they were named by strings."""

    ALL = AnchorReturnType("All")
    FINAL = AnchorReturnType("Final")
    SUM = AnchorReturnType("Sum")

    def __new__(cls, name: str, *settings: Any) -> AnchorReturnType:  # type: ignore[misc]
        """The same as ``AnchorReturnType(name)``."""
        if not isinstance(name, str):
            raise popart_exception(f"An anchor's return type is named by a string, not {name!r}.")
        return AnchorReturnType(name, *settings)
