"""A compiled program of a torch module on a device: the runtime's parts, in the order in which PopTorch uses them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

import numpy as np

from podrun.core.terminal import report_step
from podrun.poptorch.compile.session_optimizers import TorchUpdate
from podrun.runtime.assembly import SessionParts, SessionSource, assemble, place_and_build
from podrun.runtime.device import DeviceKind, RunDevice
from podrun.runtime.device_program import DeviceProgram
from podrun.runtime.environment import preparing
from podrun.runtime.step_arrays import ArrayStep, returned_arrays

PROGRAM_NAME = "poptorch"
"""The name of the program in a file."""


class TorchSession:
    """A module's program and its device. ``parts`` do the work (`podrun.runtime.assembly`).

    Order of calls: construct, which checks the model; `prepare`; `send_weights`; `run` any number of times.
    """

    def __init__(
        self, source: SessionSource, device: RunDevice, loss: str | None, optimizer: TorchUpdate | None
    ) -> None:
        self._optimizer = optimizer
        with preparing(f"reading the model of {source.name!r}"):
            built = place_and_build(source, source.request(device, loss, optimizer), device.target)
        self.parts: SessionParts = assemble(source, built, DeviceProgram(device, self, source.settings.words))

    @property
    def device(self) -> RunDevice:
        """The device that the program was compiled for."""
        return self.parts.program.device

    def prepare(self, *, load: bool) -> None:
        """Compile, unless there is a program. With ``load`` bring it to the device. GraphMemoryAllocationError if the
        program does not fit.
        """
        parts = self.parts
        settings = parts.reports.engine_settings()
        with preparing(f"preparing {parts.source.name!r}"):
            parts.loader.compile()
            parts.reports.after_compile(settings)
            if load and self.device.kind is not DeviceKind.OFFLINE and not parts.loader.loaded:
                report_step("loading")
                parts.loader.load()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One run. Returns what comes back, by name: zeros with synthetic data."""
        parts = self.parts
        outputs = returned_arrays(parts.model.built, parts.source.plan, parts.source.settings)
        parts.batches.ensure_ready()
        parts.reports.name_run("")
        parts.batches.run(ArrayStep(inputs, outputs))
        return outputs

    def change_optimizer(self, optimizer: TorchUpdate) -> None:
        """Use other values from the next run on. UsageError if a constant one differs."""
        if self._optimizer is not None:
            optimizer.check_replaces(self._optimizer)
        self._optimizer = optimizer
        self.parts.scalars.replace(optimizer)

    def take_executable(self, data: bytes) -> None:
        """Use a program that `executable` returned in place of compiling; before `prepare`."""
        with tempfile.TemporaryDirectory(prefix="podrun-") as folder:
            path = os.path.join(folder, "executable")
            with open(path, "wb") as file:
                file.write(data)
            self.parts.files.load(path)

    def executable(self) -> bytes:
        """The compiled program as a file has it. UsageError on a device whose programs cannot be saved."""
        with tempfile.TemporaryDirectory(prefix="podrun-") as folder:
            path = os.path.join(folder, "executable")
            self.parts.files.save(path, PROGRAM_NAME)
            with open(path, "rb") as file:
                return file.read()
