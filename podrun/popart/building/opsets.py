"""``builder.aiOnnx`` and its relations: one method per operator, made from ONNX's schemas.

Method names are the operators' in lower case (``logical_and`` and so on where Python keeps the word), arguments are the
input list, the number of outputs where it varies, required attributes, the other attributes in alphabetical order with
their defaults, and debugContext, as in the PopART Python API reference.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import numpy as np

from podrun.popart.building.graph_builder import BuilderModel
from podrun.popart.building.node_inference import multi_convolution
from podrun.popart.building.schemas import (
    AUTO_PAD,
    Parameter,
    Unfit,
    onnx_methods,
    onnx_operator,
    onnx_parameters,
    onnx_value,
)
from podrun.popart.operators.graphcore_ops import NODE_NAMES, OPS, REQUIRED, GraphcoreOp, attribute_value
from podrun.popart.values.debug import DebugContext, note
from podrun.popart.values.exceptions import incompatible, popart_exception

if TYPE_CHECKING:
    from podrun.popart.building.builder import Builder

P = ParamSpec("P")
R = TypeVar("R")

_NO_ARGS = {"Constant", "RandomNormal", "RandomUniform", "SequenceEmpty"}
"""Operators whose methods have no input list."""


class _OpFamily:
    """Base of the operator families: a method for each operator, which binds arguments as pybind11 would and raises its
    kind of TypeError.
    """

    _set_name: str
    """The operator set, in messages."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def _operators(self) -> Mapping[str, str]:
        """Method name -> operator; none unless a family has some."""
        return {}

    def _operator(self, method: str) -> str | None:
        """The operator of a method; None if there is no such method."""
        return self._operators().get(method)

    def _call(self, method: str, op_type: str, *args: object, **kwargs: object) -> Any:
        """Add a node; returns the name of its output, or the names of several."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        op_type = self._operator(name)
        if op_type is None:
            near = difflib.get_close_matches(name, self._operators(), n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"{self._set_name} has no operator {name!r}.{guess}")
        method = functools.partial(self._call, name, op_type)
        method.__doc__ = f"Add a {op_type} node ({self._set_name})."
        return method

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._operators()]

    @staticmethod
    def _signature(
        before: Sequence[str],
        parameters: Sequence[tuple[str, Any]],
        after: Sequence[tuple[str, Any]],
        debug: str,
    ) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        arguments = [inspect.Parameter(name, kind) for name in before]
        for name, default in [*parameters, (debug, ""), *after]:
            value = inspect.Parameter.empty if default is REQUIRED else default
            arguments.append(inspect.Parameter(_safe(name), kind, default=value))
        return inspect.Signature(arguments)

    @staticmethod
    def _bind(method: str, signature: inspect.Signature, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if "debugContext" in signature.parameters:
            kwargs = _present_names(kwargs)
        try:
            bound = signature.bind(*args, **{_safe(name): value for name, value in kwargs.items()})
        except TypeError as error:
            raise TypeError(_incompatible(method, signature, str(error))) from None
        bound.apply_defaults()
        return {_unsafe(name): value for name, value in bound.arguments.items()}


def _present_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with debugContext for debugPrefix, its name before SDK 2.0."""
    return {"debugContext" if name == "debugPrefix" else name: value for name, value in kwargs.items()}


def takes_debug_prefix(method: Callable[P, R]) -> Callable[P, R]:
    """A method that also takes its debugContext under its former name, as PopART's methods do."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(*args, **cast(Any, _present_names(kwargs)))

    return call


def _incompatible(method: str, signature: inspect.Signature, why: str) -> str:
    """The TypeError of a call that no signature takes, in the shape of pybind11's."""
    shown = str(signature).replace("lambda_", "lambda").replace("'", '"')
    return (
        f"{method}(): incompatible function arguments. The following argument types are supported:\n"
        f"    1. {method}{shown}\n\n{why[:1].upper()}{why[1:]}."
    )


def _safe(name: str) -> str:
    """A Python parameter's name for an attribute: `lambda` cannot be one."""
    return "lambda_" if name == "lambda" else name


def _unsafe(name: str) -> str:
    return "lambda" if name == "lambda_" else name


def check_inputs(method: str, args: object) -> list[str]:
    """The input list of an operator method, or TypeError."""
    if isinstance(args, (str, bytes)) or not isinstance(args, (list, tuple)):
        raise incompatible(method, f"Inputs are a list of tensors, not {args!r}.")
    wrong = [name for name in args if not isinstance(name, str)]
    if wrong:
        raise incompatible(method, f"Inputs are tensor names, not {wrong[0]!r}.")
    return list(args)


def debug_name(context: object) -> str:
    """The name in a debugContext: a string or a DebugContext."""
    return context if isinstance(context, str) else str(getattr(context, "name", ""))


class AiOnnx(_OpFamily):
    """The ai.onnx operators at one opset version."""

    def __init__(self, builder: Builder, version: int) -> None:
        super().__init__(builder)
        self.version, self._set_name = version, f"ai.onnx opset {version}"

    def __str__(self) -> str:
        return f"AiOnnx{self.version}"

    def _operators(self) -> Mapping[str, str]:
        return onnx_methods(self.version)

    def _operator(self, method: str) -> str | None:
        return onnx_operator(method, self.version)

    def _call(self, method: str, op_type: str, *args: object, **kwargs: object) -> Any:
        from onnx import defs

        schema = defs.get_schema(op_type, self.version, "")
        parameters = onnx_parameters(op_type, self.version)
        varies = schema.min_output != schema.max_output
        before = [*([] if op_type in _NO_ARGS else ["args"]), *(["num_outputs"] if varies else [])]
        usual = [(p.name, p.default) for p in parameters if p.name != AUTO_PAD]
        last = [(p.name, p.default) for p in parameters if p.name == AUTO_PAD]
        signature = self._signature(before, usual, last, "debugContext")
        bound = self._bind(method, signature, args, kwargs)
        if isinstance(bound.get("is_value_sparse"), str):  # Before opset 11 the name stands in its place.
            bound["debugContext"] = bound.pop("is_value_sparse")
        inputs = check_inputs(method, bound.pop("args", []))
        if not schema.min_input <= len(inputs) <= schema.max_input:
            raise popart_exception(
                f"{op_type} has invalid number of inputs: {len(inputs)} given, "
                f"{_range(schema.min_input, schema.max_input)} taken (ai.onnx, opset {self.version})."
            )
        outputs = bound.pop("num_outputs", schema.max_output)
        if not isinstance(outputs, int) or not schema.min_output <= outputs <= schema.max_output:
            raise popart_exception(
                f"{op_type} has an invalid number of outputs: {outputs!r} asked, "
                f"{_range(schema.min_output, schema.max_output)} possible (ai.onnx, opset {self.version})."
            )
        context = bound.pop("debugContext")
        try:
            attributes = _attributes(op_type, parameters, bound)
        except Unfit as why:
            raise TypeError(_incompatible(method, signature, str(why))) from None
        names = self._builder._add_onnx(
            op_type, self.version, inputs, outputs, attributes, debug_name(context)
        )
        note(context, method, names)
        return names if varies or outputs != 1 else names[0]


def _attributes(op_type: str, parameters: Sequence[Parameter], bound: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a node, from a method's arguments; those without a value are left out. Unfit for a value of
    another kind.
    """
    values = {
        parameter.name: onnx_value(op_type, parameter, bound[parameter.name])
        for parameter in parameters
        if parameter.name != "is_value_sparse"
    }
    return {name: value for name, value in values.items() if value is not None}


def _range(least: int, most: int) -> str:
    if least == most:
        return str(least)
    return f"at least {least}" if most >= 1 << 20 else f"{least} to {most}"


class AiGraphcore(_OpFamily):
    """The ai.graphcore operators, version 1."""

    version = 1

    _set_name = "ai.graphcore"

    def _operators(self) -> Mapping[str, str]:
        return {method: op.op_type for method, op in OPS.items()}

    def _call(self, method: str, op_type: str, *args: object, **kwargs: object) -> Any:
        op = OPS[method]
        # Operators that are added without inputs take their attributes first.
        before = [
            *([] if op.inputs == (0, 0) else ["args"]),
            *(["num_outputs"] if op.outputs == "num_outputs" else []),
        ]
        debug = {"ctcbeamsearchdecoder": "debug_context", "tensorremap": "debugPrefix"}.get(
            method, "debugContext"
        )
        signature = self._signature(before, op.attributes, op.keyword_attributes, debug)
        bound = self._bind(method, signature, args, kwargs)
        if method == "init" and isinstance(bound["batch_axis"], (str, DebugContext)):
            bound[debug], bound["batch_axis"] = (
                bound["batch_axis"],
                -1,
            )  # This is the form without a batch axis.
        convolutions = len(bound["args"]) if method == "multiconv" else 1
        if method == "multiconv":
            bound = multi_convolution(self._builder, bound)
        elif method == "reshape" and isinstance(bound["args"], str):
            bound["args"] = [bound["args"]]
        inputs = check_inputs(method, bound.pop("args", []))
        if not op.inputs[0] <= len(inputs) <= op.inputs[1]:
            raise popart_exception(
                f"{op.op_type} has invalid number of inputs: {len(inputs)} given, {_range(*op.inputs)} taken "
                "(ai.graphcore)."
            )
        if method == "abort" and not inputs:
            # ONNX has no nodes without inputs and outputs: an abort without a condition gets a condition that is
            # true.
            inputs = [self._builder.addInitializedInputTensor(np.array([True]), "abort")]
        count = bound.pop("num_outputs", convolutions if method == "multiconv" else op.outputs)
        context = bound.pop(debug)
        attributes = {}
        for name, value in bound.items():
            if value is None or (isinstance(value, (list, tuple)) and not value and method != "reducemedian"):
                continue
            attributes[NODE_NAMES.get(name, name)] = self._attribute(method, op, name, value)
        names = self._builder._add_graphcore(op, inputs, int(count), attributes, debug_name(context))
        note(context, method, names)
        if op.listed:
            return names
        return names[0] if names else None

    @staticmethod
    def _attribute(method: str, op: GraphcoreOp, name: str, value: object) -> Any:
        if isinstance(value, BuilderModel):
            return value._subgraph_proto(called=True)
        default = dict((*op.attributes, *op.keyword_attributes)).get(name)
        if isinstance(default, float) and isinstance(value, (int, np.floating)):
            value = float(value)
        if name in ("lambda", "scale") and isinstance(value, (int, float, np.floating, np.integer)):
            value = float(value)
        if (
            isinstance(value, (str, type(None)))
            and isinstance(default, (int, float))
            and not isinstance(value, type(default))
        ):
            raise incompatible(method, f"{op.op_type}'s {name} cannot be {value!r}.")
        plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        return attribute_value(op, name, plain)


class AiOnnxMl(_OpFamily):
    """The ai.onnx.ml operators: feature engineering on the host's side, which the IPU has no use for."""

    version = 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise popart_exception(
                f"Operator ai.onnx.ml.{name} cannot run on an IPU: PopART has no implementation of it."
            )

        return refuse
