"""The IR of a session: its model, data flow and options, enough to make the session again on another device.

PopART's IR is a data structure of its own with its own passes. Here it is what a session is made from, and its text is
the forward graph that is computed (`podrun.runtime.graph_text`).
"""

from __future__ import annotations

from podrun.core.quick_dataclass import dataclass
from podrun.popart.options.patterns import Patterns
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.sessions.run_settings import POPART_WORDS
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.values.exceptions import incompatible, popart_exception
from podrun.popart.values.names import UNNAMED
from podrun.popart.values.tensor_info import InputShapeInfo
from podrun.runtime.assembly import SessionParts
from podrun.runtime.graph_text import Drawing, graph_json


@dataclass(frozen=True, slots=True)
class Ir:
    """What `Session.getIr` returns: enough to make the session again on another device."""

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


def check_for_inference(ir: Ir) -> None:
    """Raise popart_exception for an IR with a backward pass, TypeError for what is no IR."""
    if not isinstance(ir, Ir):
        raise incompatible("fromIr", f"{ir!r} is no Ir: session.getIr() gives one.")
    if ir.training:
        raise popart_exception(
            "fromIr: the IR is that of a training session; its backward pass and updates need a TrainingSession.",
            hint="InferenceSession(model from modelToHost, dataFlow, device) runs it forward.",
        )


def ir_text(parts: SessionParts) -> str:
    """The forward graph of a session as JSON."""
    built, source = parts.model.built, parts.source
    return graph_json(
        built,
        parts.model.placed.graph,
        source.settings,
        training=source.training,
        unnamed=("", UNNAMED),
    )


def drawing_of(options: SessionOptions) -> Drawing:
    """The drawings that options ask for: ``options.dotChecks = {"Final"}``."""
    return Drawing(
        tuple(options.dotChecks),
        options.logDir or ".",
        options.firstDotOp,
        options.finalDotOp,
        options.dotOpNames,
        POPART_WORDS.folder_option,
    )
