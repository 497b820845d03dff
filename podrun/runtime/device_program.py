"""A session's compiled program and its device: compile it or find it in a cache, load it, send its first values.

`DeviceProgram` is what the other parts of a session read, write and ask. `ProgramCompiler` makes the program,
`ProgramLoader` brings it and its first values to the device. `Hyperparameters` are the optimizer's streamed scalars.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.compiler.program import RNG
from podrun.core.errors import InternalError, PoplarError, UsageError
from podrun.core.executable import FLOATING_POINT_EXCEPTIONS, Executable, VariableRole
from podrun.core.terminal import report_step
from podrun.runtime.building import BuiltModel
from podrun.runtime.device import DeviceKind, RunDevice
from podrun.runtime.digest import GraphDigest
from podrun.runtime.environment import import_jax, ours, shared_cache, shared_cache_stays
from podrun.runtime.graph import all_nodes
from podrun.runtime.optimizers.rules import Rule
from podrun.runtime.words import NEUTRAL, SessionCall, Words

if TYPE_CHECKING:
    from podrun.compiler.cache import ExecutableCache
    from podrun.runtime.optimizers.hyperparameters import Hyperparameters
    from podrun.runtime.random_state import RandomState
    from podrun.runtime.session_reports import SessionReports
    from podrun.runtime.settings import RunSettings
    from podrun.runtime.weights import HostWeights

_log = logging.getLogger("podrun.runtime.engine")


class DeviceProgram:
    """The program of a session. ``session``: the object by which the device knows whose program it holds. ``words``:
    the front end's, for messages.
    """

    def __init__(self, device: RunDevice, session: object, words: Words = NEUTRAL) -> None:
        self.device, self.words = device, words
        self.executable: Executable | None = None
        """None before the program is compiled."""
        self._session = weakref.ref(session)  # A session without references releases its device at once.

    def prepared(self, call: SessionCall) -> Executable:
        """The compiled program. UsageError before there is one, which names ``call``."""
        if self.executable is None:
            raise UsageError(
                self.words.not_compiled.format(call=self.words.name(call)), hint=self.words.compile_first
            )
        return self.executable

    def profiled(self) -> Executable:
        """The compiled program for a report. UsageError before there is one, PoplarError on a device
        without profiling."""
        if self.executable is None:
            raise UsageError(self.words.no_report)
        if self.device.kind is DeviceKind.CPU:
            raise PoplarError("Profiling is disabled for current device type.")
        return self.executable

    @property
    def on_device(self) -> bool:
        """Whether the device holds this program, and not another session's."""
        return self.device.loaded is self._session()

    @on_device.setter
    def on_device(self, value: bool) -> None:
        self.device.loaded = self._session() if value else None

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Write variables on the device."""
        if values:
            self.device.connection.write_variables(values)

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Variables as they stand on the device."""
        return self.device.connection.read_variables(list(names))


class StreamedScalars:
    """The optimizer's values as the program reads them. ``changed`` since they were last sent."""

    def __init__(self, built: BuiltModel) -> None:
        self._built = built
        self.changed = False

    def replace(self, values: Hyperparameters) -> None:
        """Take other values; the front end has checked that only those that are not constant differ."""
        if self._built.rule is None:
            raise InternalError("a program without an update rule has no hyper-parameters to replace")
        self._built.rule.values = values
        self.changed = True

    def values(self, executable: Executable) -> dict[str, np.ndarray]:
        """The scalar variables of a program, in the program's types."""
        scalars = {name: v for name, v in executable.variables.items() if v.role is VariableRole.SCALAR}
        current: dict[str, float] = {}
        if self._built.rule is not None:
            for weight in self._built.trained:
                current |= self._built.rule.scalars(weight)
            if isinstance(self._built.program.loss_scaling, str):
                current[self._built.program.loss_scaling] = self._built.rule.values.loss_scaling.value
        return {
            name: np.asarray(current[name], variable.spec.dtype).reshape(variable.spec.shape)
            for name, variable in scalars.items()
            if name != RNG
        }


class ProgramCompiler:
    """Makes a session's program."""

    def __init__(self, name: str, built: BuiltModel, settings: RunSettings) -> None:
        self._name, self._built, self._settings = name, built, settings
        self.report: Callable[[], dict[str, Any]] | None = None
        """Makes the tile report, where the program is modelled in another form than the one that runs."""
        self.form = ""
        """What that form depends on besides the model: part of the name in caches."""
        self.compiled_here = False
        """True iff this session has compiled its program; False if it came from a cache or a file."""

    def compile(self, device: RunDevice) -> Executable:
        """The program for a device: from a cache, or compiled."""
        from podrun.compiler.cache import CompileOptions, known_program

        named, kept = self._caches(device)
        digest = None if named is None and kept is None else fingerprint(self._built)
        cache = named if kept is None or digest is None else kept
        digest = None if digest is None else digest + self.form
        options = CompileOptions(
            cache=cache, program_digest=digest, on_compile=self._starting, report=self.report
        )
        executable = known_program(self._built.program, device.target, options)
        if executable is None:
            import_jax()
            from podrun.compiler.compile import compile_program

            executable = compile_program(self._built.program, target=device.target, options=options)
        if not self.compiled_here and cache is not None:
            _log.debug("Loading the serialized executable from the cache %s", cache.directory)
        return executable

    def _starting(self) -> None:
        _log.debug("Starting compilation of %r", self._name)
        self.compiled_here = True

    def _caches(self, device: RunDevice) -> tuple[ExecutableCache | None, ExecutableCache | None]:
        """The cache that has a name: the session's own if caching is on, else the one that ``podrun`` gives all its
        instances. And what podrun keeps by itself, for programs with a digest, unless somebody asked for the former.
        """
        from podrun.compiler.cache import SUFFIX, ExecutableCache, kept_programs

        if device.kind not in (DeviceKind.IPU, DeviceKind.OFFLINE):
            return None, None
        own, shared = self._settings.cache_directory, shared_cache()
        suffix = self._settings.cache_suffix if own else SUFFIX
        folder = Path(own or shared).expanduser()
        named = ExecutableCache(folder, suffix=suffix) if own or shared else None
        asked = own or (shared and shared_cache_stays())
        return named, None if asked else kept_programs(ours(), shared)


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
        scalars: StreamedScalars,
        reports: SessionReports,
    ) -> None:
        self.program, self.compiler, self._weights = program, compiler, weights
        self._random, self._scalars, self._reports = random, scalars, reports
        self.weights_sent = False

    def compile(self) -> None:
        """Compile, unless there is a program."""
        if self.program.executable is None:
            report_step("tracing")
            self.program.executable = self.compiler.compile(self.program.device)
            _log.info("Graph compiled")

    def load(self) -> None:
        """Load the program onto the device, with the values that the host gives on its own."""
        executable, device = self.program.executable, self.program.device
        if executable is None:
            raise UsageError(self.program.words.nothing_to_load, hint=self.program.words.compile_first)
        device.hold(executable.layout.ipus)
        device.ensure_attached()
        if self._reports.stops_at_exceptions():
            metadata = {**executable.metadata, FLOATING_POINT_EXCEPTIONS: True}
            executable = replace(executable, metadata=metadata)
        device.connection.load(executable)
        self.program.on_device = True
        _log.info("Engine loaded")
        self.weights_sent = False
        self.program.write(self.start_values(executable))

    def start_values(self, executable: Executable) -> dict[str, np.ndarray]:
        """The values that the host gives on its own: constant weights, streamed scalars, the seed."""
        constant = self._weights.device_values() if self._weights.constant else {}
        return constant | self._scalars.values(executable) | self._random.values()

    @property
    def loaded(self) -> bool:
        """Whether the device has the program and belongs to this process."""
        return self.program.on_device and self.program.device.is_attached

    def ensure_loaded(self) -> None:
        """Load again if another session has used the device since, or an error has cost the device its memory."""
        self.program.prepared(SessionCall.RUN)
        if self.program.device.kind is DeviceKind.OFFLINE:
            raise UsageError("The device is an offline device: a session can be compiled for it, not run.")
        if not self.loaded:
            self.load()


def fingerprint(built: BuiltModel) -> str | None:
    """Equal digests mean equal forward functions and update rules. None where the model does not determine them: with
    operators of the program's own, or values of which no digest can be made.

    Values of weights are left out where the program does not bake them in, so training can continue from a checkpoint
    without compiling again.
    """
    lowered = built.lowered
    meaning, options = lowered.operators.meaning(all_nodes(lowered.graph)), lowered.options.meaning()
    if meaning is None or options is None:
        return None
    digest = GraphDigest()
    try:
        digest.add((meaning, options))
        digest.graph(lowered.graph, without_values=built.program.parameters)
        digest.add({name: lowered.constants[name] for name in lowered.specialised})
        digest.add([node.outputs for node in lowered.wide])
        digest.add(sorted(built.program.inputs.items()))
        digest.add(lowered.returns)
        if built.rule is not None:
            digest.add(repr(_rule(built, built.rule)))
    except InternalError as error:
        _log.debug("not kept: %s", error)
        return None
    return digest.hexdigest()


def _rule(built: BuiltModel, rule: Rule) -> tuple[object, ...]:
    weights = []
    for name in sorted(built.trained):
        spec = built.program.parameters[name].spec
        state = sorted((prefix, repr(value)) for prefix, value in rule.state(spec).items())
        weights.append(
            (name, rule.group_key(name), state, sorted(rule.scalars(name)), rule.gradient_dtype(spec))
        )
    return (type(rule).__name__, rule.form_key(), tuple(rule.values.clipping), rule.context, tuple(weights))
