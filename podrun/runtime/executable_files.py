"""Compiled programs in files: written, read, and held against the model of the session that reads them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from podrun.compiler.replica_groups import stored
from podrun.core.errors import UsageError
from podrun.core.executable import Executable, StreamDirection
from podrun.runtime.building import BuiltModel
from podrun.runtime.device import DeviceKind
from podrun.runtime.device_program import ProgramLoader
from podrun.runtime.settings import RunPlan, RunSettings
from podrun.runtime.words import SessionCall

if TYPE_CHECKING:
    import numpy as np

    from podrun.runtime.model_export import ExportedProgram
    from podrun.runtime.weights import HostWeights

_log = logging.getLogger("podrun.runtime.engine")


class ExecutableFiles:
    """Writes and reads the compiled program and the variables of a session."""

    def __init__(
        self,
        loader: ProgramLoader,
        weights: HostWeights,
        built: BuiltModel,
        plan: RunPlan,
        settings: RunSettings,
    ) -> None:
        self._loader, self._weights, self._program = loader, weights, loader.program
        self._built, self._plan, self._settings = built, plan, settings

    def save(
        self,
        path: str,
        name: str = "model",
        blobs: Mapping[str, bytes] = MappingProxyType({}),
        *,
        variables: bool = True,
    ) -> None:
        """Write the compiled program and its variables to a PopEF file. UsageError before it is compiled, and for a
        device without executables. ``blobs``: bytes of the front end. Without ``variables`` the program alone.
        """
        from podrun.runtime.model_export import write_program

        self.check_can_save()
        write_program(self.exported(name, blobs, variables=variables), path)

    def exported(
        self, name: str, blobs: Mapping[str, bytes] = MappingProxyType({}), *, variables: bool = True
    ) -> ExportedProgram:
        """The executable that `save` writes, with blobs and variables of the program."""
        from podrun.runtime.model_export import ExportedProgram

        executable = self._program.prepared(SessionCall.SAVE_PROGRAM)
        values: dict[str, np.ndarray] = {}
        if variables:
            held = self._weights.device_values() | self._weights.state_values()
            held |= self._loader.start_values(executable)
            values = {n: held[n] for n in executable.variables if n in held}
        anchors = {spec.name: spec for spec in self._built.program.anchors}
        outputs = {
            n: spec.name
            for n, spec in self._built.wanted.items()
            if n not in self._built.derived and anchors.get(spec.name) == spec
        }
        options = self._settings.engine_options
        return ExportedProgram(
            name, executable, self._plan.batches, outputs, values, options, blobs, self._weights.constant
        )

    def check_can_save(self) -> None:
        """UsageError for a device whose executables cannot be saved."""
        if self._program.device.kind not in (DeviceKind.IPU, DeviceKind.OFFLINE):
            raise UsageError(
                f"Executables for device type {self._program.device.kind.value} cannot be saved: use an IPU or an "
                "offline IPU."
            )

    def load(self, filename: str) -> None:
        """Take a program from a file in place of compiling it.

        UsageError if it is damaged or not the program of this session's model, or the session has a program.
        """
        from podrun.popef.reader import read_program

        if self._program.executable is not None:
            raise UsageError(self._program.words.compiled_already)
        path = in_folder(filename, "executable.popef")
        if not os.path.isfile(path):
            raise UsageError(f"There is no executable {filename!r}.")
        _log.debug("Loading the serialized executable %s", path)
        executable = read_program(path)
        self._check_fits(executable, filename)
        self._program.executable = executable

    def _check_fits(self, executable: Executable, filename: str) -> None:
        """UsageError unless inputs, anchors, weights and replication are those of this session."""
        program = self._built.program
        built_for = {
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
            if built_for[what] != value:
                raise UsageError(
                    f"The executable {filename!r} is not the program of this session: its {what} are "
                    f"{built_for[what]}, the session's {value}."
                )


def check_writable(filename: str) -> str:
    """The path of a file to write; its folder is made. Raises OSError if the file cannot be written."""
    path = os.path.expanduser(filename)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    os.makedirs(folder or ".", exist_ok=True)
    if not os.access(folder or ".", os.W_OK):
        raise OSError(f"Unable to write to {folder or '.'}")
    return path


def in_folder(path: str, name: str) -> str:
    """The file of that name in a folder, or the path itself if it is no folder."""
    expanded = os.path.expanduser(path)
    return os.path.join(expanded, name) if os.path.isdir(expanded) else expanded
