"""A session's compiled program and its device: compile it or find it in a cache, load it, send its first values.

`DeviceProgram` is what the other parts of a session read, write and ask. `ProgramCompiler` makes the program,
`ProgramLoader` brings it and its first values to the device. `Hyperparameters` are the optimizer's streamed scalars.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from podrun.compiler.program import RNG
from podrun.core.executable import FLOATING_POINT_EXCEPTIONS, Executable, VariableRole
from podrun.core.terminal import at
from podrun.runtime.digest import GraphDigest
from podrun.runtime.graph import Model
from podrun.session.device import DeviceInfo
from podrun.session.enums import DeviceType
from podrun.session.environment import shared_cache
from podrun.session.exceptions import popart_exception, poplar_exception, surfaced
from podrun.session.program.build import BuiltModel

if TYPE_CHECKING:
    from podrun.session.optimizers.base import Optimizer
    from podrun.session.parts.files import SessionReports
    from podrun.session.parts.rng import RandomState
    from podrun.session.parts.weights import HostWeights
    from podrun.session.session_options import SessionOptions

_log = logging.getLogger("podrun.popart.devicex")


class DeviceProgram:
    """The program of a session. ``session``: the object by which the device knows whose program it holds."""

    def __init__(self, device: DeviceInfo, session: object) -> None:
        self.device = device
        self.executable: Executable | None = None
        """None before prepareDevice."""
        self._session = weakref.ref(session)  # A session without references releases its device at once.

    def prepared(self, call: str) -> Executable:
        """The compiled program. popart_exception before prepareDevice, which names ``call``."""
        if self.executable is None:
            raise popart_exception(
                f"Devicex::prepare() must be called before {call} is called.", hint="session.prepareDevice()"
            )
        return self.executable

    def profiled(self) -> Executable:
        """The compiled program for a report. popart_exception before prepareDevice, poplar_exception on a device
        without profiling."""
        if self.executable is None:
            raise popart_exception("Session must have been prepared before a report can be fetched")
        if self.device.type is DeviceType.Cpu:
            raise poplar_exception("Profiling is disabled for current device type.")
        return self.executable

    @property
    def on_device(self) -> bool:
        """Whether the device holds this program, and not another session's."""
        return self.device._loaded is self._session()

    @on_device.setter
    def on_device(self, value: bool) -> None:
        self.device._loaded = self._session() if value else None

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Write variables on the device."""
        if values:
            with surfaced():
                self.device.connection.write_variables(values)

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Variables as they stand on the device."""
        with surfaced():
            return self.device.connection.read_variables(list(names))


class Hyperparameters:
    """The optimizer's values as the program reads them. ``changed`` since they were last sent."""

    def __init__(self, built: BuiltModel, optimizer: Optimizer | None) -> None:
        self._built, self._optimizer = built, optimizer
        self.changed = False

    def replace(self, optimizer: Optimizer) -> None:
        """Take other values. popart_exception if more than non-constant values differ."""
        assert self._optimizer is not None
        assert self._built.rule is not None
        optimizer.check_replaces(self._optimizer)
        self._optimizer = self._built.rule.optimizer = copy.deepcopy(optimizer)
        self.changed = True

    def values(self, executable: Executable) -> dict[str, np.ndarray]:
        """The scalar variables of a program, in the program's types."""
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


class ProgramCompiler:
    """Makes a session's program. ``placed``: the model with places, as it was built."""

    def __init__(self, name: str, placed: Model, built: BuiltModel, options: SessionOptions) -> None:
        self._name, self._placed, self._built, self._options = name, placed, built, options
        self.compiled_here = False
        """True iff this session has compiled its program; False if it came from a cache or a file."""

    def compile(self, device: DeviceInfo) -> Executable:
        """The program for a device: from a cache, or compiled."""
        from podrun.compiler.compile import CompileOptions, compile_program

        folder = self._cache_directory(device)
        digest = fingerprint(self._placed, self._built) if folder is not None else None
        options = CompileOptions(cache_directory=folder, program_digest=digest, on_compile=self._starting)
        executable = compile_program(self._built.program, target=device.target, options=options)
        if not self.compiled_here:
            _log.debug("Loading serialized PopART executable from the cache %s", folder)
        return executable

    def _starting(self) -> None:
        _log.debug("Starting compilation of %r", self._name)
        self.compiled_here = True

    def _cache_directory(self, device: DeviceInfo) -> Path | None:
        """The session's own directory if caching is on, else the one that ``podrun`` gives all its instances."""
        if device.type not in (DeviceType.Ipu, DeviceType.OfflineIpu):
            return None
        if self._options.enableEngineCaching and self._options.cachePath:
            return Path(self._options.cachePath).expanduser()
        shared = shared_cache()
        return Path(shared) if shared else None


class ProgramLoader:
    """Brings a session's program to its device, with the values that it starts with.

    ``weights_sent``: whether the host's weights went to the device since the program was loaded or they changed.
    """

    def __init__(
        self,
        program: DeviceProgram,
        compiler: ProgramCompiler,
        weights: HostWeights,
        random: RandomState,
        scalars: Hyperparameters,
        reports: SessionReports,
    ) -> None:
        self.program, self.compiler, self._weights = program, compiler, weights
        self._random, self._scalars, self._reports = random, scalars, reports
        self.weights_sent = False

    def compile(self) -> None:
        """Compile, unless there is a program."""
        if self.program.executable is None:
            at("tracing")
            with surfaced():
                self.program.executable = self.compiler.compile(self.program.device)
            _log.info("Graph compiled")

    def load(self) -> None:
        """`Session.loadEngineAndConnectStreams`."""
        executable, device = self.program.executable, self.program.device
        if executable is None:
            raise popart_exception(
                "Cannot load an engine onto the device: there is no compiled engine.",
                hint="session.prepareDevice()",
            )
        device.hold(executable.layout.ipus)
        device.ensure_attached()
        if self._reports.stops_at_exceptions():
            metadata = {**executable.metadata, FLOATING_POINT_EXCEPTIONS: True}
            executable = replace(executable, metadata=metadata)
        with surfaced():
            device.connection.load(executable)
        self.program.on_device = True
        _log.info("Engine loaded")
        self.weights_sent = False
        self.program.write(self._start_values(executable))

    def _start_values(self, executable: Executable) -> dict[str, np.ndarray]:
        """The values that the host gives on its own: constant weights, streamed scalars, the seed."""
        constant = self._weights.device_values() if self._weights.constant else {}
        return constant | self._scalars.values(executable) | self._random.values()

    @property
    def loaded(self) -> bool:
        """Whether the device has the program and belongs to this process."""
        return self.program.on_device and self.program.device.isAttached

    def ensure_loaded(self) -> None:
        """Load again if another session has used the device since, or an error has cost the device its memory."""
        self.program.prepared("run")
        if self.program.device.type is DeviceType.OfflineIpu:
            raise popart_exception(
                "The device is an offline device: a session can be compiled for it, not run."
            )
        if not self.loaded:
            self.load()


def fingerprint(placed: Model, built: BuiltModel) -> str | None:
    """Equal digests mean equal forward functions and update rules. None where the model does not determine them: with
    operators of the program's own.

    Values of weights are left out where the program does not bake them in, so training can continue from a checkpoint
    without compiling again.
    """
    from podrun.onnx_models import custom

    if any(custom.registered(node.domain, node.op_type) for node in built.lowered.graph.nodes):
        return None
    digest = GraphDigest()
    digest.graph(placed.graph, without_values=built.program.parameters)
    digest.add(sorted(built.program.inputs.items()))
    digest.add((built.lowered.options.training, sorted(built.lowered.outputs)))
    if built.rule is not None:
        digest.add(repr(_rule(built)))
    return digest.hexdigest()


def _rule(built: BuiltModel) -> tuple[object, ...]:
    rule = built.rule
    assert rule is not None
    weights = []
    for name in sorted(built.trained):
        spec = built.program.parameters[name].spec
        state = sorted((prefix, repr(value)) for prefix, value in rule.state(spec).items())
        weights.append(
            (name, rule.group_key(name), state, sorted(rule.scalars(name)), rule.gradient_dtype(spec))
        )
    return (type(rule).__name__, rule.optimizer._modes(), rule.context, tuple(weights))
