"""The graph of a session for those who look inside: the IR, inference sessions made from it, the compiled program.

PopART's IR is a data structure of its own with its own passes. Here it is what a session is made from (the placed
model, its data flow and options), and its JSON is the forward graph that is computed, after pruning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podrun.popart.devices.device import DeviceInfo
from podrun.popart.enums import DeviceType, IrSerializationFormat
from podrun.popart.errors import popart_exception, poplar_exception
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.patterns import Patterns
from podrun.popart.sessions.ir_text import ir_text
from podrun.popart.sessions.reports import SessionReports
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.tensor_info import InputShapeInfo

if TYPE_CHECKING:
    from podrun.popart.session import InferenceSession


@dataclass(frozen=True, slots=True)
class Ir:
    """What `Session.getIr` gives: enough to make the session anew on another device."""

    name: str
    model: bytes
    flow: DataFlow
    shapes: InputShapeInfo
    patterns: Patterns
    options: SessionOptions
    training: bool
    text: str

    def serialize(self) -> str:
        """The forward graph as JSON: graph name -> list of operators, as `Session._serializeIr` gives it."""
        return self.text


class SessionIr(SessionReports):
    """The part of a session that shows its graph."""

    def getIr(self) -> Ir:
        """The session's IR, with the weights that the host holds."""
        return Ir(
            self._name,
            self._weights.model(with_state=False).to_bytes(),
            self._flow,
            self._shapes,
            self._patterns,
            self._options.copy(),
            self._training,
            self._serializeIr(),
        )

    def _serializeIr(self, format: IrSerializationFormat = IrSerializationFormat.JSON) -> str:
        """The forward graph after pruning, as JSON: graph name -> list of operators (`ir_text`)."""
        if not isinstance(format, IrSerializationFormat):
            raise TypeError(
                f"_serializeIr(): incompatible function arguments. {format!r} is no IrSerializationFormat."
            )
        built = self._built
        return ir_text(
            built.lowered.graph, self._placed.proto, built.infos, self._options, training=self._training
        )

    def getSerializedGraph(self) -> bytes:
        """The compiled program as JSON: its streams, variables, arenas, pieces, and the instructions of every IPU.

        popart_exception before prepareDevice, poplar_exception on a device without profiling.
        """
        from podrun import executable_file

        if self._executable is None:
            raise popart_exception("Session must have been prepared before a report can be fetched")
        if self._device.type is DeviceType.Cpu:
            raise poplar_exception("Profiling is disabled for current device type.")
        return json.dumps(executable_file.description(self._executable), sort_keys=True).encode()


def inference_from(ir: Ir, device: DeviceInfo, name: str) -> InferenceSession:
    """`InferenceSession.fromIr`. popart_exception for an IR with a backward pass."""
    from podrun.popart.session import InferenceSession

    if not isinstance(ir, Ir):
        raise TypeError(
            f"fromIr(): incompatible function arguments. {ir!r} is no Ir: session.getIr() gives one."
        )
    if ir.training:
        raise popart_exception(
            "fromIr: the IR is that of a training session; its backward pass and updates need a TrainingSession.",
            hint="InferenceSession(model from modelToHost, dataFlow, device) runs it forward.",
        )
    return InferenceSession(ir.model, ir.flow, device, ir.shapes, ir.patterns, ir.options, name)
