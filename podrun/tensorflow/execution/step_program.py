"""A graph of TensorFlow on the runtime: one iteration is a step, run as often as a call says.

Everything that the step reads from outside is a variable of the runtime's model: the program's variables, and the
arguments of the call. What the step writes is replaced after each iteration. Values cross only when they differ from
what the device has.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.core.errors import UsageError
from podrun.core.executable import Retrieval, numpy_dtype
from podrun.core.executable_file import write_executable
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.assembly import SessionParts, SessionSource, assemble, place_and_build
from podrun.runtime.device import RunDevice
from podrun.runtime.device_program import DeviceProgram
from podrun.runtime.environment import import_jax, preparing
from podrun.runtime.feeds import DataFeed
from podrun.runtime.graph import Model, OperatorGraph, Place, TensorType, reads
from podrun.runtime.session_reports import SessionReports
from podrun.runtime.settings import FixedPlan, Returned, RunSettings
from podrun.runtime.words import SessionCall
from podrun.tensorflow.capture.places import PipelineShape
from podrun.tensorflow.capture.program_graphs import FunctionGraph
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.modelling import ModelledStep, modelled_report, offer_step
from podrun.tensorflow.execution.poplar_flags import flags, unsent
from podrun.tensorflow.execution.step_values import (
    elements_of_replicas,
    needs_no_engine,
    not_taken_over,
    rows_of_replicas,
    same_bits,
)
from podrun.tensorflow.execution.trace_events import (
    note_compilation,
    note_load,
    note_run,
    note_variables_sent,
)
from podrun.tensorflow.execution.written_reports import each_iteration, write_reports
from podrun.tensorflow.graph import structure, tensor_lists
from podrun.tensorflow.graph.builder import ASSERTIONS, GraphBuilder, ProgramFacts, Value, VariableHandle
from podrun.tensorflow.graph.differentiation import trimmed
from podrun.tensorflow.graph.importer import Importer
from podrun.tensorflow.graph.replica_equality import equal_variables
from podrun.tensorflow.operators.table import TensorFlowOperators

_ = tensor_lists
MOST_AT_ONCE = 256
"""Most iterations whose inputs and results are in memory at once."""


@dataclass(frozen=True, slots=True)
class StepSource:
    """What a step is read from. ``graph``: inputs and captures are all in ``names``: name of a tensor of the graph ->
    key of its value, in ``resources`` for variables. ``carried``: key -> position of the result that replaces it.
    """

    name: str
    graph: FunctionGraph
    names: Mapping[str, str]
    resources: frozenset[str]
    results: Sequence[tf.Tensor]
    effects: Sequence[tf.Operation]
    carried: Mapping[str, int]
    pipeline: PipelineShape | None = None
    """The pipeline of which an iteration is a mini-batch."""
    ordinal: int = 0
    recomputes: bool = False
    """Whether activations are computed again."""
    fed: Mapping[str, str] = field(default_factory=dict)
    """Tensor that the parts of the program before this one give -> the input under which it comes."""
    queue: int = -1
    """The number of the queue that gives them."""
    done: frozenset[tf.Operation] = frozenset()
    """Operations that ran in the parts before."""
    reported: bool = True
    """Whether the step is a program to reports and estimates."""


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step as a model of the runtime. ``written``: key -> tensor that replaces it."""

    nodes: tuple[Any, ...]
    results: tuple[str, ...]
    written: Mapping[str, str]
    infeeds: Mapping[int, Sequence[str]]
    outfeeds: Mapping[int, Sequence[str]]
    places: Mapping[str, Place] = field(default_factory=dict)
    losses: Mapping[str, bool] = field(default_factory=dict)
    recomputed: Mapping[str, bool] = field(default_factory=dict)


def read_step(source: StepSource) -> ReadStep:
    """The runtime's nodes for a step."""
    facts = ProgramFacts(batch_norm_replicas=DEVICES.batch_norm_replicas)
    builder = GraphBuilder(source.name, facts)
    values: dict[str, Value] = {}
    for tensor, key in source.names.items():
        builder.current[key] = key
        values[tensor] = VariableHandle(key) if key in source.resources else key
    values.update(source.fed)
    outcome = Importer(builder).read(source.graph, values, source.results, source.effects, done=source.done)
    results = [builder.add("Result", [str(value)], name="result")[0] for value in outcome]
    written = builder.leaving()
    if ASSERTIONS in written:
        facts.outfeeds[structure.ASSERTED] = builder.add("Result", [written.pop(ASSERTIONS)], name=ASSERTIONS)
    written |= {key: str(outcome[place]) for key, place in source.carried.items()}
    written = {key: name for key, name in written.items() if name != key}
    stored = {key: builder.add("Store", [key, name], name=f"store/{key}")[0] for key, name in written.items()}
    out = [name for names in facts.outfeeds.values() for name in names]
    nodes = trimmed(builder.nodes, {*results, *stored.values(), *out})
    read = {name for node in nodes for name in reads(node)}
    if read & set(source.fed.values()):
        facts.infeeds[source.queue] = [name for name in source.fed.values() if name in read]
    return ReadStep(tuple(nodes), tuple(results), stored, *facts.of_steps())


class StepProgram:
    """A step on a device. ``feed_types``: the inputs that infeeds give, by name."""

    def __init__(
        self,
        source: StepSource,
        step: ReadStep,
        device: RunDevice,
        settings: RunSettings,
        feed_types: Callable[[ReadStep], Mapping[str, TensorType]],
    ) -> None:
        import_jax()
        self.source, self.device, self.step, self.feed_types = source, device, step, feed_types(step)
        fed, out = () if source.fed else self.feed_types, structure.leaving(step.outfeeds)
        self.settings = replace(settings, unsent=(*settings.unsent, *unsent(fed, out)))
        self.parts: SessionParts | None = None
        self.rows: dict[str, np.ndarray] = {}
        """The results of the last run, a row for each replica of this process."""
        self._runs = 0
        self._reports: SessionReports | None = None
        self.evented = source.reported
        """Whether events tell of the program."""
        self._baked: dict[str, np.ndarray] = {}
        """The values that are constants of the program, such as those that decide shapes."""
        self._on_device: dict[str, np.ndarray] = {}
        """The values that the device has, as the host knows them."""

    @property
    def outfed(self) -> list[str]:
        """The tensors that go to outfeeds."""
        return [name for names in self.step.outfeeds.values() for name in names]

    def forget(self, keys: Iterable[str]) -> None:
        """Let the next run write these values to all replicas, also where replica 0 has them."""
        for key in keys:
            self._on_device.pop(key, None)

    def run(
        self,
        iterations: int,
        values: Mapping[str, np.ndarray],
        feed: DataFeed,
        take: Callable[[str, np.ndarray], None],
    ) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Run so many iterations from ``values``. ``take`` gets what goes to outfeeds, ``[iterations, replicas, ...]``.

        Returns the results of the last iteration and the new values of what is written, those of replica 0.
        """
        if self.parts is None and self.source.reported:
            offer_step(self._modelled(), self.feed_types, self._held(values))
        parts = self._prepared(values)
        DEVICES.say_compiled()
        if DEVICES.connection == "NEVER":
            raise tf.errors.InvalidArgumentError(
                None, None, f"The device of {self.source.name!r} is configured for compilation only."
            )
        if DEVICES.connection == "PRE_COMPILE":
            return self._compiled_only(parts)
        DEVICES.say_attached(self.source.ordinal)
        self._send(parts, values)
        self._seed(parts)
        results: dict[str, np.ndarray] = {}

        replicas = self.settings.local_replicas

        def store(name: str, value: np.ndarray) -> None:
            shape = parts.model.built.infos[name].shape
            if name in self.step.results:
                self.rows[name] = rows_of_replicas(value, replicas, shape)
                results[name] = self.rows[name][0]
            else:
                take(name, elements_of_replicas(value, replicas, shape))

        try:
            parts.batches.loop(iterations, feed, store)
        finally:
            written = self._received(parts)
        if self._reports is not None and self.source.reported:
            self._reports.count_run(self._reports.engine_settings())
        if self.evented:
            note_run(self.source.name, self.source.ordinal)
        self._count_cycles(parts, iterations)
        return [results[name] for name in self.step.results], written

    def _compiled_only(self, parts: SessionParts) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Zeros in the place of results, once the executable is in the configuration's folder."""
        folder = Path(DEVICES.config.serialization_output_folder or flags().cache_directory or ".")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.source.name}.poplar_exec"
        write_executable(parts.program.prepared(SessionCall.RUN), path)
        sys.stdout.write(f"{self.source.name} was pre-compiled to {path}\n")
        infos = parts.model.built.infos
        return [np.zeros(infos[n].shape, numpy_dtype(infos[n].dtype)) for n in self.step.results], {}

    def _prepared(self, values: Mapping[str, np.ndarray]) -> SessionParts:
        changed = [k for k, v in self._baked.items() if not np.array_equal(v, values[k])]
        if self.parts is None or changed:
            parts = self._assembled(values)
            constants = parts.model.built.lowered.constants
            baked = {k: np.array(values[k]) for k in constants if k in values}
            with preparing(f"preparing {self.source.name!r}"):
                self._compile(parts, values, baked)
            self.parts, self._baked, self._on_device = parts, baked, {}
            if parts.program.on_device:
                parts.program.on_device = False  # The device holds what was compiled before.
        return self.parts

    def _count_cycles(self, parts: SessionParts, iterations: int) -> None:
        """Print the modelled cycles of a run, for as many runs as TF_POPLAR_FLAGS asks."""
        self._runs += 1
        if self._runs <= flags().counted_runs:
            step = parts.program.prepared(SessionCall.RUN).tile_report["step"]
            sys.stdout.write(f"{self.source.name}: total cycle count {step['cycles'] * iterations}\n")

    def _compile(
        self, parts: SessionParts, values: Mapping[str, np.ndarray], baked: Mapping[str, np.ndarray]
    ) -> None:
        """Compile, and report what the program takes in the form that the tile model is shown. PoplarError if that
        does not fit.
        """
        ipus = self.device.ipu_count // self.settings.local_replicas
        modelled, held = self._modelled(), self._held(values)
        if modelled.apart:
            parts.loader.compiler.form = modelled.form
            parts.loader.compiler.report = lambda: modelled_report(
                modelled, self.feed_types, held, self.settings, ipus, self.device.target
            )
        begun = time.monotonic()
        parts.loader.compile()
        whole = parts.program.prepared(SessionCall.RUN)
        training = modelled.differentiated is not None
        shown = DeviceProgram(self.device, self)
        metadata = {**whole.metadata, "batches_per_step": 1}
        shown.executable = replace(
            whole, accumulation_factor=modelled.micro_batches, training=training, metadata=metadata
        )
        if modelled.micro_batches > 1:
            parts.program.executable = each_iteration(whole, modelled.micro_batches)
        host = not self.feed_types and not self.step.outfeeds and needs_no_engine(self.step.nodes, held)
        self.evented = self.source.reported and not host
        content = modelled.content(self.feed_types, held, baked, (self.source.ordinal, str(self.settings)))
        self._reports = DEVICES.compiled.get(content)
        if not self.source.reported or self._reports is not None:
            return
        moment = datetime.now().astimezone().strftime("%Y-%m-%d__%H-%M-%S-%f")
        reports = SessionReports(shown, self.settings, ipus, f"tf_report__{moment}__{os.getpid()}")
        cached = bool(flags().cache_directory) and not parts.loader.compiler.compiled_here
        write_reports(reports, self.source.name, quiet=cached or host)
        shown.executable = None  # The reports live on; what they are of goes with this program.
        self._reports = DEVICES.compiled[content] = reports
        if not cached and self.evented:
            spent = time.monotonic() - begun
            note_compilation(self.source, self.step, spent)

    def _modelled(self) -> ModelledStep:
        return ModelledStep(
            self.source.name,
            self.step.nodes,
            self.step.places,
            self.step.losses,
            self.step.written,
            (*self.step.results, *self.outfed),
            self.source.pipeline,
            self.source.recomputes,
            tuple(sorted(DEVICES.memory_shares().items())),
            self.step.recomputed,
        )

    def _held(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {key: np.asarray(values[key]) for key in self.source.names.values()}

    def _assembled(self, values: Mapping[str, np.ndarray]) -> SessionParts:
        graph = OperatorGraph(
            self.source.name,
            self.step.nodes,
            tuple(self.feed_types),
            (*self.step.results, *self.outfed),
            self._held(values),
            dict(self.feed_types),
        )
        operators = TensorFlowOperators(DEVICES.nan_on_overflow)
        model = Model(graph, operators, updates=tuple(self.step.written.values()), shared=self.shared())
        anchors = {name: Returned(Retrieval.FINAL) for name in self.step.results}
        anchors |= {name: Returned(Retrieval.ALL) for name in self.outfed}
        plan = FixedPlan(MOST_AT_ONCE, dict(sorted(anchors.items())))
        source = SessionSource(self.source.name, model, plan, self.settings, training=False)
        built = place_and_build(source, source.request(self.device, None, None), self.device.target)
        return assemble(source, built, DeviceProgram(self.device, self))

    def shared(self) -> frozenset[str]:
        """The variables of which a machine holds one copy. Halves that are rounded at random differ on replicas."""
        if self.settings.stochastic_rounding:
            return frozenset()
        if self.settings.replicas == 1:
            return frozenset(self.step.written)
        return equal_variables(self.step.nodes, self.step.written, self.feed_types, self.settings.replicas)

    def _send(self, parts: SessionParts, values: Mapping[str, np.ndarray]) -> None:
        """Write to the device what it does not have."""
        whole = not parts.loader.loaded or not self._on_device
        if not parts.loader.loaded and self.evented:
            note_load(self.source.name, self.source.ordinal)
        parts.loader.ensure_loaded()
        held = parts.model.built.weights
        changed = {}
        for key in held:
            value = np.asarray(values[key])
            spec = parts.model.built.infos[key]
            if tuple(value.shape) != tuple(spec.shape):
                raise UsageError(
                    f"The program {self.source.name!r} was compiled for {key!r} with shape {list(spec.shape)}, not "
                    f"{list(value.shape)}."
                )
            value = np.ascontiguousarray(value, numpy_dtype(spec.dtype))
            before = self._on_device.get(key)
            if whole or before is None or not same_bits(before, value):
                changed[key] = value
        for key, value in changed.items():
            parts.weights.put(key, value)
            self._on_device[key] = np.array(value)
        if self.evented:
            sent = {key: value for key, value in changed.items() if key in self.source.resources}
            note_variables_sent(self.source, sent)
        if whole:
            parts.transfer.from_host()
        elif changed:
            all_values = parts.weights.device_values()
            parts.program.write({key: all_values[key] for key in changed})

    def _seed(self, parts: SessionParts) -> None:
        """Go on in the device's stream of random numbers, which all its programs draw from."""
        built = parts.model.built
        if built.program.uses_random or built.program.rounds_stochastically:
            parts.random.set_seed(DEVICES.next_seed(self.source.ordinal))

    def _received(self, parts: SessionParts) -> dict[str, np.ndarray]:
        """The new values of what the step writes: replica 0's. The connection gives copies, which are kept to compare
        with; so TensorFlow gets none whose memory it would take over.
        """
        names = [key for key in self.step.written if key in parts.model.built.weights]
        if not parts.program.on_device:
            return {}
        rows = parts.model.built.replica_state
        values = parts.program.read(names) if names else {}
        for key, value in values.items():
            spec = parts.model.built.infos[key]
            if key in rows and rows[key].program:
                value = value[0]
            self._on_device[key] = np.ascontiguousarray(value).reshape(spec.shape)
        return {key: not_taken_over(self._on_device[key]) for key in names}
