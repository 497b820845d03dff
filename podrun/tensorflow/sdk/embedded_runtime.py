"""``application_compile_op`` and ``embedded_runtime``: a loop compiled to a PopEF file, and run from there.

The loop's infeed and outfeed become inputs and outputs of the file; its variables are constants, with the values of the
moment at which it is compiled. A call gives one element to the device, which runs as many iterations as the loop has
and fills what is missing with zeros that nobody sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from podrun.core.errors import ConfigError, PodrunError, UnsupportedError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.compiler import ServedModel
from podrun.serving.loaded_model import LoadedModel
from podrun.serving.runtime.config import RuntimeConfig
from podrun.tensorflow.capture.markers import REFERENCES, mark, reference
from podrun.tensorflow.capture.program_graphs import IpuGraph, parameter, trace
from podrun.tensorflow.execution.host_program import (
    HostProgram,
    ProgramPart,
    fed_names,
    feed_types,
    input_key,
)
from podrun.tensorflow.execution.launching import (
    in_words_of_the_sdk,
    raising_itself,
    read_handle,
    value_tensor,
)
from podrun.tensorflow.execution.queue_loops import main_loop
from podrun.tensorflow.graph.structure import leaving
from podrun.tensorflow.sdk.application_signature import SIGNATURE, signature_blob, taken_input
from podrun.tensorflow.sdk.application_signature import find_opaque_blob as _find_opaque_blob  # noqa: F401
from podrun.tensorflow.sdk.served_programs import ServedArguments, ServedStep, write_program_file


def experimental_application_compile_op(
    func: Callable[..., Any],
    inputs: Sequence[Any] | None = None,
    output_path: str | None = None,
    freeze_variables: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """The name of the file, ``output_path`` or a temporary one, to which ``func`` is compiled for ``inputs``: a string
    tensor. With ``freeze_variables`` variables are no inputs of the file. A function without queues has its inputs and
    results as those of the file. UsageError for a loop with an infeed or an outfeed alone, and for a function without
    results.
    """
    values = [tf.convert_to_tensor(v) for v in inputs or ()]
    late = [
        f"input/{i}" for i, v in enumerate(values) if tf.executing_eagerly() or tf.get_static_value(v) is None
    ]
    graph = IpuGraph("application", 0, automatic=tf.executing_eagerly())
    parameters = [parameter(graph, v, f"input_{i}") for i, v in enumerate(values)]
    own = getattr(func, "python_function", func)
    outcome = [
        _as_result(graph, r) for r in tf.nest.flatten(trace(graph, own, parameters, convert=own is not func))
    ]
    effects = [r for r in outcome if isinstance(r, tf.Operation)]
    effects += [t.op for t in outcome if isinstance(t, tf.Tensor)]
    captured = [inner for _, inner in graph.captures]
    graph.inputs = [*parameters, *captured]
    effects += graph.control_outputs
    results = [t for t in outcome if isinstance(t, tf.Tensor)]
    alone = main_loop(graph) is None and bool(results)
    if alone:
        program, values = _fed_program(graph, parameters, results, effects), []
        taken: int | None = len(parameters)
    else:
        program = HostProgram(graph, [], effects)
        elements = list(program.step.infeeds.values())
        taken = len(elements[0]) if len(elements) == 1 else None
    if not leaving(program.step.outfeeds) or not (program.step.infeeds or alone):
        raise UsageError(
            "experimental_application_compile_op takes a function with inputs and results, or a loop that takes from "
            "an infeed and gives to an outfeed.",
            hint="return ipu.loops.repeat(iterations, body, infeed_queue=infeed), with outfeed.enqueue in body",
        )
    outer = [*values, *(tensor for tensor, _ in graph.captures)]
    names = {} if freeze_variables else _variable_names(outer)
    path = output_path or os.path.join(tempfile.mkdtemp(), "application.poplar_exec")
    application = CompiledApplication(path, program, alone, taken, names, late, [t.name for t in results])
    if tf.executing_eagerly():
        return tf.constant(application.write(*(read_handle(t) for t in outer)).item())
    arguments = [value_tensor(t) for t in outer]
    return tf.numpy_function(raising_itself(application.write), arguments, tf.string, name=name)


@dataclass(frozen=True, slots=True)
class CompiledApplication:
    """What is written to a file. ``alone``: a function without queues; ``taken``: how many inputs a call gives.
    ``variables``: the names of those that are not frozen, and their places. ``late`` and ``results``: names of further
    inputs that no constant has, and of the results.
    """

    path: str
    program: HostProgram
    alone: bool
    taken: int | None
    variables: Mapping[str, int]
    late: Sequence[str]
    results: Sequence[str]

    def write(self, *arrays: np.ndarray) -> np.ndarray:
        """Compile with the values of all inputs, in the order of the program's keys, and write the file. Returns its
        name, a 0-dimensional array of bytes. ``InternalError`` of TensorFlow where the file cannot be written.
        """
        program, names = self.program, sorted(self.variables, key=_order)
        held = dict(zip(program.keys, arrays, strict=True))
        compiled_with = [_described(name, arrays[self.variables[name]]) for name in names]
        iterations = program.start_loop(held)
        outputs = [f"output_{place:03d}" for place in range(len(leaving(program.step.outfeeds)))]
        kinds = feed_types(program.step)
        needed = {key: np.asarray(held[key]) for key in program.source_keys}
        served = ServedStep(program.step, kinds, outputs, needed, program.shards)
        streams = {"streamed_inputs": list(kinds), "streamed_outputs": outputs} if not self.alone else {}
        blobs = {
            _STARTUP: json.dumps(compiled_with).encode(),
            _TAKEN: json.dumps(self.taken).encode(),
            SIGNATURE: signature_blob({"inputs": [*names, *self.late], "outputs": self.results, **streams}),
        }
        with _compiling_for(self.path):
            write_program_file(served, self.path, max(iterations, 1), blobs)
        return np.array(self.path.encode())


@contextlib.contextmanager
def _compiling_for(path: str) -> Iterator[None]:
    """Tell in the SDK's words that a file cannot be written, or that an IPU lacks an operation or type."""
    try:
        yield
    except ConfigError as error:
        words = f"Failed to open file for writing: {path}. {error}"
        raise tf.errors.InternalError(None, None, words) from error
    except UnsupportedError as error:
        words = f"Detected unsupported operations when trying to compile graph: {error}"
        raise tf.errors.InvalidArgumentError(None, None, words) from error


def _as_result(graph: IpuGraph, result: object) -> object:
    """A result of a function as a tensor of its graph; operations and None stay."""
    if result is None or isinstance(result, (tf.Operation, tf.Tensor)):
        return result
    with graph.as_default():
        return tf.convert_to_tensor(result)


def _fed_program(
    graph: IpuGraph,
    parameters: Sequence[tf.Tensor],
    results: Sequence[tf.Tensor],
    effects: Sequence[tf.Operation],
) -> HostProgram:
    """The program of a function that takes its parameters from a queue, and gives its results to another one."""
    with graph.as_default():
        (taken,) = mark(
            "enqueue", results, [tf.TensorSpec([], tf.bool)], stateful=True, queue=reference(None)
        )
    queue = reference(None)
    captured = graph.inputs[len(parameters) :]
    keys = [input_key(tensor, place) for place, tensor in enumerate(captured)]
    part = ProgramPart(0, captured, keys, fed=parameters, queue=queue)
    program = HostProgram(graph, [], [*effects, taken.op], part=part)
    specs = dict(zip(fed_names(queue, len(parameters)), parameters, strict=True))
    used = program.step.infeeds.get(queue, [])
    REFERENCES[queue] = ServedArguments([tf.TensorSpec(specs[n].shape, specs[n].dtype) for n in used], used)
    return program


_STARTUP = "podrun.tensorflow.startup"
"""The part of a file that describes its variables, if they were not frozen, in the order in which they are taken."""
_TAKEN = "podrun.tensorflow.taken"
"""The part of a file that says how many inputs a call gives, with those that the program does not read; null for a loop
that takes from several infeeds.
"""


@dataclass(frozen=True, slots=True)
class CompiledVariable:
    """A variable of a file, with the digest of the value that it was compiled with."""

    name: str
    shape: list[int]
    dtype: str
    digest: str


def _described(name: str, value: np.ndarray) -> tuple[str, list[int], str, str]:
    return name, list(value.shape), value.dtype.name, _digest(value)


def _digest(value: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _order(name: str) -> tuple[str, int]:
    """The order of names: ``XLA_Args/2`` is before ``XLA_Args/10``."""
    last = name.removeprefix("XLA_Args/")
    return ("", int(last)) if last.isdecimal() else (name, 0)


def _compiled_variables(path: str) -> list[CompiledVariable] | None:
    """The variables of a file; None for one that is still to be written, or that does not say. ConfigError for a file
    that is none.
    """
    described = ServedModel(path).reader.blob(_STARTUP) if os.path.exists(path) else None
    return None if described is None else [CompiledVariable(*entry) for entry in json.loads(described)]


def _variable_names(inputs: Sequence[tf.Tensor]) -> dict[str, int]:
    """The names of variables as inputs of an application, and their places among its inputs."""
    handles = [(place, tensor) for place, tensor in enumerate(inputs) if tensor.dtype == tf.resource]
    eager = tf.executing_eagerly()
    return {f"XLA_Args/{place if eager else tensor.op.name}": place for place, tensor in handles}


def _check_startup(path: str, inputs: object) -> None:
    """ValueError, in the SDK's words, for inputs that are not those of the file's variables, in the order of names.
    UnsupportedError for values other than those that the file was compiled with.
    """
    described = _compiled_variables(path)
    wanted = described or []
    if isinstance(inputs, Mapping):
        for own in wanted:
            if own.name not in inputs:
                raise ValueError(f"Failed to find input tensor with name '{own.name}' in input dictionary.")
        inputs = [inputs[own.name] for own in wanted]
    if not isinstance(inputs, (list, tuple)):
        raise ValueError("Expected the inputs to be a list.")
    if described is None:
        return
    if len(inputs) != len(wanted):
        raise ValueError(
            f"Embedded application runtime expects {len(wanted)} inputs, but {len(inputs)} were provided."
        )
    for place, (own, value) in enumerate(zip(wanted, inputs, strict=True)):
        symbolic = isinstance(value, tf.Tensor) and not hasattr(value, "numpy")
        array = value if symbolic else np.asarray(value)
        shape, dtype = list(array.shape), tf.as_dtype(array.dtype)
        at = f"at position {place} ('{own.name}'). Expected"
        if shape != own.shape:
            raise ValueError(f"Mismatched input shape {at} {own.shape}, but input {place} has shape {shape}.")
        if dtype != tf.as_dtype(own.dtype):
            raise ValueError(
                f"Mismatched input dtype {at} <dtype: '{own.dtype}'>, but input {place} has dtype {dtype.name}."
            )
        if not symbolic and _digest(array) != own.digest:
            raise UnsupportedError(
                f"'{own.name}' is not what '{path}' was compiled with: podrun compiles variables into the file.",
                hint="Run the operation of experimental_application_compile_op again after the variables have changed.",
            )


class EmbeddedContext:
    """A program in a file that is being run. The IPUs are taken at the first call."""

    def __init__(self, executable_file: str, timeout: float | None) -> None:
        self.executable_file, self.timeout = executable_file, timeout
        self._runner: LoadedModel | None = None
        self.taken: int | None = None
        """How many inputs a call gives; None: those that the program reads."""

    @property
    def runner(self) -> LoadedModel:
        """The program on its IPUs; the first read loads it from the file. ConfigError if the file holds no program."""
        if self._runner is None:
            model = ServedModel(self.executable_file)
            self.taken = json.loads(model.reader.blob(_TAKEN) or b"null")
            self._runner = RuntimeConfig().put_on_ipus(model)
        return self._runner


_contexts: dict[str, EmbeddedContext] = {}


def embedded_runtime_start(
    executable_file: str | bytes | tf.Tensor,
    inputs: Sequence[Any] | Mapping[str, Any],
    name: str,
    timeout: float | None = None,
) -> EmbeddedContext:
    """Start the program in a file. UsageError for a name that another program has, ValueError for ``inputs`` that are
    not the values of its variables: a list in the order of their names, or by name.
    """
    path = os.fsdecode(executable_file.numpy() if hasattr(executable_file, "numpy") else executable_file)
    _check_startup(path, inputs)
    if name in _contexts and _contexts[name].executable_file != path:
        raise UsageError(
            f"An embedded runtime {name!r} runs another program: {_contexts[name].executable_file}."
        )
    return _contexts.setdefault(name, EmbeddedContext(path, timeout))


def embedded_runtime_call(inputs: Sequence[Any], context: EmbeddedContext) -> list[tf.Tensor]:
    """The outputs, in the order of the results, for ``inputs``: one element of the loop's infeed, or the arguments of a
    function. UsageError for another number of inputs, and for those of other shapes or kinds of numbers.
    """
    runner = context.runner
    wanted = sorted(runner.inputs.values(), key=lambda d: int(d.name.rpartition("/")[2]))
    leaving = sorted(runner.outputs.values(), key=lambda d: d.name)
    values = list(inputs)
    count = len(wanted) if context.taken is None else context.taken
    if len(values) != count:
        raise UsageError(f"The program has {count} inputs, not {len(values)}.")
    if count != len(wanted):
        values = [values[int(d.name.rpartition("/")[2])] for d in wanted]
    tensors = [taken_input(place, values[place], d.dtype) for place, d in enumerate(wanted)]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        named = {d.name: np.asarray(a, d.dtype) for d, a in zip(wanted, arrays, strict=True)}
        for place, description in enumerate(wanted):
            shape = named[description.name].shape
            if shape != description.shape:
                raise UsageError(
                    f"Input {place} has shape {list(shape)}; the program takes {list(description.shape)}."
                )
        # One element of any shapes has no batch, which a `ModelRunner` divides.
        results, _ = runner.run(named, 1)
        return [results[d.name].reshape(d.shape) for d in leaving]

    if tf.executing_eagerly():
        return [tf.constant(value) for value in _raised_as_in_programs(run)(*(t.numpy() for t in tensors))]
    outputs = tf.numpy_function(
        raising_itself(_raised_as_in_programs(run)), tensors, [tf.as_dtype(d.dtype) for d in leaving]
    )
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    for output, description in zip(outputs, leaving, strict=True):
        output.set_shape(description.shape)
    return outputs


def _raised_as_in_programs(run: Callable[..., list[np.ndarray]]) -> Callable[..., list[np.ndarray]]:
    """A run of a file whose errors are those that programs raise."""

    def own(*arrays: np.ndarray) -> list[np.ndarray]:
        try:
            return run(*arrays)
        except PodrunError as error:
            raise in_words_of_the_sdk(error) from error

    return own


def embedded_runtime_start_and_call(
    inputs: Sequence[Any], executable_file: str, startup_inputs: Sequence[Any], name: str
) -> list[tf.Tensor]:
    """Start the program if it has not been started, and call it."""
    return embedded_runtime_call(inputs, embedded_runtime_start(executable_file, startup_inputs, name))


def application_runtime(
    inputs: Sequence[Any],
    filename: str | bytes | tf.Tensor,
    engine_name: str,
    timeout_us: float | None = None,
    name: str | None = None,
) -> tf.Operation | None:
    """Start the program in a file. Returns an operation, which `application_call` waits for, as programs write it."""
    embedded_runtime_start(filename, list(inputs), engine_name, timeout_us)
    return None if tf.executing_eagerly() else tf.no_op(name=name)


def application_call(
    infeeds: Sequence[Any], outfeed_types: Sequence[tf.DType], engine_name: str, name: str | None = None
) -> list[tf.Tensor]:
    """The outputs of a program that `application_runtime` started. UsageError for one that it did not start, or that
    has outputs of other types.
    """
    if engine_name not in _contexts:
        raise UsageError(
            f"No application runtime {engine_name!r} was started.",
            hint=f'gen_application_runtime.application_runtime(inputs=[], filename=..., engine_name="{engine_name}")',
        )
    outputs = embedded_runtime_call(infeeds, _contexts[engine_name])
    own, asked = [t.dtype for t in outputs], [tf.as_dtype(kind) for kind in outfeed_types]
    if own != asked:
        raise UsageError(f"The program of {engine_name!r} gives {own}, not {asked}.")
    return outputs


def embedded_runtime_stop(context: EmbeddedContext) -> NoReturn:
    """Refused: the SDK does not have it either."""
    raise NotImplementedError("embedded_runtime_stop is not implemented, in the SDK neither.")
