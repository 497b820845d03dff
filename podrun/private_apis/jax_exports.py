"""Uses of JAX beyond its public API about exported programs: their StableHLO, and the axes of its operations.

The names are in `podrun.private_apis.jax.USES`; the one parameter beyond it is in `takes_formulas`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from podrun.private_apis import find_name
from podrun.private_apis.jax import _need, missing_jax_names, run_passes

if TYPE_CHECKING:
    from jax import ShapeDtypeStruct
    from jax.export import Exported
    from jax.extend.core import Primitive

    from podrun.private_apis.mlir_types import MlirModule

_thread = threading.local()


def convolution_axes(numbers: object) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The axes in a StableHLO convolution's ``dimension_numbers``: of the image (batch, rows, columns, channels), of
    the weights (rows, columns, inputs, outputs), and of the result."""
    at = _need("jaxlib.mlir.dialects.stablehlo.ConvDimensionNumbers")(numbers)
    return (
        (at.input_batch_dimension, *at.input_spatial_dimensions, at.input_feature_dimension),
        (
            *at.kernel_spatial_dimensions,
            at.kernel_input_feature_dimension,
            at.kernel_output_feature_dimension,
        ),
        (at.output_batch_dimension, *at.output_spatial_dimensions, at.output_feature_dimension),
    )


def product_axes(numbers: object) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
    """Of a StableHLO product's ``dot_dimension_numbers``: whether it has batch axes, and the axes of the left and right
    operands that it sums over."""
    at = _need("jaxlib.mlir.dialects.stablehlo.DotDimensionNumbers")(numbers)
    left, right = at.lhs_contracting_dimensions, at.rhs_contracting_dimensions
    return bool(at.lhs_batching_dimensions), tuple(left), tuple(right)


def reads_stablehlo() -> bool:
    """Whether the installed jaxlib has what `exported_stablehlo` and `mlir` need."""
    ends = "ir.Operation", "deserialize_portable_artifact", "make_ir_context"
    return not any(use.name.endswith(ends) for use in missing_jax_names())


@contextmanager
def exported_stablehlo(exported: Exported) -> Iterator[MlirModule]:
    """The StableHLO of a ``jax.export.Exported``, in an MLIR context of its own or that of `one_context`."""
    read = _need("jax._src.lib._jax.mlir.deserialize_portable_artifact")
    with _need("jax._src.interpreters.mlir.make_ir_context")():
        yield read(exported.mlir_module_serialized)


@functools.cache
def _strip_programs() -> None:
    """Let threads in `without_locations` take locations out of what JAX is about to write."""
    module, write = find_name("jax._src.export._export"), _need("jax._src.export._export._module_to_bytecode")

    def write_program(program: MlirModule) -> object:
        if getattr(_thread, "strips", False):
            with program.context:
                run_passes(program, "builtin.module(strip-debuginfo)")
        return write(program)

    module._module_to_bytecode = write_program


@contextmanager
def without_locations() -> Iterator[None]:
    """A context in which this thread exports without source locations: no path, no line, no argument name of the traced
    function. So the bytes depend on what is computed and on nothing else."""
    _strip_programs()
    before, _thread.strips = getattr(_thread, "strips", False), True
    try:
        yield
    finally:
        _thread.strips = before


def export_for_cpu(
    function: Callable[..., Any],
    operands: Sequence[ShapeDtypeStruct],
    formulas: Mapping[Primitive, Callable[..., Sequence[Any]]],
) -> Exported:
    """``function`` of such operands as StableHLO for the CPU. ``formulas``: what primitives become there in place of
    what JAX makes of them, as functions of their operands that give a list of their results. A JAX whose ``export`` has
    no ``_override_lowering_rules`` makes of them what it makes: the formulas have to give the same bits."""
    import jax.export
    from jax.interpreters import mlir

    rules = tuple((primitive, mlir.lower_fun(formula)) for primitive, formula in formulas.items())
    export: Callable[..., Callable[..., Exported]] = jax.export.export
    options = {_RULES: rules} if takes_formulas() else {}
    return export(jax.jit(function), platforms=("cpu",), **options)(*operands)


@functools.cache
def takes_formulas() -> bool:
    """Whether the installed JAX lets `export_for_cpu` say what primitives become."""
    import jax.export

    return _RULES in inspect.signature(jax.export.export).parameters


_RULES = "_override_lowering_rules"
