"""What a session writes and reports: executables out and in, variables out, cycle counts, summaries and report
files.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from podrun.compiler.arenas import stored
from podrun.core.executable import Executable, StreamDirection
from podrun.costmodel.cost import bounds_of, check_planned, check_program
from podrun.onnx_models.light_model import LightModel
from podrun.report.document import origin_of_process, profile_of, write_report
from podrun.report.engine_options import EngineOptions, engine_options
from podrun.report.model import Profile
from podrun.report.text import summary
from podrun.session.enums import DeviceType, Instrumentation
from podrun.session.environment import ours
from podrun.session.exceptions import popart_exception, surfaced
from podrun.session.parts.device_program import DeviceProgram
from podrun.session.parts.model_files import ModelFiles
from podrun.session.parts.weights import HostWeights
from podrun.session.program.build import BuiltModel
from podrun.session.session_options import SessionOptions

_log = logging.getLogger("podrun.popart.devicex")


class ExecutableFiles:
    """Writes and reads the compiled program and the variables of a session."""

    def __init__(
        self, program: DeviceProgram, built: BuiltModel, weights: HostWeights, models: ModelFiles | None
    ) -> None:
        self._program, self._built, self._weights, self._models = program, built, weights, models

    def model(self, *, with_state: bool) -> LightModel:
        """The session's ONNX model with the host's weights, and with the optimizer's state. popart_exception for a
        model that was not read from ONNX.
        """
        if self._models is None:
            raise popart_exception("The session's model was not read from ONNX, so it has no ONNX form.")
        state = self._weights.state_values() if with_state else None
        return self._models.model(self._weights.stored_values(), state)

    def save(self, path: str, *, variables: bool) -> None:
        """`Session.saveExecutable`. ``variables``: write the weights as an ONNX model beside it."""
        from podrun.core import executable_file

        self._check_can_save()
        target = _in_folder(path, "executable.popef")
        with surfaced():
            executable_file.write(self._program.prepared("saveExecutable"), target)
        if variables and self._weights.get_all():
            self.save_variables(str(Path(target).with_name("variables.popef")))

    def save_variables(self, path: str) -> None:
        """`Session.saveVariables`. Write an ONNX model whose initializers are the weights and optimizer state."""
        self._check_can_save()
        target = _in_folder(path, "variables.popef")
        with open(target, "wb") as file:
            file.write(self.model(with_state=True).to_bytes())

    def _check_can_save(self) -> None:
        if self._program.device.type not in (DeviceType.Ipu, DeviceType.OfflineIpu):
            raise popart_exception(
                f"Executables for device type {self._program.device.type} cannot be saved: use an IPU or an offline "
                "IPU."
            )

    def load(self, filename: str) -> None:
        """`Session.loadExecutable`. Take a program that compileAndExport wrote, in place of compiling; before
        prepareDevice.

        popart_exception if it is damaged or not the program of this session's model.
        """
        from podrun.core import executable_file

        if self._program.executable is not None:
            raise popart_exception("loadExecutable comes before prepareDevice.")
        path = _in_folder(filename, "executable.popef")
        if not os.path.isfile(path):
            raise popart_exception(f"There is no executable {filename!r}.")
        _log.debug("Loading serialized PopART executable %s", path)
        with surfaced():
            executable = executable_file.read(path)
        self._check_fits(executable, filename)
        self._program.executable = executable

    def _check_fits(self, executable: Executable, filename: str) -> None:
        """popart_exception unless inputs, anchors, weights and replication are those of this session."""
        program = self._built.program
        found = {
            "inputs": {
                n: s.spec for n, s in executable.streams.items() if s.direction is StreamDirection.TO_DEVICE
            },
            "anchors": sorted(
                n for n, s in executable.streams.items() if s.direction is StreamDirection.TO_HOST
            ),
            "weights": {n: v.host_spec for n, v in executable.variables.items() if n in program.parameters},
            "replication": (executable.layout.replicas, executable.layout.ipus_per_replica),
            "accumulation": executable.accumulation_factor,
            "training": executable.training,
        }
        wanted = {
            "inputs": {name: item.spec for name, item in program.inputs.items()},
            "anchors": sorted(anchor.name for anchor in program.anchors),
            "weights": {name: stored(item) for name, item in program.parameters.items()},
            "replication": (program.replicas, program.ipus_per_replica),
            "accumulation": program.accumulation_factor,
            "training": program.training,
        }
        for what, value in wanted.items():
            if found[what] != value:
                raise popart_exception(
                    f"The executable {filename!r} is not the program of this session: its {what} are "
                    f"{found[what]}, the session's {value}."
                )


def check_writable(filename: str) -> str:
    """The path of a file to write; its folder is made. Raises OSError if the file cannot be written."""
    path = os.path.expanduser(filename)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    os.makedirs(folder or ".", exist_ok=True)
    if not os.access(folder or ".", os.W_OK):
        raise OSError(f"Unable to write to {folder or '.'}")
    return path


def _in_folder(path: str, name: str) -> str:
    expanded = os.path.expanduser(path)
    return os.path.join(expanded, name) if os.path.isdir(expanded) else expanded


NAMED_RUNS = 2
"""Number of runs that a report shows apart (autoReport.executionProfileProgramRunCount)."""


class SessionReports:
    """Cycle counts and reports of a session's program. ``ipus``: of a replica. ``name``: the session's."""

    def __init__(self, program: DeviceProgram, options: SessionOptions, ipus: int, name: str) -> None:
        self._program, self._options, self._ipus, self._name = program, options, ipus, name
        self._run_names: list[str] = []
        self.cycles: int | None = None
        """Modelled cycles of the last run."""

    def name_run(self, name: str) -> None:
        """Note the ``debugName`` of a run; reports show the first ones apart."""
        if len(self._run_names) < NAMED_RUNS:
            self._run_names.append(name or self._name)

    def cycle_count(self, id: str) -> int:
        """`Session.getCycleCount`."""
        if not self._options.instrumentWithHardwareCycleCounter:
            raise popart_exception(
                "SessionOption 'instrumentWithHardwareCycleCounter' must be set to True in order to measure cycles."
            )
        if self.cycles is None:
            raise popart_exception("Must call run before getCycleCount.")
        kinds = self._options.hardwareInstrumentations
        ids = [""] if Instrumentation.Outer in kinds else []
        if Instrumentation.Inner in kinds:
            ids += [f"inner_ipu_{ipu}" for ipu in range(self._ipus)]
        if id not in ids:
            raise popart_exception(
                f"There is no cycle counter {id!r}; this session has {ids}. Make sure you have set "
                "SessionOption::hardwareInstrumentations correctly."
            )
        return self.cycles

    def profile(self) -> Profile:
        """`Session.getReport`."""
        executable = self._program.profiled()
        with surfaced():
            return replace(profile_of(executable), run_names=tuple(self._run_names))

    def summary(self) -> str:
        """`Session.getSummaryReport`."""
        return summary(self.profile())

    def engine_settings(self) -> EngineOptions:
        """The settings from POPLAR_ENGINE_OPTIONS and SessionOptions.engineOptions; poplar_exception for
        invalid ones.
        """
        with surfaced():
            return engine_options(self._options.engineOptions, ours())

    def stops_at_exceptions(self) -> bool:
        """Whether tiles stop at floating-point exceptions: an option of the session or of the engine."""
        return self._options.enableFloatingPointChecks or self.engine_settings().floating_point_exceptions

    def after_compile(self, settings: EngineOptions) -> None:
        """Write the requested reports, then check that the program fits its tiles.

        OutOfMemoryException if it does not, unless debug.allowOutOfMemory; popart_exception for equations that no
        planner knows, if podrun.strict. The reports are written in any case.
        """
        executable = self._program.prepared("getReport")
        if self._program.device.type is DeviceType.Cpu or "segments" not in executable.tile_report:
            return
        path = ""
        with surfaced():
            if settings.reports:
                folder = settings.directory / self._name
                now = datetime.now().astimezone()
                origin = origin_of_process(ours(), sys.orig_argv, now)
                found = profile_of(executable)
                written = write_report(found, folder, trace=settings.execution_profile, origin=origin)
                path = str(written)
            if settings.strict:
                check_planned(bounds_of(executable.tile_report))
            if not settings.allow_out_of_memory:
                check_program(executable.tile_report, profile_path=path)
