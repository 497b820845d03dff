"""The arithmetic of IPUs, replicas, instances and machines, over generated shapes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.collectives import rank_groups
from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import UsageError
from podrun.core.layout import (
    GroupKind,
    InstancePart,
    IpuRange,
    Layout,
    is_power_of_two,
    replica_groups,
    replicas_on,
    slice_of,
    strided_groups,
)

POWERS = st.integers(0, 6).map(lambda bit: 1 << bit)
COUNTS = st.integers(1, 64)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    ipus = draw(POWERS)
    each = max(IPUS_PER_MACHINE // ipus, 1)
    return Layout.of(draw(st.one_of(COUNTS.map(lambda n: n * each), st.integers(1, each))), ipus)


@st.composite
def ranges(draw: st.DrawFn) -> IpuRange:
    return IpuRange(draw(st.integers(0, 60)), draw(st.integers(0, 60)))


@given(layouts())
def test_every_ipu_of_a_program_is_on_one_machine_at_one_position(layout: Layout) -> None:
    assert layout.is_consistent
    assert layout.machines == -(-layout.ipus // IPUS_PER_MACHINE)
    held: dict[int, set[int]] = {}
    for replica in range(layout.replicas):
        for ipu in range(layout.ipus_per_replica):
            machine = (replica * layout.ipus_per_replica + ipu) // IPUS_PER_MACHINE
            held.setdefault(machine, set()).add(replica)
            assert layout.position_of(ipu) == (
                machine % layout.machines_per_replica if layout.machines_per_replica > 1 else None
            )
    for machine in range(layout.machines):
        first = machine // layout.machines_per_replica * layout.replicas_per_machine
        assert held[machine] == set(range(first, first + layout.replicas_per_machine))
    assert layout.machines_per_position * layout.machines_per_replica == layout.machines
    assert layout.ipus_per_position * layout.machines_per_replica == layout.ipus_per_replica


@given(layouts(), st.sampled_from(["replicas", "machines", "replicas_per_machine"]), st.integers(1, 3))
def test_a_layout_with_another_number_is_not_consistent(layout: Layout, name: str, more: int) -> None:
    numbers = {field: getattr(layout, field) for field in Layout.__dataclass_fields__}
    assert not Layout(**{**numbers, name: numbers[name] + more}).is_consistent


@pytest.mark.parametrize(("replicas", "ipus"), [(0, 1), (1, 0), (1, 3), (5, 1), (3, 2), (9, 1)])
def test_replicas_that_do_not_fill_machines_are_refused(replicas: int, ipus: int) -> None:
    with pytest.raises(UsageError):
        Layout.of(replicas, ipus)


@given(ranges(), ranges())
def test_overlap_holds_the_common_ipus(one: IpuRange, other: IpuRange) -> None:
    assert set(one.overlap(other)) == set(one) & set(other)
    assert set(other.overlap(one)) == set(one) & set(other)


@given(st.integers(0, 60), COUNTS, st.sampled_from([1, 2, 4]))
def test_machines_of_a_range_are_those_that_hold_its_ipus(first: int, count: int, each: int) -> None:
    found = IpuRange(first, count).machines(each)
    assert set(found) == {ipu // each for ipu in range(first, first + count)}


@given(COUNTS, COUNTS, POWERS)
def test_equal_instances_share_out_all_replicas_in_order(instances: int, each: int, ipus: int) -> None:
    replicas = instances * each
    parts = [InstancePart.of(i, instances, replicas, ipus) for i in range(instances)]
    assert [ipu for part in parts for ipu in part.ipus] == list(range(replicas * ipus))
    assert all(part.fits(replicas) and part.is_one_of_equal_parts(replicas) for part in parts)
    assert not InstancePart(replicas - each + 1, each, ipus).fits(replicas)
    assert each == 1 or not InstancePart(1, each, ipus).is_one_of_equal_parts(replicas)


@given(layouts(), st.data())
def test_replicas_of_an_owner_on_its_machines_are_all_of_its_replicas(
    layout: Layout, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, layout.replicas - 1))
    count = data.draw(st.integers(1, layout.replicas - first))
    owned = InstancePart(first, count, layout.ipus_per_replica).ipus
    seen: dict[int, int] = {}
    for machine in owned.machines():
        found = replicas_on(
            IpuRange(machine * IPUS_PER_MACHINE, IPUS_PER_MACHINE), owned, layout.ipus_per_replica
        )
        assert found is not None
        for replica in range(found.start, found.stop):
            seen[replica] = seen.get(replica, 0) + 1
    assert seen == dict.fromkeys(range(count), layout.machines_per_replica)


def test_parts_of_replicas_are_refused() -> None:
    machine = IpuRange(0, 4)
    assert replicas_on(machine, IpuRange(0, 3), 2) is None
    assert replicas_on(machine, IpuRange(1, 4), 2) is None
    assert replicas_on(machine, IpuRange(0, 12), 8) is None
    assert replicas_on(IpuRange(4, 4), IpuRange(0, 16), 8) == slice(0, 1)


@given(st.integers(1, 40), st.integers(0, 1000))
def test_slices_cover_everything_once_and_differ_by_one_at_most(ranks: int, size: int) -> None:
    slices = [slice_of(rank, ranks, size) for rank in range(ranks)]
    assert [n for each in slices for n in range(each.start, each.stop)] == list(range(size))
    sizes = {each.stop - each.start for each in slices}
    assert max(sizes) - min(sizes) <= 1


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
    rank_groups(groups, replicas)
    assert sorted(rank for group in groups for rank in group) == list(range(replicas))
    assert all(len(group) == size for group in groups)
    assert all(b - a == stride for group in groups for a, b in itertools.pairwise(group))


@pytest.mark.parametrize(("replicas", "size"), [(8, 3), (8, 0), (4, 8)])
def test_sizes_that_do_not_divide_are_refused(replicas: int, size: int) -> None:
    with pytest.raises(UsageError, match="do not fall into"):
        replica_groups(replicas, GroupKind.ORTHOGONAL, size)


def test_zero_is_no_power_of_two() -> None:
    assert [number for number in range(-2, 9) if is_power_of_two(number)] == [1, 2, 4, 8]
