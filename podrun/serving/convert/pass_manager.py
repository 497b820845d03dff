"""Passes by name: `Pass`, how one is registered, and `PassManager`, which orders and runs several.

    @register("drop_dropout")
    class DropDropout(Pass):
        def run(self, model):
            self.traverse_graph(model.graph, self.of_graph)
            return model

A pass may state ``against`` (passes that it cannot run with), ``depend`` (passes that must have run) and ``before``
(passes that must run later); `PassManager.sort_passes` keeps to them.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from onnx import GraphProto, ModelProto

from podrun.core.errors import PodrunError, UnsupportedError, UsageError
from podrun.serving.convert.graph_edit import GraphEditor, ModelEditor
from podrun.serving.convert.graph_walk import inner_graphs

FAMILIES = (
    "cleanup_passes",
    "structure_passes",
    "folding_passes",
    "type_passes",
    "half_passes",
    "float8_passes",
    "fusion_passes",
    "normalization_passes",
    "attention_passes",
    "product_passes",
    "serial_passes",
    "branch_passes",
    "replacement_passes",
    "comparison_passes",
    "einsum_pass",
    "workaround_passes",
    "packing_passes",
    "placing_passes",
    "report_passes",
)
"""Modules of this folder that register passes."""


class Pass:
    """A change of a model. `run` takes a ModelProto, which it may change, and returns the changed one."""

    pass_name: ClassVar[str] = ""
    against: ClassVar[tuple[str, ...]] = ()
    depend: ClassVar[tuple[str, ...]] = ()
    before: ClassVar[tuple[str, ...]] = ()

    def run(self, model: ModelProto) -> ModelProto:
        """Apply the pass; returns the changed model."""
        raise NotImplementedError

    def __call__(self, model: ModelProto) -> ModelProto:
        return self.run(model)

    def traverse_graph(
        self, graph: GraphProto, function: Callable[[GraphProto, bool], Any], is_main_graph: bool = True
    ) -> None:
        """Call ``function(graph, is_main_graph)`` for a graph and all graphs in it."""
        function(graph, is_main_graph)
        for node in graph.node:
            for inner in inner_graphs(node):
                self.traverse_graph(inner, function, False)

    @staticmethod
    def get_pass(name: str, **arguments: Any) -> Pass:
        """The pass of a name, made with these arguments. UsageError for a name that is none or arguments that it does
        not take.
        """
        kind = pass_class(name)
        try:
            return kind(**arguments)
        except TypeError as error:
            if isinstance(error, PodrunError):
                raise
            raise UsageError(f"pass {name!r}: {error}") from error


_registered: dict[str, type[Pass]] = {}
P = TypeVar("P", bound=type[Pass])


def register(name: str) -> Callable[[P], P]:
    """Register a `Pass` subclass under a name. UsageError for a name that is taken, or a class that is no pass."""

    def registered(kind: P) -> P:
        if not (isinstance(kind, type) and issubclass(kind, Pass)):
            raise UsageError(f"pass {name!r}: a pass is a class derived from poprt.passes.Pass")
        held = _registered.get(name)
        if held is not None and (held.__module__, held.__qualname__) != (kind.__module__, kind.__qualname__):
            raise UsageError(f"pass {name!r} is registered twice", hint="Choose another name.")
        kind.pass_name = name
        _registered[name] = kind
        return kind

    return registered


def rewrite(
    name: str, *, before: tuple[str, ...] = (), main_only: bool = False, until_stable: bool = False
) -> Callable[[Callable[[GraphEditor], None]], type[Pass]]:
    """Register a function that changes one graph as a pass over the graphs of a model."""

    def registered(change: Callable[[GraphEditor], None]) -> type[Pass]:
        def run(self: Pass, model: ModelProto) -> ModelProto:
            for _ in range(_MOST_ROUNDS if until_stable else 1):
                owner = ModelEditor(model)
                touched = False
                for graph in [owner.main] if main_only else owner.graphs():
                    change(graph)
                    touched = touched or graph.changed
                    graph.write_back()
                if not touched:
                    break
            return model

        kind = type(
            "".join(word.capitalize() for word in name.split("_")),
            (Pass,),
            {"run": run, "__doc__": change.__doc__, "before": before, "__module__": change.__module__},
        )
        return register(name)(kind)

    return registered


_MOST_ROUNDS = 20


@functools.cache
def load_passes() -> None:
    """Import every family, once."""
    for family in FAMILIES:
        importlib.import_module(f"podrun.serving.convert.{family}")


def get_registered_passes() -> dict[str, type[Pass]]:
    """All passes by name, sorted."""
    load_passes()
    return dict(sorted(_registered.items()))


def pass_class(name: str) -> type[Pass]:
    """The class of a pass. UsageError naming those that are near."""
    known = get_registered_passes()
    if name not in known:
        near = difflib.get_close_matches(str(name), known, 3)
        raise UsageError(
            f"there is no pass {name!r}",
            hint=f"Did you mean {' or '.join(near)}?"
            if near
            else "poprt --list_all_passes prints the names.",
        )
    return known[name]


class PassManager:
    """Passes in an order. ``used_passes``: names, or passes; ``gather_ir_passes``: run neighbouring clean-up passes as
    one, until they change nothing.
    """

    def __init__(self, used_passes: Sequence[str | Pass] = (), gather_ir_passes: bool = False) -> None:
        self._passes: list[Pass] = []
        self._gather = gather_ir_passes
        self.add_passes(used_passes)

    def add_passes(self, passes: Iterable[str | Pass] | str | Pass) -> None:
        """Add passes behind the others."""
        if isinstance(passes, (str, Pass)):
            passes = [passes]
        for one in passes:
            if not isinstance(one, (str, Pass)):
                raise UsageError(f"a pass is a name or a Pass, not {type(one).__name__}")
            self._passes.append(Pass.get_pass(one) if isinstance(one, str) else one)

    def get_passes(self) -> list[Pass]:
        """The passes in the order in which they run."""
        return list(self._passes)

    @staticmethod
    def get_all_pass_names() -> list[str]:
        """Names of all registered passes."""
        return list(get_registered_passes())

    def sort_passes(self) -> list[Pass]:
        """Order the passes by their constraints, keeping the order where it is free. UsageError for passes that exclude
        each other, and for constraints that go in a circle.
        """
        names = {one.pass_name for one in self._passes}
        for one in self._passes:
            for other in one.against:
                if other in names:
                    raise UsageError(f"the passes {one.pass_name!r} and {other!r} exclude each other")
        for one in list(self._passes):
            for needed in one.depend:
                if needed not in names:
                    self._passes.insert(0, Pass.get_pass(needed))
                    names.add(needed)
        waiting, ordered = list(self._passes), []
        while waiting:
            first = next((one for one in waiting if not _held_up(one, waiting)), None)
            if first is None:
                raise UsageError(
                    f"the passes {', '.join(one.pass_name for one in waiting)} wait for one another",
                    hint="Look at their depend and before.",
                )
            ordered.append(first)
            waiting.remove(first)
        self._passes = ordered
        return list(ordered)

    def run(self, model: ModelProto) -> ModelProto:
        """Run all passes. An error that a pass does not tell itself names the pass."""
        at = 0
        while at < len(self._passes):
            one = self._passes[at]
            if self._gather and is_cleanup(one):
                end = at
                while end < len(self._passes) and is_cleanup(self._passes[end]):
                    end += 1
                names = [one.pass_name for one in self._passes[at:end]]
                model = run_pass(Pass.get_pass("apply_ir_pass", passes=names), model)
                at = end
            else:
                model = run_pass(one, model)
                at += 1
        return model


def is_cleanup(one: Pass) -> bool:
    """Whether a pass is one of those that `apply_ir_pass` runs."""
    return type(one).__module__.endswith(".cleanup_passes") and one.pass_name != "apply_ir_pass"


def run_pass(one: Pass, model: ModelProto) -> ModelProto:
    """The model after a pass. What a pass raises otherwise than on purpose is told with its name."""
    try:
        result = one.run(model)
    except (PodrunError, MemoryError, OSError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"the pass {one.pass_name!r} cannot change this model: {type(error).__name__}: {error}",
            hint=f"Leave it out: --skip_passes {one.pass_name}",
        ) from error
    if not isinstance(result, ModelProto):
        raise UsageError(f"the pass {one.pass_name!r} returned {type(result).__name__}, not a model")
    return result


def _held_up(one: Pass, waiting: Sequence[Pass]) -> bool:
    """Whether a pass must wait for another of those that wait."""
    for other in waiting:
        if other is one:
            continue
        if other.pass_name in one.depend or one.pass_name in other.before:
            return True
    return False
