"""Files of a session: executables out and in, variables out, and weights that live beside the model."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from podrun.compiler.state.grouped import stored
from podrun.executable import Executable, StreamDirection
from podrun.popart.enums import DeviceType
from podrun.popart.errors import popart_exception, surfaced
from podrun.popart.sessions.device import SessionDevice

_log = logging.getLogger("podrun.popart.devicex")


class SessionFiles(SessionDevice):
    """The part of a session that writes and reads files."""

    def compileAndExport(self, filename: str) -> None:
        """Compile and write the executable to a file, or to ``executable.popef`` in a folder.

        OSError if the file cannot be written, popart_exception on a device whose executables cannot be saved.
        """
        path = os.path.expanduser(filename)
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        os.makedirs(folder or ".", exist_ok=True)
        if not os.access(folder or ".", os.W_OK):
            raise OSError(f"Unable to write to {folder or '.'}")
        self.prepareDevice(loadEngine=False)
        self.saveExecutable(path)

    def saveExecutable(self, path: str, savePopartMetadata: bool = True, saveVariables: bool = True) -> None:
        """Write the compiled program (with ``saveVariables`` the weights as an ONNX model beside it)."""
        from podrun import executable_file

        self._check_can_save()
        target = _in_folder(path, "executable.popef")
        with surfaced():
            executable_file.write(self._prepared("saveExecutable"), target)
        if saveVariables and self._weights.get_all():
            self.saveVariables(str(Path(target).with_name("variables.popef")))

    def saveVariables(self, path: str) -> None:
        """Write weights and optimizer state: an ONNX model whose initializers they are."""
        self._check_can_save()
        target = _in_folder(path, "variables.popef")
        with open(target, "wb") as file:
            file.write(self._weights.model(with_state=True).to_bytes())

    def _check_can_save(self) -> None:
        if self._device.type not in (DeviceType.Ipu, DeviceType.OfflineIpu):
            raise popart_exception(
                f"Executables for device type {self._device.type} cannot be saved: use an IPU or an offline IPU."
            )

    def loadExecutable(self, filename: str) -> None:
        """Take a program that compileAndExport wrote, in place of compiling; before prepareDevice.

        popart_exception if it is damaged or not the program of this session's model.
        """
        from podrun import executable_file

        if self._executable is not None:
            raise popart_exception("loadExecutable comes before prepareDevice.")
        path = _in_folder(filename, "executable.popef")
        if not os.path.isfile(path):
            raise popart_exception(f"There is no executable {filename!r}.")
        _log.debug("Loading serialized PopART executable %s", path)
        with surfaced():
            executable = executable_file.read(path)
        self._check_fits(executable, filename)
        self._executable = executable

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

    def updateEngineCache(self) -> None:
        """Executables are written to the cache when they are compiled, so there is nothing left to do."""
        self._prepared("updateEngineCache")

    def updateExternallySavedTensorLocations(self, fromLocation: str, toLocation: str) -> None:
        """Have modelToHost write the tensors that lie in the file ``fromLocation`` to ``toLocation``, with their
        optimizer state; what is there now is copied. (Those of other files are overwritten where they lie.)

        popart_exception if ``toLocation`` exists, ``fromLocation`` does not, or nothing lies in it.
        """
        self._external.move(fromLocation, toLocation)


def _in_folder(path: str, name: str) -> str:
    expanded = os.path.expanduser(path)
    return os.path.join(expanded, name) if os.path.isdir(expanded) else expanded
