"""Values whose methods are generated on first use behave as those of the standard library."""

from __future__ import annotations

import abc
import copy
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable
from dataclasses import InitVar, field
from typing import Any, ClassVar

import pytest

from podrun.core import quick_dataclass


def _values(decorate: Callable[..., Any]) -> dict[str, Any]:
    """The same classes, made with one decorator or the other."""

    @decorate(frozen=True, slots=True)
    class Point:
        """Frozen, with defaults of all kinds."""

        LIMIT: ClassVar[int] = 3
        x: int
        names: list[str] = field(default_factory=list, compare=False)
        _hidden: str = field(default="h", repr=False)
        late: int = field(default=5, init=False)

        def __post_init__(self) -> None:
            if self.x > self.LIMIT:
                raise ValueError("too far")

    @decorate(frozen=True)
    class Mixed:
        """Fields that are only named, that a factory makes, and one that nobody sets."""

        self_: int = field(kw_only=True)
        object: str
        made_later: list[int] = field(default_factory=list, init=False)
        unset: int = field(init=False)
        given_default: int = field(default=4, init=False)
        last: tuple[int, ...] = field(default=(1,), kw_only=True)

    @decorate(slots=True)
    class Nothing:
        """Has no fields."""

    @decorate(slots=True)
    class Counter:
        """May change, so it has no hash."""

        n: int = 0
        inner: Any = None

    @decorate(frozen=True, slots=True, eq=False)
    class Token:
        """Equal to itself only."""

        name: str

    @decorate(frozen=True)
    class Own:
        """Has methods of its own."""

        name: str

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own)

        def __hash__(self) -> int:
            return 7

    @decorate
    class Plain:
        """Without parameters, and with a dictionary."""

        n: int

    @decorate(frozen=True, slots=True)
    class Farther(Point):
        """Inherits fields."""

        y: int = 9

    @decorate(frozen=True, order=True)
    class Ordered:
        """Has an order."""

        n: int

    kinds = (Point, Mixed, Nothing, Counter, Token, Own, Plain, Farther, Ordered)
    return {kind.__name__: kind for kind in kinds} | _values_left_to_the_standard_library(decorate)


def _values_left_to_the_standard_library(decorate: Callable[..., Any]) -> dict[str, Any]:
    """Classes with something that only the standard library's decorator looks at."""

    @decorate
    class Started:
        """Has an ``__init__`` of its own."""

        n: int = 0

        def __init__(self) -> None:
            self.n = 42

    @decorate(frozen=True)
    class Doubled:
        """Has a parameter that is no field."""

        n: int
        factor: InitVar[int] = 2
        twice: int = field(init=False)

        def __post_init__(self, factor: int) -> None:
            object.__setattr__(self, "twice", self.n * factor)

    class Shown(abc.ABC):
        @abc.abstractmethod
        def __repr__(self) -> str: ...

    @decorate(slots=True)
    class Concrete(Shown):
        """Gets the method that its base lacks."""

        n: int

    @decorate(frozen=True, slots=True)
    class Odd:
        """Its fields are called as a generated method calls other things."""

        self: int
        _set: int = 1
        _default_self: int = 2

    return {kind.__name__: kind for kind in (Started, Doubled, Concrete, Odd)}


STANDARD = _values(dataclasses.dataclass)


@pytest.fixture
def quick() -> dict[str, Any]:
    """Fresh classes, none of whose methods has been used."""
    return _values(quick_dataclass.dataclass)


ACTIONS: dict[str, Callable[[Any], object]] = {
    "repr": lambda k: repr(k["Point"](1, ["a"])).replace("test_quick_dataclass.", ""),
    "equal": lambda k: (k["Point"](1, ["a"]) == k["Point"](1, []), k["Point"](1) == k["Point"](2)),
    "other class": lambda k: (k["Point"](1) == k["Farther"](1), k["Point"](1) == 1),
    "hash": lambda k: hash(k["Point"](1)) == hash(k["Point"](1, ["b"])),
    "hash value": lambda k: hash(k["Point"](1)),
    "no hash": lambda k: hash(k["Counter"](1)),
    "identity": lambda k: (k["Token"]("a") == k["Token"]("a"), len({k["Token"]("a"), k["Token"]("a")})),
    "own methods": lambda k: (repr(k["Own"]("a")), k["Own"]("a") == k["Own"]("b"), hash(k["Own"]("a"))),
    "too many": lambda k: k["Point"](1, [], "", 4),
    "missing": lambda k: k["Point"](),
    "unknown": lambda k: k["Counter"](m=1),
    "only named": lambda k: vars(k["Mixed"]("o", self_=2)),
    "only named, not by position": lambda k: k["Mixed"]("o", 2),
    "only named, missing": lambda k: k["Mixed"]("o"),
    "no fields": lambda k: (repr(k["Nothing"]()), k["Nothing"](1)),
    "defaults of code": lambda k: k["Mixed"].__init__.__module__,
    "checked": lambda k: k["Point"](4),
    "fresh lists": lambda k: k["Point"](1).names is k["Point"](1).names,
    "assign": lambda k: setattr(k["Point"](1), "x", 2),
    "assign else": lambda k: setattr(k["Token"]("a"), "name", 2),
    "delete": lambda k: delattr(k["Point"](1), "x"),
    "change": lambda k: _changed(k["Counter"](1)),
    "no such slot": lambda k: setattr(k["Counter"](1), "m", 2),
    "recursive": lambda k: repr(_holding_itself(k["Counter"](1))),
    "replace": lambda k: dataclasses.replace(k["Point"](1, ["a"]), x=2).x,
    "dict": lambda k: dataclasses.asdict(k["Counter"](1, k["Counter"](2))),
    "copy": lambda k: copy.copy(k["Farther"](1)) == copy.deepcopy(k["Farther"](1)),
    "copy of frozen": lambda k: copy.copy(k["Point"](1, ["a"])).names,
    "with a dictionary": lambda k: vars(k["Plain"](1)),
    "signature": lambda k: [str(inspect.signature(kind)) for kind in k.values()],
    "class method": lambda k: k["Point"].__init__.__annotations__,
    "fields": lambda k: [(f.name, f.type, f.init, f.kw_only) for f in dataclasses.fields(k["Farther"])],
    "match": lambda k: [kind.__match_args__ for kind in k.values()],
    "slots": lambda k: [getattr(kind, "__slots__", None) for kind in k.values()],
    "documentation": lambda k: [kind.__doc__ for kind in k.values()],
    "parameters": lambda k: [repr(kind.__dataclass_params__) for kind in k.values()],
    "inherited": lambda k: (repr(k["Farther"](1, y=3)), k["Farther"](1) == k["Farther"](1)),
    "order": lambda k: (k["Ordered"](1) < k["Ordered"](2), k["Point"](1) < k["Point"](2)),
    "names": lambda k: (k["Point"].__init__.__qualname__, k["Point"].__setattr__.__qualname__),
    "own start": lambda k: k["Started"]().n,
    "parameter that is no field": lambda k: (k["Doubled"](2).twice, k["Doubled"](2, 3).twice),
    "abstract base": lambda k: repr(k["Concrete"](1)),
    "names of fields": lambda k: repr(k["Odd"](5)),
    "order of annotations": lambda k: list(k["Mixed"].__init__.__annotations__),
    "thawed subclass": lambda k: dataclasses.dataclass(type("Thawed", (k["Point"],), {})),
    "frozen subclass": lambda k: repr(
        dataclasses.dataclass(frozen=True)(type("Ice", (k["Token"],), {}))("a")
    ),
}


def _changed(value: Any) -> int:
    value.n += 1
    return int(value.n)


def _holding_itself(value: Any) -> Any:
    value.inner = value
    return value


def _outcome(action: Callable[[Any], object], kinds: Any) -> object:
    try:
        return action(kinds)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=list(ACTIONS))
def test_values_do_what_those_of_the_standard_library_do(
    action: Callable[[Any], object], quick: dict[str, Any]
) -> None:
    text = repr(_outcome(action, quick))
    assert text == repr(_outcome(action, STANDARD))
    assert repr(_outcome(action, quick)) == text  # Also when the methods are there.


@quick_dataclass.dataclass(frozen=True, slots=True)
class _Sent:
    """A value that can be found by its name."""

    n: int
    texts: tuple[str, ...] = ()


def test_a_frozen_value_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(_Sent(1, ("a",)))) == _Sent(1, ("a",))  # noqa: S301 - our own bytes


def test_a_method_is_generated_when_it_is_used_and_then_stays(quick: dict[str, Any]) -> None:
    kind = quick["Point"]
    assert {type(vars(kind)[name]).__name__ for name in ("__init__", "__eq__", "__repr__")} == {"_OnFirstUse"}
    kind(1)
    assert inspect.isfunction(vars(kind)["__init__"])
    assert type(vars(kind)["__repr__"]).__name__ == "_OnFirstUse"
    assert kind.__init__ is kind.__init__


def test_a_default_before_a_field_without_one_is_told_at_once() -> None:
    def declare(decorate: Callable[..., Any]) -> str:
        with pytest.raises(TypeError) as told:

            @decorate
            class Wrong:
                """Its fields are in a wrong order."""

                n: int = 0
                m: int

        return str(told.value)

    assert declare(quick_dataclass.dataclass) == declare(dataclasses.dataclass)


def test_a_method_that_was_put_in_the_place_of_a_generated_one_stays(quick: dict[str, Any]) -> None:
    kind, calls = quick["Plain"], []
    original = vars(kind)["__init__"]

    def counted(self: Any, n: int) -> None:
        calls.append(n)
        original.__get__(self, kind)(n)

    kind.__init__ = counted
    assert [kind(n).n for n in range(3)] == calls == [0, 1, 2]


def test_a_class_made_of_another_ones_attributes_generates_methods_once(quick: dict[str, Any]) -> None:
    copied = type("Copied", (), {k: v for k, v in vars(quick["Plain"]).items() if k != "__dict__"})
    assert copied(3).n == 3
    assert copied.__init__ is copied.__init__


def test_threads_that_use_a_class_first_all_get_values(quick: dict[str, Any]) -> None:
    kind, together, values = quick["Point"], threading.Barrier(8), []

    def make() -> None:
        together.wait(60)
        values.append(kind(1, ["a"]))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [value.names for value in values] == [["a"]] * 8
    assert len(set(values)) == 1
