"""The graph of a session for those who look inside: the IR, inference sessions made from it, the compiled program.

PopART's IR is a data structure of its own with its own passes. Here it is what a session is made from (the placed
model, its data flow and options), and its JSON is the forward graph that is computed, after pruning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from podrun.session.devices.device import DeviceInfo
from podrun.session.exceptions import popart_exception
from podrun.session.options.session_options import SessionOptions
from podrun.session.patterns import Patterns
from podrun.session.step_data.dataflow import DataFlow
from podrun.session.tensor_info import InputShapeInfo

if TYPE_CHECKING:
    from podrun.session.session import InferenceSession


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


def inference_from(ir: Ir, device: DeviceInfo, name: str) -> InferenceSession:
    """`InferenceSession.fromIr`. popart_exception for an IR with a backward pass."""
    from podrun.session.session import InferenceSession

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
