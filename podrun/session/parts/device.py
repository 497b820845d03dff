"""A session's program and its device: compile, find it in a cache, load it, and send what a program starts with."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np

from podrun.compiler.program import RNG
from podrun.core.executable import FLOATING_POINT_EXCEPTIONS, Executable, VariableRole
from podrun.core.progress import at
from podrun.session import option_checks
from podrun.session.enums import DeviceType
from podrun.session.environment import progress, shared_cache
from podrun.session.exceptions import popart_exception, surfaced
from podrun.session.parts.state import SessionState

_log = logging.getLogger("podrun.popart.devicex")


class SessionDevice(SessionState):
    """The part of a session that has a program on a device."""

    def prepareDevice(self, loadEngine: bool = True) -> None:
        """Compile, and load onto the device unless ``loadEngine`` is False. OutOfMemoryException if it does
        not fit. Again, while the program is on the device, it does nothing: weights stay.
        """
        if not self._options.compileEngine:
            _log.info("Not compiling engine by request")
            return
        option_checks.check_every_n_with_pipelining(self._options, self._flow)
        settings = self._reports.engine_settings()
        with progress(f"preparing {self._name!r}"):
            if self._executable is None:
                at("tracing")
                with surfaced():
                    self._program.executable = self._compile()
                _log.info("Graph compiled")
            self._reports.after_compile(settings)
            if loadEngine and self._device.type is not DeviceType.OfflineIpu and not self._is_loaded():
                at("loading")
                self.loadEngineAndConnectStreams()

    def _compile(self) -> Executable:
        from podrun.compiler.compile import CompileOptions, compile_program
        from podrun.session.parts.device_program import fingerprint

        folder = self._cache_directory()
        digest = fingerprint(self._placed, self._built) if folder is not None else None
        options = CompileOptions(cache_directory=folder, program_digest=digest, on_compile=self._starting)
        executable = compile_program(self._built.program, target=self._device.target, options=options)
        if not self._compiled_here:
            _log.debug("Loading serialized PopART executable from the cache %s", folder)
        return executable

    def _starting(self) -> None:
        _log.debug("Starting compilation of %r", self._name)
        self._compiled_here = True

    def _cache_directory(self) -> Path | None:
        """The session's own directory if caching is on, else the one that ``podrun`` gives all its
        instances.
        """
        if self._device.type not in (DeviceType.Ipu, DeviceType.OfflineIpu):
            return None
        if self._options.enableEngineCaching and self._options.cachePath:
            return Path(self._options.cachePath).expanduser()
        shared = shared_cache()
        return Path(shared) if shared else None

    def loadEngineAndConnectStreams(self) -> None:
        """Load the program onto the device: what was there is gone, weights have to be sent again."""
        executable = self._executable
        if executable is None:
            raise popart_exception(
                "Cannot load an engine onto the device: there is no compiled engine.",
                hint="session.prepareDevice()",
            )
        self._device.hold(executable.layout.ipus)
        self._device.ensure_attached()
        if (
            self._options.enableFloatingPointChecks
            or self._reports.engine_settings().floating_point_exceptions
        ):
            executable = replace(
                executable, metadata={**executable.metadata, FLOATING_POINT_EXCEPTIONS: True}
            )
        with surfaced():
            self._device.connection.load(executable)
        self._program.on_device = True
        _log.info("Engine loaded")
        self._weights_sent = False
        self._write_start_values()

    def _write_start_values(self) -> None:
        """What the host gives without being asked: constant weights, streamed scalars, the seed."""
        values: dict[str, np.ndarray] = {}
        if self._constant_weights:
            values |= self._weights.device_values()
        values |= self._scalars()
        values |= self._random.values()
        self._write(values)

    def _scalars(self) -> dict[str, np.ndarray]:
        executable = self._prepared("run")
        scalars = {name: v for name, v in executable.variables.items() if v.role is VariableRole.SCALAR}
        current: dict[str, float] = {}
        if self._built.rule is not None and self._optimizer is not None:
            for weight in self._built.trained:
                current |= self._built.rule.scalars(weight)
            if isinstance(self._built.program.loss_scaling, str):
                current[self._built.program.loss_scaling] = self._optimizer.getLossScalingVal()
        return {
            name: np.asarray(current[name], variable.spec.dtype).reshape(variable.spec.shape)
            for name, variable in scalars.items()
            if name != RNG
        }

    def _is_loaded(self) -> bool:
        return self._program.on_device and self._device.isAttached

    def _ensure_loaded(self) -> None:
        """Load again if another session has used the device since, or an error cost it its memory."""
        self._prepared("run")
        if self._device.type is DeviceType.OfflineIpu:
            raise popart_exception(
                "The device is an offline device: a session can be compiled for it, not run."
            )
        if not self._is_loaded():
            self.loadEngineAndConnectStreams()
