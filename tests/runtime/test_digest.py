"""Digests of graphs: values that differ in type, length or nesting have different digests, equal ones the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import ml_dtypes
import numpy as np
import pytest

from podrun.core.errors import InternalError
from podrun.runtime.digest import GraphDigest


class Kind(Enum):
    """A value of an enum."""

    A = 1


class Word(str, Enum):  # noqa: UP042  An enum that is also a text.
    """A text of an enum."""

    A = "1"


@dataclass(frozen=True)
class Empty:
    """A dataclass without fields."""


@dataclass(frozen=True)
class Holder:
    """A dataclass with a field."""

    value: object


@dataclass(frozen=True)
class Other:
    """Another dataclass with the same field."""

    value: object


DIFFERENT = (
    *(None, True, 1, 1.0, "1", b"1", Kind.A, Word.A, np.float32(1), np.float64(1), np.dtype("float32")),
    *((), (1,), (1, 1), ((1,),), (1, (1,)), {}, {1: 1}, {"1": 1}, Empty(), Holder(1), Other(1), Holder((1,))),
    *(np.ones(1, np.float32), np.ones((1, 1), np.float32), np.ones(1, np.int32), np.array(["1"], object)),
)


def digest(*values: object) -> str:
    """The digest of values, one after the other."""
    taken = GraphDigest()
    for value in values:
        taken.add(value)
    return taken.hexdigest()


def test_values_that_look_alike_have_digests_of_their_own() -> None:
    digests = [digest(value) for value in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert digests == [digest(value) for value in DIFFERENT]
    assert len({digest("a", "bc"), digest("ab", "c"), digest("abc"), digest(("a", "bc"))}) == 4


def test_order_counts_in_sequences_and_in_no_set_or_mapping() -> None:
    assert digest((1, 2)) == digest([1, 2]) != digest((2, 1))
    assert digest({1, 2}) == digest(frozenset((2, 1)))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})


def test_a_value_of_another_kind_is_an_error_of_podrun() -> None:
    with pytest.raises(InternalError, match="no digest can be made"):
        digest(Holder(object()))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_arrays_of_types_beyond_numpys(name: str, shape: tuple[int, ...]) -> None:
    def text(value: np.ndarray) -> str:
        digest = GraphDigest()
        digest.add(value)
        return digest.hexdigest()

    ones = np.ones(shape, getattr(ml_dtypes, name))
    values = [ones, ones.astype(np.int8), *([ones * 0] if ones.size else [])]
    assert len(set(map(text, values))) == len(values)
    assert text(ones.T.copy().T) == text(ones)
