"""Operators of the user's own, by name: Python functions that stand for libraries compiled for the SDK.

Files that ``PODRUN_CUSTOM_OPS`` names register them. Programs of PopART and PopTorch find one by domain and
name (`podrun.popart.register_op` notes it here too), those of TensorFlow by the name of its library::

    from podrun.runtime.user_operators import register_user_operator

    register_user_operator("libcube.so", lambda x, *, scale=1.0: scale * x**3)
"""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podrun.core.environment import environment
from podrun.core.errors import NotFoundError
from podrun.core.quick_dataclass import dataclass

FILES = "PODRUN_CUSTOM_OPS"
"""Python files that register the operators of a program's compiled libraries, separated as in PATH."""

UserFunction = Callable[..., Any]
"""``function(*inputs, **attributes) -> array or tuple of arrays``, traceable by JAX."""
UserGradient = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Mapping[str, Any]], Sequence[Any]]
"""``gradient(inputs, outputs, output_gradients, attributes) -> gradients of the inputs`` (None: none)."""


@dataclass(frozen=True, slots=True)
class UserOperator:
    """A function, and its gradient if JAX's is not wanted."""

    function: UserFunction
    gradient: UserGradient | None = None


_operators: dict[tuple[str, str], UserOperator] = {}


def _stem(library: str) -> str:
    return os.path.basename(library).split(".")[0].removeprefix("lib").lower()


def register_user_operator(
    library: str, function: UserFunction, gradient: UserGradient | None = None, *, op_name: str = "Build"
) -> None:
    """Let ``function`` compute what a library's ``op_name`` does. The library's folder, ``lib`` and suffix do not
    count. TypeError for what cannot be called.
    """
    if not callable(function):
        raise TypeError(f"register_user_operator(): {function!r} is not callable.")
    _operators[_stem(library), op_name] = UserOperator(function, gradient)


def find_user_operator(library: str, op_name: str = "Build") -> UserOperator:
    """The operator of a library. NotFoundError, which says how to register one, if there is none."""
    for key in ((_stem(library), op_name), (_stem(op_name), "Build")):
        if key in _operators:
            return _operators[key]
    raise NotFoundError(
        f"{library}: an operator library compiled for the SDK cannot be loaded, because it holds code for the IPU.",
        hint="Give what it computes as a JAX function, in a file that the environment names: "
        f"register_user_operator({os.path.basename(library)!r}, function) in ops.py, {FILES}=ops.py",
    )


def custom_op_files(environ: Mapping[str, str] | None = None) -> list[str]:
    """The files that ``PODRUN_CUSTOM_OPS`` names."""
    text = environment(environ).get(FILES, "")
    return [path for path in text.split(os.pathsep) if path]


def run_custom_op_files(environ: Mapping[str, str] | None = None) -> None:
    """Run the files that ``PODRUN_CUSTOM_OPS`` names. NotFoundError for one that is not there."""
    for path in custom_op_files(environ):
        if not os.path.isfile(path):
            raise NotFoundError(f"{FILES} names {path!r}, which is no file.")
        runpy.run_path(path)


def with_own_gradient(operator: UserOperator) -> UserFunction:
    """The operator's function, differentiated by its own gradient if it has one."""
    gradient, function = operator.gradient, operator.function
    if gradient is None:
        return function
    import jax
    import jax.numpy as jnp

    def with_attributes(*inputs: Any, **attributes: Any) -> Any:
        @jax.custom_vjp
        def call(*values: object) -> Any:
            return function(*values, **attributes)

        def forward(*values: object) -> tuple[Any, Any]:
            outputs = function(*values, **attributes)
            return outputs, (values, outputs)

        def backward(kept: tuple[Any, Any], incoming: Any) -> tuple[Any, ...]:
            values, outputs = kept
            several = isinstance(outputs, (list, tuple))
            results = gradient(
                values, outputs if several else [outputs], incoming if several else [incoming], attributes
            )
            return tuple(
                jnp.zeros_like(value) if item is None else jnp.asarray(item, value.dtype)
                for value, item in zip(values, results, strict=True)
            )

        call.defvjp(forward, backward)
        return call(*inputs)

    return with_attributes


def attributes_in_text(text: str | None) -> dict[str, Any]:
    """Attributes that a program gives as text: the entries of a JSON object, else ``attributes`` itself."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError:
        return {"attributes": text}
    return value if isinstance(value, dict) else {"attributes": value}
