"""Loops, branches and calls of the host in forward: ``poptorch.for_loop``, ``cond`` and ``CPU``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from podrun.poptorch.api.annotations import isRunningOnIpu
from podrun.poptorch.api.signatures import checks_arguments_but, checks_methods
from podrun.poptorch.capture.capture import branch, host_call, loop
from podrun.poptorch.capture.host_tensors import line_of_user
from podrun.poptorch.errors import Error


def _tensor_list(values: object, name: str) -> list[torch.Tensor]:
    if not isinstance(values, list) or not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError(f"poptorch.{name} takes a list of tensors")
    return values


def _results(returned: Any) -> list[torch.Tensor]:  # Any: what a body of the program's returns.
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


@checks_arguments_but("inputs")
def for_loop(count: int, body: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run ``body`` ``count`` times; its results go into the next round. For inference alone.

    ValueError if inputs is not a list of tensors; Error if the body returns other shapes or types than it takes, or
    writes to tensors from outside.
    """
    values = [tensor.clone() for tensor in _tensor_list(inputs, "for_loop")]
    if isRunningOnIpu():
        return loop(count, body, values)
    for _ in range(count):
        values = _results(body(*values))
    return values


@checks_arguments_but("then_inps", "else_inps")
def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: list[torch.Tensor],
    else_body: Callable[..., Any],
    else_inps: list[torch.Tensor],
) -> list[torch.Tensor]:
    """The results of ``then_body`` if the condition holds, of ``else_body`` otherwise. For inference alone.

    ValueError if the inputs are not lists of tensors; Error if the bodies return other shapes or types.
    """
    inputs = (_tensor_list(then_inps, "cond"), _tensor_list(else_inps, "cond"))
    if isRunningOnIpu():
        return branch(condition, (then_body, else_body), inputs)
    return _results(then_body(*inputs[0]) if bool(condition) else else_body(*inputs[1]))


@checks_methods()
class CPU:
    """A function or module that runs on the host in the middle of an inference model: ``CPU(function, "id")(x)``.

    In a compiled model it is called again in every run, once for each micro-batch, with copies of the tensors. Its
    results must have the same shapes and types each time. Outside of a model it is simply called. Error in training.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer, self._id = layer_to_call, ID

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function, or record the call while a model is compiled."""
        if not isRunningOnIpu():
            return self._layer(*args, **kwargs)
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if not args or kwargs or len(tensors) != len(args):
            raise Error(
                f"poptorch.CPU ({self._id!r}) takes tensors by position in a model that is compiled",
                location=line_of_user(),
            )
        results = host_call(self._layer, tensors)
        return results[0] if len(results) == 1 else tuple(results)

    def execute(self) -> None:
        """No-op: the SDK's machinery calls this."""

    def registerPersistentData(self) -> None:
        """No-op: the SDK's machinery calls this."""
