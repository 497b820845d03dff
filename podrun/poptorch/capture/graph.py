"""A captured forward pass as data: operators in order, the values between them, and what is updated.

Operators are functional: a node never changes a value. Nothing here needs torch, so a graph can be lowered, compared
and saved without it. `flatten` gives nested arguments and results as a flat list of leaves, and their `Structure`:
tuples, named tuples, lists, dictionaries and dataclasses keep their types and orders, other types can be registered as
``poptorch.registerCustomArgParser`` does, anything else is a leaf.

Views and writes in place become values. A storage has one current value. A view is a storage and a chain of view
operators; reading it applies the chain to the storage's current value. A write through a view puts the new elements
back, one node for each view of the chain, and the storage has a new value from then on. So ``x[0] += 1`` becomes four
functional nodes.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.errors import Error

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A tensor of the graph. ``dtype`` is the type that the IPU computes: int32 for torch.int64, float32 for
    torch.float64."""

    number: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class DTypeArgument:
    """A ``torch.dtype`` that an operator is called with, by the name of the type that the IPU computes."""

    name: str


Argument: TypeAlias = (
    "bool | int | float | str | GraphValue | DTypeArgument | Subgraph | tuple[Argument, ...] | None"
)
"""None, bool, int, float, str, `GraphValue`, `DTypeArgument`, `Subgraph`, or a tuple of arguments."""


@dataclass(frozen=True, slots=True)
class BlockPlacement:
    """Where the operators of a block run."""

    ipu: int = 0
    stage: int = 0
    phase: int = 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where in the user's program an operator stands.

    ``module``: dotted name of the innermost module (``""``: the whole model). ``line``: ``file:line`` of the call.
    ``placement``: IPU, stage and phase, as the annotations give them (`podrun.poptorch.api.annotations`).
    ``scope``: names of the program's own in front of the operator's, ``head/loss``.
    """

    module: str = ""
    line: str = ""
    placement: BlockPlacement | None = None
    scope: str = ""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operator.

    ``operator``: ATen name with overload (``aten.add.Tensor``). ``arguments`` and ``keywords``: as the dispatcher
    gave them, tensors as `GraphValue`. ``item``: which element of the operator's list of results this node gives
    (a view of ``split``). ``writes``: the node puts its second argument where the view ``operator`` of its first
    argument lies, and gives the whole. ``differentiable``: False for what runs under ``no_grad``.
    """

    operator: str
    arguments: tuple[Argument, ...]
    keywords: Mapping[str, Argument]
    results: tuple[GraphValue, ...]
    origin: Origin = field(default_factory=Origin)
    item: int | None = None
    writes: bool = False
    differentiable: bool = True

    def reads(self) -> Iterator[GraphValue]:
        """The values that the node takes, in order, repeated as often as they are taken."""
        yield from values_in((self.arguments, tuple(self.keywords.values())))


@dataclass(frozen=True, slots=True)
class Subgraph:
    """The body of a loop or of a branch: values have numbers of their own; ``outer`` ones belong to the graph around
    it.
    """

    nodes: tuple[GraphNode, ...]
    inputs: tuple[GraphValue, ...]
    outer: tuple[GraphValue, ...]
    outputs: tuple[GraphValue, ...]


def values_in(argument: Argument) -> Iterator[GraphValue]:
    """The values inside a nested argument, in order."""
    if isinstance(argument, GraphValue):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from values_in(part)


HOST_CALL = "podrun.host_call.default"
"""A call of a function of the host: its number among the functions of the graph, and the values that it takes."""


CUSTOM = "podrun.custom.default"
"""An operator that the program registered, or one of PopART's."""
COMPARED = "podrun.compared.default"
"""No number if one of the operands is none, 0 otherwise."""


@dataclass(slots=True)
class CapturedGraph:
    """A forward pass.

    ``inputs``: value by position of the tensor among the flattened arguments. ``parameters``: value by the name of a
    parameter or buffer. ``constants``: values whose data are known, by number. ``outputs``: leaves of what forward
    returned: a `GraphValue`, or whatever else it was. ``updates``: what replaces a parameter or buffer that forward
    writes; ``input_updates``: the same for an argument, by position. ``functions``: of the host, which nodes call.
    """

    nodes: list[GraphNode] = field(default_factory=list)
    inputs: dict[int, GraphValue] = field(default_factory=dict)
    parameters: dict[str, GraphValue] = field(default_factory=dict)
    constants: dict[int, tuple[GraphValue, np.ndarray]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)
    updates: dict[str, GraphValue] = field(default_factory=dict)
    input_updates: dict[int, GraphValue] = field(default_factory=dict)
    functions: list[Any] = field(default_factory=list)

    def without_unused(self, wanted: list[GraphValue]) -> list[GraphNode]:
        """The nodes that ``wanted`` values need, in order."""
        needed = {value.number for value in wanted}
        kept = []
        for node in reversed(self.nodes):
            if any(result.number in needed for result in node.results):
                kept.append(node)
                needed.update(value.number for value in node.reads())
        return kept[::-1]


class StructureParser(ABC):
    """Takes values of a user's type apart and puts them together (``poptorch.ICustomArgParser``).

    The arguments are Any so that a subclass may say which type it takes.
    """

    @abstractmethod
    def yieldTensors(self, struct: object) -> Iterator[Any]:
        """The leaves, always in the same order."""

    @abstractmethod
    def reconstruct(self, original_structure: object, tensor_iterator: Iterator[Any]) -> Any:
        """A structure equal to ``original_structure`` with other leaves."""


_parsers: dict[type, StructureParser] = {}


def register_parser(arg_data_type: type, arg_parser: StructureParser | None) -> None:
    """Register a parser for values of a type and its subclasses; None removes it. Error for a parser of another base
    class than `StructureParser`.
    """
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
        return
    if not isinstance(arg_parser, StructureParser):
        raise Error(
            f"registerCustomArgParser takes a parser derived from poptorch.ICustomArgParser, not "
            f"{type(arg_parser).__name__}"
        )
    _parsers[arg_data_type] = arg_parser


def registered_parsers() -> dict[type, StructureParser]:
    """All registered parsers, by type, for another process."""
    return dict(_parsers)


def adopt_parsers(parsers: Mapping[type, StructureParser]) -> None:
    """Register the parsers that `registered_parsers` returned in another process."""
    _parsers.update(parsers)


def has_parser(value: object) -> bool:
    """Whether a parser is registered for a value's type."""
    return _parser_of(value) is not None


def _parser_of(value: object) -> StructureParser | None:
    for kind in type(value).__mro__:
        if kind in _parsers:
            return _parsers[kind]
    return None


@dataclass(frozen=True, slots=True)
class Structure:
    """A nested value without its leaves. ``rebuild(leaves)`` returns a value of the same types."""

    rebuild: Callable[[Iterator[Any]], Any]
    description: object
    """Types, lengths and keys: equal for values of the same structure, whatever the order of a dictionary's keys."""
    leaves: int
    paths: tuple[tuple[str, ...], ...] = ((),)
    """How each leaf is reached: ``("[0]", "['mask']")``. Leaves of equal structures have the same paths."""


def flatten(value: object) -> tuple[list[Any], Structure]:
    """The leaves of a nested value, and its structure."""
    if (parser := _parser_of(value)) is not None:
        leaves = list(parser.yieldTensors(value))
        return leaves, Structure(
            lambda items: parser.reconstruct(value, items),
            (type(value).__qualname__, len(leaves)),
            len(leaves),
            tuple((f"<{place}>",) for place in range(len(leaves))),
        )
    if isinstance(value, dict):
        keys = list(value)
        return _of_children(
            [value[key] for key in keys],
            [f"[{key!r}]" for key in keys],
            lambda items: _new_mapping(value, keys, items),
            type(value).__name__,
            keys,
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _of_children(
            list(value),
            [f".{name}" for name in value._fields],
            lambda items: type(value)(*items),
            type(value).__name__,
        )
    if isinstance(value, (tuple, list)):
        kind = type(value)
        return _of_children(list(value), [f"[{place}]" for place in range(len(value))], kind, kind.__name__)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [member.name for member in dataclasses.fields(value)]
        return _of_children(
            [getattr(value, name) for name in names],
            [f".{name}" for name in names],
            lambda items: _with_fields(value, names, items),
            type(value).__qualname__,
        )
    return [value], Structure(next, "leaf", 1)


def _new_mapping(original: dict[Any, Any], keys: Sequence[object], items: Sequence[object]) -> object:
    mapping = dict(zip(keys, items, strict=True))
    return mapping if type(original) is dict else type(original)(mapping)


def _with_fields(original: object, names: Sequence[str], items: Sequence[object]) -> object:
    """A copy of a dataclass's value, frozen or not, with other fields."""
    copied = copy.copy(original)
    for name, item in zip(names, items, strict=True):
        object.__setattr__(copied, name, item)
    return copied


def _of_children(
    children: Sequence[object],
    names: Sequence[str],
    make: Callable[[list[Any]], object],
    kind: str,
    keys: Sequence[object] | None = None,
) -> tuple[list[Any], Structure]:
    """The leaves of all children, and the structure. ``keys``: of a dictionary, whose order does not count."""
    leaves: list[Any] = []
    structures = []
    for child in children:
        own, structure = flatten(child)
        leaves += own
        structures.append(structure)
    inner = tuple(structure.description for structure in structures)
    return leaves, Structure(
        lambda items: make([structure.rebuild(items) for structure in structures]),
        (kind, inner if keys is None else frozenset(zip(keys, inner, strict=True))),
        len(leaves),
        tuple((name, *path) for name, child in zip(names, structures, strict=True) for path in child.paths),
    )


def arranged(leaves: Sequence[Any], structure: Structure, like: Structure) -> list[Any]:
    """The leaves of a structure in the order of an equal one, whose dictionaries have another order."""
    if structure.paths == like.paths:
        return list(leaves)
    by_path = dict(zip(structure.paths, leaves, strict=True))
    return [by_path[path] for path in like.paths]


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """A nested value like the one that `flatten` took apart, with other leaves."""
    return structure.rebuild(iter(leaves))


@dataclass(frozen=True, slots=True, eq=False)
class ViewStep:
    """One view operator, applied to the result of the chain before it. Steps are compared by identity."""

    operator: str
    arguments: tuple[Argument, ...]
    keywords: Mapping[str, Argument]
    shape: tuple[int, ...]
    dtype: str
    item: int | None = None


@dataclass(slots=True, eq=False)
class StorageState:
    """The present value of a storage. ``name``: of its parameter, buffer or argument, if any."""

    root: torch.Tensor
    value: GraphValue
    name: str | int | None = None
    version: int = 0
    reads: dict[tuple[int, ...], GraphValue] = field(default_factory=dict)
    """Values of views at the current version, by the identities of their steps."""

    def replace(self, value: GraphValue) -> None:
        """Give the storage another value."""
        self.value, self.version = value, self.version + 1
        self.reads.clear()


@dataclass(frozen=True, slots=True)
class TensorView:
    """The view that a tensor of the traced program stands for."""

    storage: StorageState
    steps: tuple[ViewStep, ...] = ()


class Emitter(ABC):
    """The parts of a recorder that reads and writes need: new numbers and a place for nodes."""

    @abstractmethod
    def new_value(self, shape: tuple[int, ...], dtype: str) -> GraphValue:
        """A value that no node has made yet."""

    @abstractmethod
    def emit_view(self, step: ViewStep, base: GraphValue, result: GraphValue) -> None:
        """Add the node ``result = view(base)``."""

    @abstractmethod
    def emit_write(self, step: ViewStep, base: GraphValue, part: GraphValue, result: GraphValue) -> None:
        """Add the node ``result = base with part where the view lies``."""


def read(view: TensorView, emitter: Emitter, depth: int | None = None) -> GraphValue:
    """The current value of the first ``depth`` steps of a view (default: all)."""
    steps = view.steps if depth is None else view.steps[:depth]
    value = view.storage.value
    for count, step in enumerate(steps, 1):
        key = tuple(id(step) for step in steps[:count])
        known = view.storage.reads.get(key)
        if known is None:
            known = emitter.new_value(step.shape, step.dtype)
            emitter.emit_view(step, value, known)
            view.storage.reads[key] = known
        value = known
    return value


def write(view: TensorView, value: GraphValue, emitter: Emitter) -> None:
    """Replace the elements that the view shows by ``value``."""
    bases = [read(view, emitter, depth) for depth in range(len(view.steps))]
    for step, base in zip(reversed(view.steps), reversed(bases), strict=True):
        whole = emitter.new_value(base.shape, base.dtype)
        emitter.emit_write(step, base, value, whole)
        value = whole
    view.storage.replace(value)
