"""Uses of JAX and jaxlib that these do not promise to keep.

`USES` lists each name with its purpose and what happens without it. ``tests/private_apis/test_jax.py`` fails with the
missing names. Nothing is imported before a function needs it: machines import this module without JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from podrun.private_apis import find_name, installed_version

if TYPE_CHECKING:
    from jax import Device
    from jax.extend.core import Jaxpr, JaxprEqn
    from jax.stages import Lowered

    from podrun.private_apis.mlir_types import MlirModule

TESTED_JAXLIB = ("0.10",)
"""Series of jaxlib in which convolutions may be rewritten. In another one XLA's own convolutions are used."""


@dataclass(frozen=True, slots=True)
class PrivateUse:
    """A private name: what it ``gives``, and what happens ``without`` it."""

    name: str
    gives: str
    without: str


_CONVOLUTIONS = "convolutions are XLA's own, which are slower; one message says so"
_LOAD = "every process lowers all pieces again, also those in the cache"
_READ = "compiled pieces are read from the cache as XLA writes them, which takes longer"
_COMPILE = "programs cannot be compiled; the error names it"
USES = (
    PrivateUse("jaxlib.xla_client.make_cpu_client", "podrun's own XLA clients", "nothing can be computed"),
    PrivateUse("jaxlib.mlir.ir.Operation", "operations of a lowered piece, to rewrite", _CONVOLUTIONS),
    PrivateUse("jaxlib.mlir.ir.RankedTensorType", "types of a lowered piece's values", _CONVOLUTIONS),
    PrivateUse("jaxlib.mlir.ir.DenseI64ArrayAttr", "attributes of rewritten operations", _CONVOLUTIONS),
    PrivateUse("jaxlib.mlir.ir.InsertionPoint", "the place of new operations", _CONVOLUTIONS),
    PrivateUse("jaxlib.mlir.passmanager.PassManager", "passes over a lowered piece", _CONVOLUTIONS),
    PrivateUse(
        "jaxlib.mlir.dialects.stablehlo.ConvDimensionNumbers", "the axes of a convolution", _CONVOLUTIONS
    ),
    PrivateUse("jaxlib.mlir.dialects.stablehlo.DotDimensionNumbers", "the axes of a product", _CONVOLUTIONS),
    PrivateUse(
        "jax._src.config.persistent_cache_min_compile_time_secs",
        "writes pieces to XLA's cache however fast they compile, and nothing else",
        "only pieces that take a second to compile are kept between processes",
    ),
    PrivateUse(
        "jax._src.lax.linalg.initialize_lapack",
        "registers LAPACK for the pieces that call it",
        "JAX registers LAPACK by itself in every process, which takes 0.15 s",
    ),
    PrivateUse(
        "jax._src.export._export._ensure_backends_initialized",
        "the place where JAX registers LAPACK by itself",
        "JAX registers LAPACK by itself in every process, which takes 0.15 s",
    ),
    PrivateUse("jax._src.interpreters.mlir.make_ir_context", "MLIR contexts", _COMPILE),
    PrivateUse("jax._src.interpreters.pxla.UnloadedMeshExecutable", "compiled pieces as functions", _LOAD),
    PrivateUse("jax._src.compilation_cache.decompress_executable", "compiled pieces in XLA's cache", _LOAD),
    PrivateUse(
        "jax._src.compilation_cache.extract_executable_and_time", "compiled pieces in XLA's cache", _LOAD
    ),
    PrivateUse(
        "jax._src.compilation_cache.combine_executable_and_time", "kept pieces without insides", _READ
    ),
    PrivateUse("jax._src.compilation_cache.compress_executable", "kept pieces without insides", _READ),
    PrivateUse("jax._src.compiler._cache_read", "names of compiled pieces in XLA's cache", _LOAD),
    PrivateUse("jax._src.lib._jax.DeviceList", "the device of a compiled piece", _LOAD),
    PrivateUse("jax._src.export._export._module_to_bytecode", "StableHLO without source locations", _COMPILE),
    PrivateUse("jax._src.lib._jax.mlir.deserialize_portable_artifact", "exported StableHLO", _COMPILE),
    PrivateUse("jax._src.source_info_util.current_name_stack", "name scopes of equations", _COMPILE),
    PrivateUse("jax._src.source_info_util.user_context", "name scopes of equations", _COMPILE),
    PrivateUse("jax.interpreters.partial_eval.dce_jaxpr", "removes equations that no result needs", _COMPILE),
    PrivateUse(
        "jax._src.config.traceback_filtering",
        "errors of a model without JAX's note about its own frames",
        "errors carry JAX's note",
    ),
    PrivateUse(
        "jax._src.config.traceback_in_locations_limit", "lowers without source lines", "it takes longer"
    ),
)


def missing_jax_names() -> list[PrivateUse]:
    """The uses whose names the installed JAX and jaxlib do not have."""
    return [use for use in USES if find_name(use.name) is None]


def _need(name: str) -> Any:
    value = find_name(name)
    if value is None:
        use = next(use for use in USES if use.name == name)
        raise ImportError(
            f"jax {installed_version('jax')} with jaxlib {installed_version('jaxlib')} has no {name}, which podrun "
            f"needs for {use.gives}: install the versions that podrun asks for (pip install --force-reinstall podrun)"
        )
    return value


_thread = threading.local()

# --- Clients, the cache, LAPACK -------------------------------------------------------------------------------


def start_cpu_client() -> Any:
    """A new XLA client for the CPU, whose calls return when their results are there. One device, whatever
    ``--xla_force_host_platform_device_count`` in ``XLA_FLAGS`` says: a client has a thread for each of its devices."""
    return _need("jaxlib.xla_client.make_cpu_client")(asynchronous=False, num_devices=1)


@contextmanager
def without_gpu_plugins() -> Iterator[None]:
    """JAX that is imported in this context looks for no plugin for AMD's GPUs: for that it reads the metadata of every
    installed package (0.07 s of a core for 350). For processes of one thread that compute on the CPU alone.
    """
    from importlib import metadata

    look = metadata.distributions
    metadata.distributions = lambda **context: ()
    try:
        yield
    finally:
        metadata.distributions = look


def written_to_cache() -> AbstractContextManager[Any]:
    """A context in which everything that is compiled is written to XLA's persistent cache, however fast it compiles."""
    return _setting("persistent_cache_min_compile_time_secs", 0.0)


def _setting(name: str, value: object) -> AbstractContextManager[Any]:
    """A context in which a setting of JAX has a value in this thread; none if JAX does not have the setting."""
    setting = find_name(f"jax._src.config.{name}")
    context: AbstractContextManager[Any] = contextlib.nullcontext() if setting is None else setting(value)
    return context


@contextmanager
def noted_entries() -> Iterator[list[str]]:
    """A context that lists the file name, in XLA's cache, of each program that this thread compiles inside, whether or
    not the file was there. Empty if the private name is gone."""
    _note_entries()
    before, _thread.entries = getattr(_thread, "entries", None), []
    try:
        yield _thread.entries
    finally:
        _thread.entries = before


def _note_entries() -> None:
    compiler, read = find_name("jax._src.compiler"), find_name("jax._src.compiler._cache_read")
    if read is None or getattr(read, "notes_entries", False):
        return

    def noting_read(module_name: str, cache_key: str, *rest: Any, **named: Any) -> Any:
        if (entries := getattr(_thread, "entries", None)) is not None:
            entries.append(f"{cache_key}-cache")
        return read(module_name, cache_key, *rest, **named)

    noting_read.notes_entries = True  # type: ignore[attr-defined]
    compiler._cache_read = noting_read


def load_compiled(
    entry: bytes, name: str, operands: Sequence[Any], results: Sequence[Any], device: Device
) -> Callable[..., Any] | None:
    """The function that an entry of XLA's cache holds, as ``jax.stages.Lowered.compile`` gives it; None if a private
    name is gone, or this jaxlib cannot read the entry or takes other fields.

    ``operands``, ``results``: what has a shape and a dtype, for each. The function gives a list.
    """
    try:
        return _compiled(entry, name, operands, results, device)
    except Exception:  # Whatever jaxlib's readers and JAX's constructors raise.
        return None


def _compiled(
    entry: bytes, name: str, operands: Sequence[Any], results: Sequence[Any], device: Device
) -> Callable[..., Any]:
    import jax

    unloaded = _need("jax._src.interpreters.pxla.UnloadedMeshExecutable")
    decompress = _need("jax._src.compilation_cache.decompress_executable")
    extract = _need("jax._src.compilation_cache.extract_executable_and_time")
    devices = _need("jax._src.lib._jax.DeviceList")((device,))
    client, one = device.client, jax.sharding.SingleDeviceSharding(device)
    code = client.deserialize_executable(extract(decompress(entry))[0], devices)
    operand_types, result_types = (
        [jax.core.ShapedArray(a.shape, a.dtype) for a in arrays] for arrays in (operands, results)
    )
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(unloaded)}
    values |= {empty: [] for empty in ("unordered_effects", "ordered_effects", "host_callbacks")}
    values |= {"xla_executable": code, "device_list": devices, "backend": client, "name": name}
    values |= {"input_avals": operand_types, "input_shardings": [one] * len(operand_types), "committed": True}
    values |= {"output_avals": result_types, "output_shardings": [one] * len(result_types)}
    values |= {
        "xla_in_layouts": [None] * len(operand_types),
        "dispatch_in_layouts": [None] * len(operand_types),
    }
    values |= {"xla_out_layouts": [None] * len(result_types), "kept_var_idx": set(range(len(operand_types)))}
    arguments: Any = (tuple(operand_types), {})
    outputs = jax.tree.structure([*result_types])
    return jax.stages.Compiled(unloaded(**values).load(), [], arguments, outputs, no_kwargs=True)


def register_lapack() -> None:
    """Let XLA find LAPACK in this process. Idempotent."""
    initialize = find_name("jax._src.lax.linalg.initialize_lapack")
    if initialize is not None:
        initialize()


def register_lapack_only_when_asked() -> None:
    """Keep JAX from registering LAPACK whenever it lowers an exported program. No-op if either name is gone."""
    export = find_name("jax._src.export._export")
    if find_name("jax._src.lax.linalg.initialize_lapack") is not None and hasattr(
        export, "_ensure_backends_initialized"
    ):
        export._ensure_backends_initialized = _do_nothing


def _do_nothing(platforms: tuple[str, ...]) -> None:
    pass


MLIR_MODULES = tuple(f"jaxlib.mlir.dialects.{name}" for name in ("builtin", "mhlo", "stablehlo"))
"""Modules that every lowering imports; a machine imports them in advance."""

# --- MLIR of lowered pieces -----------------------------------------------------------------------------------


def convolutions_problem() -> str:
    """Why convolutions cannot be rewritten with the installed jaxlib; empty if they can."""
    version = installed_version("jaxlib")
    if ".".join(version.split(".")[:2]) not in TESTED_JAXLIB:
        return f"jaxlib {version} is not one that podrun was tested with ({', '.join(TESTED_JAXLIB)})"
    gone = [use.name for use in USES if use.without == _CONVOLUTIONS and find_name(use.name) is None]
    return f"jaxlib {version} has no {', '.join(gone)}" if gone else ""


@functools.cache
def mlir() -> Any:
    """jaxlib's MLIR classes: operations, types, attributes."""
    return _need("jaxlib.mlir.ir.Operation") and find_name("jaxlib.mlir.ir")


def stablehlo(lowered: Lowered) -> MlirModule:
    """The text of a ``jax.stages.Lowered`` as a module, which may be changed."""
    return cast("MlirModule", lowered.compiler_ir("stablehlo"))


def run_passes(module: MlirModule, passes: str) -> None:
    """Run MLIR passes, such as ``builtin.module(func.func(cse))``, over a module, in place."""
    _need("jaxlib.mlir.passmanager.PassManager").parse(passes).run(module.operation)


def aliased_outputs(lowered: Lowered) -> dict[int, int]:
    """Positions of operands of a ``jax.stages.Lowered`` whose memory results take, and of these results. Empty without
    jaxlib's MLIR classes: updates then copy."""
    if find_name("jaxlib.mlir.ir.StringAttr") is None:
        return {}
    ir = mlir()
    module = stablehlo(lowered)
    main = next(op for op in module.body if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    arguments = main.attributes.get("arg_attrs", ())
    return {
        position: int(ir.IntegerAttr(attributes["tf.aliasing_output"]).value)
        for position, attributes in enumerate(arguments)
        if "tf.aliasing_output" in attributes
    }


# --- Tracing and export ---------------------------------------------------------------------------------------


@functools.cache
def _shared_contexts() -> Callable[[], Any] | None:
    """Let threads in `one_context` share a context; gives JAX's own function that makes one."""
    module = find_name("jax._src.interpreters.mlir")
    make = find_name("jax._src.interpreters.mlir.make_ir_context")
    if make is None:
        return None

    def context_of_thread() -> Any:
        shared = getattr(_thread, "context", None)
        return make() if shared is None else shared

    module.make_ir_context = context_of_thread
    return cast("Callable[[], Any]", make)


@contextmanager
def one_context() -> Iterator[None]:
    """Lower and export in one MLIR context, without frames of Python, for as long as this thread is in the context.

    JAX makes one, with all dialects, for each lowering and export: three for a piece, a quarter of the time that
    compiling a small program takes. It looks up the source lines of each operation. The exported bytes are the same.
    """
    make = _shared_contexts()
    before = getattr(_thread, "context", None)
    _thread.context = before or (None if make is None else make())
    try:
        with _setting("traceback_in_locations_limit", 0):
            yield
    finally:
        _thread.context = before


def plain_errors() -> AbstractContextManager[Any]:
    """Keep JAX's note about its own frames out of errors that are raised in a trace in this context."""
    return _setting("traceback_filtering", "off")


@functools.cache
def _scope_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    util = "jax._src.source_info_util"
    return _need(f"{util}.current_name_stack"), _need(f"{util}.user_context")


def call_in_scope(
    call: Callable[[JaxprEqn, Sequence[Any]], Any], equation: JaxprEqn, operands: Sequence[Any]
) -> Any:
    """``call(equation, operands)`` in the equation's name scopes, inside those that are open, and with its settings."""
    current_name_stack, user_context = _scope_functions()
    source = equation.source_info
    names = current_name_stack() + source.name_stack
    with user_context(source.traceback, name_stack=names), equation.ctx.manager:
        return call(equation, operands)


def bind_equation(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    """The result of an equation's primitive for operands."""
    primitive: Any = equation.primitive  # Any: JAX does not type its methods.
    return primitive.bind(*operands, **primitive.get_bind_params(equation.params))


class TracedPrimitive(Protocol):
    """A primitive of JAX, whose methods JAX does not type."""

    name: str

    def bind(self, *operands: object, **params: object) -> Any: ...

    def def_abstract_eval(self, rule: Callable[..., object]) -> object: ...
    def def_impl(self, rule: Callable[..., object]) -> object: ...


def new_primitive(name: str) -> TracedPrimitive:
    """A primitive of that name."""
    from jax.extend.core import Primitive

    return Primitive(name)


def without_unused(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr without the equations that no result needs; its arguments stay."""
    prune = _need("jax.interpreters.partial_eval.dce_jaxpr")
    return cast("Jaxpr", prune(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0])
