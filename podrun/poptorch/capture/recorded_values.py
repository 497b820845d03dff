"""The values that the tensors of a recorded forward pass stand for.

A tensor is a view of a storage, and a storage has one value at a time (`graph`). A real tensor is the host's, unless it
belongs to the model; moved to the IPU it becomes a constant. The data of values that follow from constants are known
while the model is recorded, so that ``item()`` has an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from podrun.poptorch.capture.graph import (
    Argument,
    CapturedGraph,
    DTypeArgument,
    Emitter,
    GraphNode,
    GraphValue,
    Origin,
    StorageState,
    TensorView,
    ViewStep,
    read,
)
from podrun.poptorch.capture.host_tensors import name_of
from podrun.poptorch.capture.torch_names import ipu_dtype, operator_name, tensors_in, to_numpy
from podrun.poptorch.errors import Error
from podrun.private_apis import torch as private
from podrun.private_apis.torch import TorchOperator

ATEN = torch.ops.aten


LARGEST_KNOWN = 1 << 16
"""Elements up to which the data of a constant are followed through operators, so that ``item()`` has an answer."""


Encoded = tuple[tuple[Argument, ...], dict[str, Argument]]
"""Arguments and keywords of a call of an operator, as a node keeps them."""


_TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "int32": torch.int64, "bool": torch.bool}


def _decoded(argument: Argument | Mapping[str, Argument], known: Mapping[int, torch.Tensor]) -> Any:
    """An encoded argument with real tensors in place of known values."""
    if isinstance(argument, GraphValue):
        return known[argument.number]
    if isinstance(argument, DTypeArgument):
        return _TORCH_TYPES.get(argument.name) or getattr(torch, argument.name)
    if isinstance(argument, tuple):
        return [_decoded(item, known) for item in argument]
    if isinstance(argument, dict):
        return {key: _decoded(item, known) for key, item in argument.items()}
    return argument


def leaves_of(value: object) -> list[Any]:
    """Everything inside nested lists, tuples and dictionaries, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves_of(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves_of(item)]
    return [value]


class RecordedValues(Emitter):
    """The graph so far, and the value of every tensor that was met.

    ``fake``: the mode in which new tensors have no data. ``origin``: gives the program's present place.
    ``allowed_constants``: storages of tensors that belong to the model without being parameters or buffers.
    """

    def __init__(
        self, fake: private.FakeMode, origin: Callable[[], Origin], allowed_constants: frozenset[int]
    ) -> None:
        self.graph = CapturedGraph()
        self._fake, self._origin, self._allowed = fake, origin, allowed_constants
        self._count = 0
        self._storages: dict[int, StorageState] = {}
        self._numbers: list[StorageState] = []
        """Of real tensors without dimensions."""
        self._views: dict[int, TensorView] = {}
        self._alive: list[torch.Tensor] = []
        """Every tensor met, kept so that Python cannot give its ``id`` to another one."""
        self._known: dict[int, torch.Tensor] = {}
        """The data of values that follow from constants, by number."""

    def new_value(self, shape: Sequence[int], dtype: str) -> GraphValue:
        self._count += 1
        return GraphValue(self._count, tuple(int(size) for size in shape), dtype)

    def value_like(self, tensor: torch.Tensor) -> GraphValue:
        """A new value of a tensor's shape and type."""
        return self.new_value(tensor.shape, ipu_dtype(tensor.dtype))

    def bind(self, tensor: torch.Tensor, value: GraphValue, name: str | int | None = None) -> None:
        """Let a tensor with a storage of its own stand for ``value``."""
        state = StorageState(tensor, value, name)
        self._storages[private.storage_of(tensor)] = state
        self._remember(tensor, TensorView(state))

    def let_stand_for(self, tensor: torch.Tensor, known: torch.Tensor) -> None:
        """Let another tensor stand for what a known one stands for: a parameter that a closure holds."""
        self._remember(tensor, self._view_of(known))

    def value_of(self, tensor: torch.Tensor) -> GraphValue:
        """The value that a tensor has now."""
        return read(self._view_of(tensor), self)

    def storages(self) -> list[StorageState]:
        """All storages that were met."""
        return [*self._storages.values(), *self._numbers]

    def _remember(self, tensor: torch.Tensor, view: TensorView) -> TensorView:
        self._views[id(tensor)] = view
        self._alive.append(tensor)
        return view

    def _view_of(self, tensor: torch.Tensor, constant: bool = False) -> TensorView:
        known = self._views.get(id(tensor))
        if known is not None:
            return known
        state = self._storages.get(private.storage_of(tensor))
        if state is not None:
            return self._remember(tensor, TensorView(state, self._same_storage(tensor, state)))
        if not constant and self.is_host(tensor):
            name = name_of(tensor)
            raise Error(
                f"forward uses {repr(name) + ', ' if name else ''}a tensor of the CPU (shape {list(tensor.shape)}, "
                f"{tensor.dtype}) that is not an argument, a parameter or a buffer",
                hint=f"For a constant write {name or 'tensor'}.to(x.device), x an argument of forward; for values "
                "that change pass it as an argument; for a part of the module call register_buffer in __init__.",
            )
        value = self._constant(tensor)
        if tensor.dim() == 0 and not constant and private.storage_of(tensor) not in self._allowed:
            state = StorageState(tensor, value)  # Not by its storage, which may be that of a greater tensor.
            self._numbers.append(state)
            return self._remember(tensor, TensorView(state))
        self.bind(tensor, value)
        return self._views[id(tensor)]

    def _constant(self, tensor: torch.Tensor) -> GraphValue:
        """A value with the present data of a real tensor."""
        value = self.value_like(tensor)
        with private.real_computation():
            self.graph.constants[value.number] = (value, to_numpy(tensor))
            self._known[value.number] = tensor.detach().clone()
        return value

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the host's, which operators of the IPU do not take: neither the model's nor a number."""
        storage = private.storage_of(tensor)
        return not (
            isinstance(tensor, private.FakeTensor)
            or tensor.dim() == 0
            or id(tensor) in self._views
            or storage in self._storages
            or storage in self._allowed
        )

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the IPU that a real one becomes: a constant, unless it stands for a value of the model."""
        value = self._constant(tensor) if self.is_host(tensor) else self.value_of(tensor)
        fake = self.fake_like(tensor)
        self.bind(fake, value)
        return fake

    def _on_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operator's tensors are all the host's, so that it runs there, now."""
        tensors = list(tensors_in((args, kwargs)))
        return any(self.is_host(tensor) for tensor in tensors) and all(
            self.is_host(tensor) or self._unchanged_number(tensor) for tensor in tensors
        )

    def _unchanged_number(self, tensor: torch.Tensor) -> bool:
        view = self._views.get(id(tensor))
        real = tensor.dim() == 0 and not isinstance(tensor, private.FakeTensor)
        return real and (view is None or (view.storage.version == 0 and view.storage.name is None))

    def _same_storage(self, tensor: torch.Tensor, state: StorageState) -> tuple[ViewStep, ...]:
        """The view that an unknown tensor is of a known storage (``x.data`` and the like)."""
        root = state.root
        layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if layout == (tuple(root.shape), root.stride(), root.storage_offset(), root.dtype):
            return ()
        arguments = (tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))
        return (
            ViewStep("aten.as_strided.default", arguments, {}, tuple(tensor.shape), ipu_dtype(tensor.dtype)),
        )

    def emit_view(self, step: ViewStep, base: GraphValue, result: GraphValue) -> None:
        self._add(step.operator, (base, *step.arguments), step.keywords, (result,), item=step.item)
        if base.number in self._known:
            self._follow_view(step, base, result)

    def _follow_view(self, step: ViewStep, base: GraphValue, result: GraphValue) -> None:
        _, packet, overload = step.operator.split(".")
        if any(isinstance(argument, (GraphValue, DTypeArgument)) for argument in step.arguments):
            return
        with private.real_computation():
            viewed = getattr(getattr(ATEN, packet), overload)(self._known[base.number], *step.arguments)
        self._known[result.number] = viewed if step.item is None else viewed[step.item]

    def emit_write(self, step: ViewStep, base: GraphValue, part: GraphValue, result: GraphValue) -> None:
        self._add(
            step.operator,
            (base, part, *step.arguments),
            step.keywords,
            (result,),
            item=step.item,
            writes=True,
        )

    def _add(
        self,
        operator: str,
        arguments: tuple[Argument, ...],
        keywords: Mapping[str, Argument],
        results: tuple[GraphValue, ...],
        *,
        item: int | None = None,
        writes: bool = False,
    ) -> None:
        self.graph.nodes.append(
            GraphNode(
                operator, arguments, keywords, results, self._origin(), item, writes, torch.is_grad_enabled()
            )
        )

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same shape and type, on memory of its own."""
        with private.without_modes(), self._fake:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)

    def _follow(
        self, operator: TorchOperator, encoded: Encoded, results: list[GraphValue], fakes: list[torch.Tensor]
    ) -> None:
        """Compute the data of results whose arguments' data are known, so that the program can ask for them."""
        arguments, keywords = encoded
        values = [leaf for leaf in leaves_of((arguments, keywords)) if isinstance(leaf, GraphValue)]
        random = "nondeterministic_seeded" in str(operator.tags) or "empty" in operator_name(operator)
        small = fakes and all(tensor.numel() <= LARGEST_KNOWN for tensor in fakes)
        if random or not small or not all(value.number in self._known for value in values):
            return
        with private.real_computation():
            positional = [
                torch.device("cpu") if argument is None and str(formal.type) == "Device" else argument
                for argument, formal in zip(
                    _decoded(arguments, self._known), operator._schema.arguments, strict=False
                )
            ]
            real = operator(*positional, **_decoded(keywords, self._known))
        self._known.update({v.number: tensor for v, tensor in zip(results, tensors_in(real), strict=True)})

    def _encoded(self, argument: object, constant: bool = False) -> Argument:
        """What torch's dispatcher gave, as a node keeps it."""
        if isinstance(argument, torch.Tensor):
            return read(self._view_of(argument, constant), self)
        if isinstance(argument, (list, tuple)):
            return tuple(self._encoded(item, constant) for item in argument)
        if isinstance(argument, torch.dtype):
            return DTypeArgument(ipu_dtype(argument))
        if isinstance(argument, (torch.device, torch.layout, torch.memory_format)):
            return None
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Error("a size that depends on data is not known while the model is compiled")
        return cast(Argument, argument)
