"""Uses of TensorFlow that TensorFlow does not promise to keep.

Everything below ``tensorflow.python`` is reached through this module alone. `REQUIRED` lists each use with its purpose;
`missing_symbols` names those that the installed TensorFlow no longer has, and `tests/private_apis/test_tensorflow.py`
fails with that list. Without any of them programs cannot be captured, so the front end refuses to start and says which
one is gone.
"""

from __future__ import annotations

import importlib
from typing import Any

REQUIRED: dict[str, str] = {
    "framework.func_graph.FuncGraph": "holds what a program computes on an IPU",
    "framework.func_graph.FuncGraph.watch_variable": "tells which variables a program reads",
    "framework.func_graph.func_graph_from_py_func": "traces a function of the program into such a graph",
    "eager.lift_to_graph.lift_to_graph": "takes initial values of variables out of a program",
    "util.object_identity.ObjectIdentityDictionary": "says what is outside of a program already",
    "framework.function_def_to_graph.function_def_to_graph": "reads a function that a program calls",
    "framework.ops.Graph._apply_device_functions": "takes IPUs out of the devices of operations on the host",
    "framework.ops.Operation._set_device": "takes IPUs out of the devices of operations beside others on the host",
    "framework.ops.Graph._device_functions_outer_to_inner": "tells on which device a program is placed",
    "framework.ops.Graph._unsafe_unfinalize": "adds copies of operations of the host to a finished graph",
    "framework.ops.Graph._attr_scope": "marks what the host computes in the middle of a program",
    "framework.ops.get_gradient_function": "tells through which operations a gradient passes",
    "framework.tensor_util.MakeNdarray": "reads constants",
    "ops.gradients_util._GradientsHelper": "cuts gradients, which JAX computes",
    "ops.gen_script_ops.py_func": "stands in a graph for what only an IPU does",
    "ops.gen_script_ops.py_func_stateless": "stands in a graph for what only an IPU does, without an effect",
    "ops.gen_resource_variable_ops.read_variable_op": "reads a variable by its handle",
    "ops.gen_resource_variable_ops.assign_variable_op": "writes a variable by its handle",
    "ops.control_flow_v2_func_graphs.WhileBodyFuncGraph": "tells the body of a loop from a branch",
    "ops.control_flow_v2_func_graphs.CondBranchFuncGraph": "tells a branch from the body of a loop",
    "ops.gen_nn_ops.fused_batch_norm_v2": "takes scales in halves, as on an IPU",
    "ops.gen_nn_ops.fused_batch_norm_v3": "takes scales in halves, as on an IPU",
    "ops.gen_nn_ops.fused_batch_norm_grad_v2": "takes scales in halves, as on an IPU",
    "ops.gen_nn_ops.fused_batch_norm_grad_v3": "takes scales in halves, as on an IPU",
    "ops.script_ops._py_funcs": "runs on an IPU what a function of the host reaches and no CPU computes",
    "ops.script_ops.numpy_function": "runs a program in the middle of a graph of the host",
    "ops.variable_scope.get_variable_scope": "shares the scope of variables with a program",
    "ops.variable_scope._get_default_variable_store": "shares the variables with a program",
    "framework.ops.Operation.device": "names the IPU of an operation",
    "framework.ops.EagerTensor.device": "names the IPU of what a program returned",
    "ops.resource_variable_ops.BaseResourceVariable.device": "names the IPU of a variable",
    "compiler.xla.xla.compile": "makes a program of what is compiled in an IPU's scope",
    "eager.context.Context.device": "takes IPUs out of the devices of eager operations",
    "eager.record.could_possibly_record": "lets tapes see functions that are called in the scope of an IPU",
    "eager.record.record_operation": "tells tapes of programs, whose gradients are other programs",
    "ops.control_flow_util.EnableControlFlowV2": "gives conditions and loops on an IPU graphs of their own",
    "ops.control_flow_util_v2.output_all_intermediates": "leaves out what JAX needs no gradients of",
    "ops.cond_v2.cond_v2": "gives one result of a condition on an IPU as version 1 does",
    "client.session.BaseSession.run": "tells which session a program runs in, and raises its own errors",
    "client.session._FetchHandler": "tells what a session's run fetches",
    "client.session.BaseSession._make_callable_from_options": "draws elements of a queue at little cost",
    "autograph.impl.api.tf_convert": "turns loops of Python into loops of a graph",
    "autograph.core.config.CONVERSION_RULES": "tells whose functions have no loops to turn",
    "autograph.core.config.DoNotConvert": "tells that podrun's functions have none",
    "grappler.tf_optimizer.OptimizeGraph": "puts functions that a SavedModel calls in the place of their calls",
}


def _resolve(name: str) -> Any:
    """The symbol ``module.attribute`` under ``tensorflow.python``, or None."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module("tensorflow.python." + ".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, None)
        return value
    return None


def missing_symbols() -> list[str]:
    """The names of `REQUIRED` that the installed TensorFlow does not have."""
    return [name for name in REQUIRED if _resolve(name) is None]


def symbol(name: str) -> Any:
    """A symbol of `REQUIRED`, below ``tensorflow.python``. ImportError that says what it is for if it is gone."""
    value = _resolve(name)
    if value is None:
        raise ImportError(
            f"this TensorFlow has no tensorflow.python.{name}, which podrun needs: {REQUIRED[name]}"
        )
    return value


def private_module(name: str) -> Any:
    """The module ``tensorflow.python.<name>``, for what stands in a registry or is replaced in place.

    ModuleNotFoundError if it is gone.
    """
    return importlib.import_module(f"tensorflow.python.{name}")


def original_of(function: object) -> tuple[Any, bool]:
    """The Python function of a tf.function, and whether AutoGraph converts it. Others are their own, and converted
    unless they have been traced for a signature.

    Beyond public API: ``_autograph``. Without it each tf.function is converted, as is TensorFlow's default.
    """
    traced = hasattr(function, "structured_input_signature")
    return getattr(function, "python_function", function), getattr(function, "_autograph", not traced)
