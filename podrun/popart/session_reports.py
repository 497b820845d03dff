"""What a session tells about itself: cycle counts, a summary of the tile model, the serialised IR."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from podrun.popart.enums import DeviceType, Instrumentation, IrSerializationFormat
from podrun.popart.errors import popart_exception, poplar_exception

if TYPE_CHECKING:
    from podrun.popart.session import Session


class SessionReports:
    """The part of a session that reports."""

    def getCycleCount(self: Session, id: str = "") -> int:  # type: ignore[misc]
        """Modelled cycles of the last run. popart_exception unless instrumentWithHardwareCycleCounter was
        set.
        """
        if not self._options.instrumentWithHardwareCycleCounter:
            raise popart_exception(
                "Cycle counts need SessionOptions.instrumentWithHardwareCycleCounter, set before the session "
                "was made."
            )
        kinds = self._options.hardwareInstrumentations
        ids = [""] if Instrumentation.Outer in kinds else []
        if Instrumentation.Inner in kinds:
            ids += [f"inner_ipu_{ipu}" for ipu in range(self._built.program.ipus_per_replica)]
        if id not in ids:
            raise popart_exception(f"There is no cycle counter {id!r}; this session has {ids}.")
        if self._cycles is None:
            raise popart_exception("getCycleCount needs a run first.")
        return self._cycles

    def _check_report(self: Session) -> Any:  # type: ignore[misc]
        if self._executable is None:
            raise popart_exception("Session must have been prepared before a report can be fetched.")
        if self._device.type is DeviceType.Cpu:
            raise poplar_exception("Profiling is disabled for current device type.")
        return self._executable.tile_report

    def getSummaryReport(self: Session, resetProfile: bool = True) -> str:  # type: ignore[misc]
        """The tile model's report as text, one fact a line."""
        report = self._check_report()
        return "\n".join(_lines(report)) + "\n"

    def getReport(self: Session) -> dict[str, Any]:  # type: ignore[misc]
        """The tile model's report as plain data. (The SDK gives an object of PopVision's library here.)"""
        return dict(self._check_report())

    def _serializeIr(self: Session, format: IrSerializationFormat = IrSerializationFormat.JSON) -> str:  # type: ignore[misc]
        """The forward graph after pruning, as JSON: graph name -> list of operators."""
        return json.dumps({"maingraph": [_operator(self, node) for node in self._built.lowered.graph.nodes]})


def _lines(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [
            line
            for key, item in value.items()
            for line in _lines(item, f"{path}.{key}" if path else str(key))
        ]
    return [f"{path}: {value}"]


def _operator(session: Session, node: Any) -> dict[str, Any]:
    def tensors(names: tuple[str, ...]) -> list[dict[str, str]]:
        found = []
        for index, name in enumerate(names):
            info = session._built.infos.get(name)
            if not name:
                continue
            found.append(
                {
                    "name": name,
                    "shape": "[" + " ".join(str(dim) for dim in info.shape()) + "]" if info else "[]",
                    "type": info.data_type() if info else "UNDEFINED",
                    "index": str(index),
                }
            )
        return found

    return {
        "type": node.op_type,
        "name": node.name,
        "inputs": tensors(node.inputs),
        "outputs": tensors(node.outputs),
        "attributes": {key: str(value) for key, value in node.attributes.items()},
    }
