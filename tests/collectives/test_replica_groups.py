"""Groups of replicas: the SDK's examples, and that every replica is in just one group."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.collectives import check_groups
from podrun.collectives.replica_groups import GroupKind, replica_groups, strided_groups
from podrun.errors import UsageError


def test_the_sdks_groups_of_eight() -> None:
    assert replica_groups(8, GroupKind.CONSECUTIVE, 2) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert replica_groups(8, GroupKind.ORTHOGONAL, 2) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert replica_groups(4, GroupKind.ALL) == ((0, 1, 2, 3),)
    assert replica_groups(3, GroupKind.NONE) == ((0,), (1,), (2,))
    assert strided_groups(8, 2, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))


@given(stride=st.integers(1, 8), size=st.integers(1, 8), blocks=st.integers(1, 4))
def test_every_replica_is_in_one_group(stride: int, size: int, blocks: int) -> None:
    replicas = stride * size * blocks
    groups = strided_groups(replicas, stride, size)
    check_groups(groups, replicas)
    assert sorted(rank for group in groups for rank in group) == list(range(replicas))
    assert all(len(group) == size for group in groups)
    assert all(b - a == stride for group in groups for a, b in itertools.pairwise(group))


@pytest.mark.parametrize(("replicas", "size"), [(8, 3), (8, 0), (4, 8)])
def test_sizes_that_do_not_divide_are_refused(replicas: int, size: int) -> None:
    with pytest.raises(UsageError, match="do not fall into"):
        replica_groups(replicas, GroupKind.ORTHOGONAL, size)
