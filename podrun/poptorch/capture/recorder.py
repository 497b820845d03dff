"""Records the operators that a module's forward pass calls.

The pass runs once, on fake tensors, with autograd's dispatch keys left out: composite operators (``linear``, ``lstm``,
``layer_norm``, ``cross_entropy_loss``) arrive whole. Operators that the table lacks are decomposed here, by torch's own
definitions, until it consists of operators that the table has. Views and writes in place become values (`graph`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from podrun.poptorch.capture.graph import (
    Argument,
    GraphNode,
    GraphValue,
    Origin,
    StorageState,
    TensorView,
    ViewStep,
    write,
)
from podrun.poptorch.capture.mistakes import data_dependent, described_tensors
from podrun.poptorch.capture.recorded_values import Encoded, RecordedValues, leaves_of
from podrun.poptorch.capture.torch_names import (
    FAKE_RESULTS,
    form_without_out,
    functional_form,
    ipu_dtype,
    operator_name,
    tensors_in,
)
from podrun.poptorch.errors import Error
from podrun.private_apis import torch as private
from podrun.private_apis.torch import TorchOperator

ATEN = torch.ops.aten

IGNORED_KEYWORDS = frozenset(
    ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator", "copy")
)
"""Keywords about where or how a tensor lies in a host's memory."""

VIEWS_BY_NAME = (ATEN.detach.default, ATEN.alias.default, ATEN._unsafe_view.default)
"""Views whose schema does not mark them as such."""

_CHECKING = frozenset({"gaussian_nll_loss"})
"""Functions of torch.nn.functional that read values only to refuse wrong ones."""


class Recorder(private.DispatchMode, RecordedValues):  # type: ignore[misc]
    """Records one forward pass into ``graph``.

    ``supported``: whether the table of operators has an operator of that name. ``origin``: the program's present place;
    ``location``: the same in words. ``allowed_constants``: storages of tensors that belong to the model without being
    parameters or buffers.
    """

    def __init__(
        self,
        supported: Callable[[str], bool],
        fake: private.FakeMode,
        origin: Callable[[], Origin],
        allowed_constants: frozenset[int] = frozenset(),
        location: Callable[[], str] = str,
    ) -> None:
        private.DispatchMode.__init__(self)
        RecordedValues.__init__(self, fake, origin, allowed_constants)
        self.missing: Counter[str] = Counter()
        self._supported, self._location = supported, location
        self._failed: tuple[Exception | None, str] = (None, "")

    # --- Control flow -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def aside(self) -> Iterator[list[GraphNode]]:
        """Record into a separate list. Error if the recorded nodes write to a tensor from outside."""
        outer, inner = self.graph.nodes, list[GraphNode]()
        before = [(state, state.version, dict(state.reads)) for state in self.storages()]
        self.graph.nodes = inner
        try:
            yield inner
        finally:
            self.graph.nodes = outer
        for state, version, reads in before:
            if state.version != version:
                raise Error(
                    "the body of a poptorch loop or branch writes in place to a tensor from outside",
                    hint="Return the new value instead, and take it from what the loop or branch returns.",
                )
            state.reads = reads

    def add_control_flow(
        self, operator: str, arguments: tuple[Argument, ...], results: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Add a node with bodies, which gives ``results``."""
        self._add(operator, arguments, {}, tuple(self.value_of(result) for result in results))
        return results

    # --- Dispatch -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        operator: TorchOperator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            return self._dispatched(operator, args, dict(kwargs or {}))
        except Error as error:
            if not error.location:
                error.location = self._location()  # type: ignore[misc]
            raise
        except Exception as error:
            if self._failed[0] is not error:
                self._failed = (error, f"{operator_name(operator)}: {described_tensors((args, kwargs))}")
            raise

    def failed_operator(self, error: Exception) -> str:
        """The operator that raised an error, and its arguments; empty if none did."""
        return self._failed[1] if self._failed[0] is error else ""

    def _dispatched(self, operator: TorchOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operator is ATEN.detach_.default:
            return args[0]
        if operator not in (ATEN.lift_fresh.default, ATEN.lift_fresh_copy.default):
            if self._on_host(args, kwargs):
                with private.real_computation():
                    return operator(*args, **kwargs)
            if operator is ATEN.copy_.default and self.is_host(args[1]):
                args = (args[0], self.moved(args[1]), *args[2:])
        if operator.namespace == "prim":
            return operator(*args, **kwargs)
        if operator is ATEN._local_scalar_dense.default:
            return self._scalar(args[0])
        if operator is ATEN.batch_norm.default:
            return self._batch_norm(operator, args)
        without_out = form_without_out(operator)
        if without_out is not None:
            return self._into_given(operator, without_out, args, kwargs)
        name = operator_name(operator)
        form = functional_form(operator)
        if not self._supported(name) and not (form is not None and self._supported(operator_name(form))):
            decomposed = self._decomposed(operator, form, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
            self.missing[name] += 1
        return self._record(operator, form, args, kwargs)

    def _into_given(
        self, operator: TorchOperator, form: TorchOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute the results of an operator with ``out=`` by its functional form; write them into the tensors given.

        As in torch a tensor of another shape takes the result's; of a type that cannot hold it it is refused.
        """
        names = [argument.name for argument in operator._schema.arguments if argument.is_out]
        targets = [kwargs[name] for name in names]
        rest = {name: argument for name, argument in kwargs.items() if name not in names}
        if next(tensors_in((args, rest)), None) is None:
            rest["dtype"] = targets[0].dtype
        with self:
            results = form(*args, **rest)
        for out, result in zip(targets, leaves_of(results), strict=True):
            if not torch.can_cast(result.dtype, out.dtype):
                raise Error(f"result type {result.dtype} can't be cast to the output type {out.dtype}")
            with self:
                if out.shape == result.shape:
                    ATEN.copy_.default(out, result)
                else:
                    self._resize(out, ATEN._to_copy.default(result, dtype=out.dtype))
        return tuple(targets) if len(targets) > 1 else targets[0]

    def _resize(self, out: torch.Tensor, result: torch.Tensor) -> None:
        """Let a tensor for results that has another shape be the result."""
        if out.numel():
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not "
                f"match the required output shape {list(result.shape)}.",
                stacklevel=2,
            )
        with private.without_modes(), self._fake:
            out.resize_(result.shape)
        self.bind(out, self.value_of(result))

    def _scalar(self, tensor: torch.Tensor) -> Any:
        known = self._known.get(self.value_of(tensor).number)
        if known is None and _checks_arguments():
            return False
        if known is None:
            raise Error(
                "the value of a tensor that the IPU computes is asked for in forward (item(), bool(), int(), an if "
                "on a tensor): it is not known while the model is compiled",
                hint="Use torch.where, or poptorch.cond, or return the tensor and decide on the host.",
            )
        with private.real_computation():
            return known.item()

    def _batch_norm(self, operator: TorchOperator, args: tuple[Any, ...]) -> Any:
        """Batch normalisation, whose schema does not say that it updates the running statistics."""
        x, weight, bias, mean, variance, training, momentum, epsilon, *_ = args
        values = tuple(self._encoded(argument) for argument in (x, weight, bias, mean, variance))
        with self._fake:
            normalised = ATEN.native_batch_norm.default(
                x, weight, bias, mean, variance, training, momentum or 0.0, epsilon
            )[0]
        self.bind(normalised, self.value_like(normalised))
        results = [self.value_of(normalised)]
        updates = training and mean is not None
        if updates:
            results += [self.value_like(mean), self.value_like(variance)]
        self._add(
            operator_name(operator), (*values, bool(training), momentum or 0.0, epsilon), {}, tuple(results)
        )
        if updates:
            for statistic, value in zip((mean, variance), results[1:], strict=True):
                write(self._view_of(statistic), value, self)
        return normalised

    def _decomposed(
        self,
        operator: TorchOperator,
        form: TorchOperator | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of an operator by torch's own definition; NotImplemented if torch has none."""
        if private.is_composite(operator):
            with self:
                return operator.decompose(*args, **kwargs)
        if operator._schema.is_mutable:
            if form is None:
                return NotImplemented
            with self:
                return ATEN.copy_.default(args[0], form(*args, **kwargs))
        decomposition = private.decompositions().get(operator)
        if decomposition is None:
            return NotImplemented
        with self:
            return decomposition(*args, **kwargs)

    def _record(
        self,
        operator: TorchOperator,
        form: TorchOperator | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        constant = operator in (ATEN.lift_fresh.default, ATEN.lift_fresh_copy.default)
        arguments = tuple(self._encoded(argument, constant) for argument in args)
        keywords = {
            key: self._encoded(argument) for key, argument in kwargs.items() if key not in IGNORED_KEYWORDS
        }
        try:
            with self._fake:
                results = FAKE_RESULTS.get(operator_name(operator), operator)(*args, **kwargs)
        except (private.DataDependent, private.DynamicShape) as error:
            raise data_dependent(
                operator_name(operator), shape=isinstance(error, private.DynamicShape)
            ) from error
        tensors = list(tensors_in(results))
        if operator._schema.is_mutable:
            self._record_write(operator, form, args, kwargs, (arguments, keywords), tensors)
        elif not self._record_view(operator, args, (arguments, keywords), results, tensors):
            self._record_values(operator, args, (arguments, keywords), tensors, kwargs)
        return results

    def _record_view(
        self,
        operator: TorchOperator,
        args: tuple[Any, ...],
        encoded: Encoded,
        results: object,
        tensors: list[torch.Tensor],
    ) -> bool:
        """Whether the operator's results are views of its first argument; if so, remember them as views."""
        views = operator.is_view or operator in VIEWS_BY_NAME
        if not views or not isinstance(args[0], torch.Tensor):
            return False
        if any(private.storage_of(tensor) != private.storage_of(args[0]) for tensor in tensors):
            return False
        base = self._view_of(args[0])
        arguments, keywords = encoded
        if operator is ATEN.as_strided.default:
            size, stride, *offset = arguments[1:]
            first = offset[0] if offset and isinstance(offset[0], int) else int(args[0].storage_offset())
            base, arguments = TensorView(base.storage), (arguments[0], size, stride, first)
        for place, tensor in enumerate(tensors):
            step = ViewStep(
                operator_name(operator),
                arguments[1:],
                keywords,
                tuple(tensor.shape),
                ipu_dtype(tensor.dtype),
                None if isinstance(results, torch.Tensor) else place,
            )
            self._remember(tensor, TensorView(base.storage, (*base.steps, step)))
        return True

    def _record_write(
        self,
        operator: TorchOperator,
        form: TorchOperator | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        encoded: Encoded,
        tensors: list[torch.Tensor],
    ) -> None:
        """Record an operator that writes into arguments: new values for these, after its fresh results."""
        schema = operator._schema
        targets: list[torch.Tensor] = []
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                target = args[place] if place < len(args) else kwargs.get(argument.name)
                targets += tensors_in(target)
        fresh = [
            tensor
            for tensor, returned in zip(tensors, schema.returns, strict=False)
            if returned.alias_info is None
        ]
        for tensor in fresh:
            self.bind(tensor, self.value_like(tensor))
        written = [self.value_like(target) for target in targets]
        results = (*(self.value_of(tensor) for tensor in fresh), *written)
        self._add(operator_name(form or operator), encoded[0], encoded[1], results)
        for target, value in zip(targets, written, strict=True):
            view = self._view_of(target)
            before = view.storage.value
            write(view, value, self)
            if not torch.is_grad_enabled():
                self._keep_gradient(view.storage, before)

    def _keep_gradient(self, storage: StorageState, before: GraphValue) -> None:
        """Keep the gradient of the value before, because autograd does not see writes under ``no_grad``."""
        if isinstance(storage.name, str) or not before.dtype.startswith(("float", "bfloat")):
            return
        kept = self.new_value(before.shape, before.dtype)
        with torch.enable_grad():
            self._add("podrun.written_without_gradient.default", (before, storage.value), {}, (kept,))
        storage.replace(kept)

    def _record_values(
        self,
        operator: TorchOperator,
        args: tuple[Any, ...],
        encoded: Encoded,
        tensors: list[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> None:
        """Record an operator whose results are values of their own, or the argument itself (``contiguous``)."""
        taken = {private.storage_of(tensor): tensor for tensor in tensors_in((args, kwargs))}
        results = []
        for tensor in tensors:
            value = self.value_like(tensor)
            results.append(value)
            same = taken.get(private.storage_of(tensor))
            if same is None:
                self.bind(tensor, value)
            elif same.shape == tensor.shape and same.stride() == tensor.stride():
                self._remember(tensor, self._view_of(same))
            else:
                self._remember(tensor, TensorView(StorageState(tensor, value)))
        self._add(operator_name(operator), encoded[0], encoded[1], tuple(results))
        self._follow(operator, encoded, results, tensors)


def _checks_arguments() -> bool:
    """Whether torch reads a value only to refuse wrong ones, which the IPU does not do."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _CHECKING and frame.f_globals.get("__name__") == "torch.nn.functional":
            return True
        frame = frame.f_back
    return False
