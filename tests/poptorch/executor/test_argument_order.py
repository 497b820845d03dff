"""Dictionaries and keywords in another order than at the first call: the same numbers; other keys: errors that name
them.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.poptorch.data.data_feeder import WrongElement, _rebatched, flattened  # noqa: E402
from podrun.poptorch.executor.calls import bind, check_same, same_again  # noqa: E402

Pair = collections.namedtuple("Pair", ["first", "second"])


class Optional(torch.nn.Module):
    """Takes anything; never run here."""

    def forward(self, batch: Any, scale: Any = None, **others: Any) -> Any:
        return batch


class Weighted(torch.nn.Module):
    """Adds up every tensor of nested arguments, each times a weight that depends on how it is reached."""

    def forward(self, batch: Any, **others: Any) -> Any:
        total = torch.zeros(2)
        for path, leaf in sorted(leaves_of((batch, others))):
            total = total + len(path) * leaf / (1 + sum(map(ord, path)) % 17)
        return {"total": total, "twice": 2 * total}


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested value with its path."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves_of(each, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from leaves_of(each, f"{path}/{place}")
    else:
        yield path, value


def nested(draw: random.Random, depth: int, leaf: Callable[[], Any]) -> Any:
    """A random nested value whose leaves ``leaf`` makes."""
    kind = draw.choice(("dict", "list", "pair", "leaf")) if depth else "leaf"
    if kind == "leaf":
        return leaf()
    if kind == "pair":
        return Pair(nested(draw, depth - 1, leaf), nested(draw, depth - 1, leaf))
    children = [nested(draw, depth - 1, leaf) for _ in range(draw.randint(1, 3))]
    return (
        dict(zip(draw.sample("abcde", len(children)), children, strict=True)) if kind == "dict" else children
    )


def shuffled(draw: random.Random, value: Any) -> Any:
    """The same value with every dictionary's keys in another order."""
    if isinstance(value, dict):
        keys = draw.sample(list(value), len(value))
        return {key: shuffled(draw, value[key]) for key in keys}
    if isinstance(value, Pair):
        return Pair(*(shuffled(draw, each) for each in value))
    return [shuffled(draw, each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(20))
def test_leaves_of_a_call_come_in_the_order_of_the_first_call(seed: int) -> None:
    draw, numbers = random.Random(seed), itertools.count()
    call = {"batch": nested(draw, 4, lambda: torch.full((1,), next(numbers))), "scale": torch.zeros(1)}
    call |= {f"k{place}": {"b": torch.ones(1), "a": torch.zeros(1)} for place in range(seed % 3)}
    model = Optional()
    first = bind(model, (), call)
    again = bind(model, (), shuffled(draw, call))
    ordered = check_same(first, again)
    assert all(a is b for a, b in zip(first.leaves, ordered.leaves, strict=True))
    assert ordered.names == first.names


def test_numbers_do_not_depend_on_the_order_of_keys() -> None:
    draw = random.Random(5)
    batch = {
        "x": torch.tensor([1.0, 2.0]),
        "parts": [{"q": torch.tensor([3.0, 4.0]), "k": torch.tensor([5.0, 6.0])}, Pair(torch.ones(2), {})],
    }
    others = {"mask": torch.tensor([7.0, 8.0]), "bias": torch.tensor([9.0, 1.0])}
    model = poptorch.inferenceModel(Weighted())
    expected = Weighted()(batch, **others)
    for _ in range(3):
        made = model(shuffled(draw, batch), **shuffled(draw, others))
        assert list(made) == ["total", "twice"]
        torch.testing.assert_close(made, expected)


def test_a_loaded_program_takes_keys_in_any_order(tmp_path: Path) -> None:
    path = str(tmp_path / "model.poptorch")
    batch = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([4.0, 8.0])}
    poptorch.inferenceModel(Weighted()).compileAndExport(path, batch, export_model=False)
    loaded = poptorch.inferenceModel(Weighted())
    loaded.loadExecutable(path)
    torch.testing.assert_close(loaded({"y": batch["y"], "x": batch["x"]}), Weighted()(batch))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"batch": {"x": 0}}, r"missing: batch\['y'\]"),
        ({"batch": {"x": 0, "z": 0}}, r"missing: batch\['y'\]; new: batch\['z'\]"),
        ({"batch": {"x": 0, "y": 0}, "scale": 0}, "new: scale"),
        ({"batch": {"x": 0, "y": 0}, "mask": {"a": 0}}, r"new: mask\['a'\]"),
        ({"batch": collections.OrderedDict(x=0, y=0)}, "types of its lists"),
        ({"batch": {"x": 0, "y": 1}}, r"Input \"batch\['y'\]\" was torch.float32 of shape \[2\]"),
        ({"batch": {"y": "a", "x": 0}}, r"Input \"batch\['y'\]\" has changed its type"),
    ],
)
def test_a_difference_is_told_by_the_name_of_the_input(call: Any, message: str) -> None:
    made = (lambda: torch.ones(2), lambda: torch.ones(3))

    def tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return type(value)((key, tensors(each)) for key, each in value.items())
        return made[value]() if isinstance(value, int) else value

    model = Optional()
    first = bind(model, (tensors({"x": 0, "y": 0}),), {})
    with pytest.raises(poptorch.Error, match=message):
        check_same(first, bind(model, (), tensors(call)))


def test_elements_of_a_loader_take_the_first_ones_order_of_keys() -> None:
    a, b = torch.zeros(3), torch.ones(3)
    _, layout = flattened({"a": a, "b": b})
    tensors, same = flattened({"b": b, "a": a}, layout)
    assert tensors[0] is a
    assert same == layout
    with pytest.raises(WrongElement, match=r"'c'.*the first one had 'a', 'b'"):
        flattened({"a": a, "c": b}, layout)
    joined = list(_rebatched(iter([{"a": a, "b": b}, {"b": b, "a": a}]), 6, drop_last=False))
    torch.testing.assert_close(joined, [{"a": torch.zeros(6), "b": torch.ones(6)}])


class FirstOfTwo(torch.nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        return first


def test_a_call_like_the_first_one_is_bound_without_its_signature() -> None:
    x, y = torch.ones(2, 3), torch.ones(4)
    first = bind(FirstOfTwo(), (x, y), {})
    again = same_again(first, (x + 1, y), {})
    bound = check_same(first, bind(FirstOfTwo(), (x + 1, y), {}))
    assert again is not None
    assert (again.names, again.structure) == (bound.names, bound.structure)
    assert again.tensors[1] is y
    assert torch.equal(again.tensors[0], x + 1)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(2, 3),), {}),
        ((torch.ones(2, 3),), {"second": torch.ones(4)}),
        ((torch.ones(3, 2), torch.ones(4)), {}),
        ((torch.ones(2, 3, dtype=torch.int32), torch.ones(4)), {}),
        ((torch.ones(3, 2).T, torch.ones(4)), {}),
        ((torch.ones(2, 3, requires_grad=True), torch.ones(4)), {}),
        ((torch.nn.Parameter(torch.ones(2, 3)), torch.ones(4)), {}),
        ((torch.ones(2, 3), None), {}),
        ((torch.ones(2, 3), torch.ones(4), torch.ones(4)), {}),
        (((torch.ones(2, 3), torch.ones(4)),), {}),
    ],
)
def test_any_other_call_is_bound_and_compared_as_a_whole(args: Any, kwargs: Any) -> None:
    assert same_again(bind(FirstOfTwo(), (torch.ones(2, 3), torch.ones(4)), {}), args, kwargs) is None


def test_tensors_of_a_nested_argument_are_no_arguments_by_position() -> None:
    x, y = torch.ones(2, 3), torch.ones(4)
    nested = bind(FirstOfTwo(), ((x, y),), {})
    assert len(nested.leaves) == 2
    assert same_again(nested, (x, y), {}) is None
