"""Custom operators in Python: a program's own operator as a JAX function.

    import jax.numpy as jnp
    from podrun.popart import register_op

    def cube(x, *, scale=1.0):
        return scale * x ** 3

    register_op("custom.ops", "Cube", 1, cube)
    (y,) = builder.customOp("Cube", 1, "custom.ops", [x], {"scale": 2.0})

Operators compiled for the SDK (C++ libraries) cannot be loaded: they are code for another machine.
`explain_libraries` makes the attempt say so. A program that loads one runs unchanged with ``PODRUN_CUSTOM_OPS=ops.py``:
the file registers the operators (`load_files`), and the library is left alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podrun.core.errors import NotFoundError
from podrun.popart.operators.cpp_operators import listed_operators, operators_of, replacement, sources_beside
from podrun.popart.values.exceptions import popart_exception, popart_unsupported
from podrun.popart.values.tensor_info import TensorInfo, data_type_of
from podrun.runtime.user_operators import (
    FILES,
    UserFunction,
    UserGradient,
    UserOperator,
    custom_op_files,
    register_user_operator,
    run_custom_op_files,
    with_own_gradient,
)

Function = UserFunction

_RESERVED = ("", "ai.onnx", "ai.onnx.ml")
_HOW = (
    "Give what the operator computes as a JAX function: podrun.popart.register_op(domain, name, version, function); "
    f"in a file of its own if the program is to stay as it is: {FILES}=ops.py podrun ..."
)

_registered: dict[tuple[str, str], dict[int, Function]] = {}


def register_op(
    domain: str, name: str, version: int, jax_function: Function, gradient: UserGradient | None = None
) -> None:
    """Make operator ``name`` of ``domain`` known to builders and sessions, from ``version`` on.

    Attributes of the node are keyword arguments of the function; inputs that are left out are None. The
    gradient is JAX's unless one is given. popart_exception for operators that PopART has (ai.graphcore may get
    others: programs use that domain too) and for a version below 1.
    """
    from podrun.onnx_models.ops.registry import GRAPHCORE, find_onnx_operator, operator

    own = (
        domain == GRAPHCORE
        and not registered(domain, name)
        and find_onnx_operator(domain, name, version) is not None
    )
    if domain in _RESERVED or own:
        raise popart_exception(
            f"Operators of domain {domain!r} are PopART's own: register yours in another domain."
            if not own
            else f"Operator {domain}.{name} is PopART's own: register yours under another name."
        )
    if not isinstance(version, int) or version < 1:
        raise popart_exception(
            f"The version of operator {domain}.{name} must be a positive number, not {version!r}."
        )
    if not callable(jax_function):
        raise TypeError(f"register_op(): {jax_function!r} is not callable.")
    function = with_own_gradient(UserOperator(jax_function, gradient))
    register_user_operator(name, jax_function, gradient)

    def run(context: Any, node: Any, *inputs: Any) -> Any:
        results = function(*inputs, **_public(node.attributes))
        return tuple(results) if isinstance(results, (list, tuple)) else results

    run.__name__ = run.__qualname__ = f"{domain}.{name}"
    operator(domain, name, since=(version,), fixed=False)(run)
    _registered.setdefault((domain, name), {})[version] = function


def _public(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without PopART's own (placement and hints)."""
    return {key: value for key, value in attributes.items() if not key.startswith("__")}


def registered(domain: str, name: str) -> bool:
    """True iff `register_op` knows the operator."""
    return (domain, name) in _registered


def infer(
    domain: str, name: str, version: int, inputs: Sequence[TensorInfo | None], attributes: Mapping[str, Any]
) -> list[TensorInfo | None]:
    """Types and shapes of a registered operator's outputs, or an empty list where inputs are not known."""
    versions = [v for v in _registered.get((domain, name), {}) if v <= version]
    if not versions or any(info is None or not info.is_static for info in inputs):
        return []
    import jax

    function = _registered[domain, name][max(versions)]
    struct: Any = jax.ShapeDtypeStruct
    known = [struct(tuple(i.shape()), i.numpy_dtype()) for i in inputs if i is not None]
    try:
        results = jax.eval_shape(functools.partial(function, **_public(attributes)), *known)
    except (TypeError, ValueError) as error:
        raise popart_exception(f"{domain}.{name} cannot take its inputs {list(inputs)}: {error}") from error
    arrays = results if isinstance(results, (list, tuple)) else [results]
    return [TensorInfo(data_type_of(item.dtype), item.shape) for item in arrays]


_CTYPES = os.path.dirname(ctypes.__file__)
_SDK_LIBRARIES = (
    "libpopart",
    "libpoplar",
    "libpoplibs",
    "libpopops",
    "libpoputil",
    "libsnap",
    "libpoprithms",
)


def load_files(environ: Mapping[str, str] | None = None) -> None:
    """Run the files that ``PODRUN_CUSTOM_OPS`` names. popart_exception for one that is not there."""
    try:
        run_custom_op_files(environ)
    except NotFoundError as error:
        raise popart_exception(error.message) from None


def _called_by_program() -> bool:
    """Whether the program itself loads a library, not one of the modules that are installed."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_CTYPES):
        frame = frame.f_back
    return not frame.f_code.co_filename.startswith(installed)


def _told(library: Path) -> str:
    """What to do about a library that is not there: by name if the sources of its operators lie nearby."""
    sources = sources_beside(library)
    operators = operators_of(sources)
    if not operators:
        return f"If it holds custom operators for the IPU, podrun does not need it. {_HOW}"
    names = ", ".join(path.name for path in sources)
    return f"podrun does not need it. {names} near it defines {listed_operators(operators)}. {replacement(operators)}"


def explain_libraries() -> None:
    """Let loading a library that needs the SDK's own libraries fail with a message about what to do instead.

    If a file stands for it (`FILES`), the program gets a library without operators whatever the reason, and a warning.
    """
    if getattr(ctypes.CDLL.__init__, "_podrun", False):
        return
    original = ctypes.CDLL.__init__

    @functools.wraps(original)
    def load(self: ctypes.CDLL, name: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, name, *args, **kwargs)
        except OSError as error:
            path = os.fspath(name) if isinstance(name, (str, os.PathLike)) else ""
            compiled = any(library in str(error) for library in _SDK_LIBRARIES)
            wanted = os.sep in path or (path and _called_by_program())
            if (compiled or wanted) and custom_op_files():
                logging.getLogger("podrun.popart").warning(
                    "%s is not loaded: its operators are those of %s",
                    name,
                    os.pathsep.join(custom_op_files()),
                )
                original(self, None, *args, **kwargs)
            elif compiled:
                raise popart_unsupported(
                    f"{name}: a custom operator library compiled for the SDK cannot be loaded here, because "
                    f"it holds code for the IPU and its libraries ({error}).",
                    hint=_HOW,
                ) from error
            else:
                if not wanted:
                    raise
                error.add_note(f"hint: {_told(Path(path))}")
                raise error.with_traceback(None) from None

    load._podrun = True  # type: ignore[attr-defined]
    ctypes.CDLL.__init__ = load  # type: ignore[method-assign]
