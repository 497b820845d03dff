"""All ways of reducing on a host give the same bits, in C and in Python."""

from __future__ import annotations

import pytest
from collective_ranks import on_all, ranks
from test_group_results import bits, expected, values

from podrun.collectives import Group, Reduction, plans


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("way", "members"),
    [
        ("posting_plan", 2),
        ("posting_plan", 9),
        ("slice_plan", 2),
        ("slice_plan", 9),
        ("handover_plan", 2),
        ("handover_plan", 3),
    ],
)
@pytest.mark.sample(5)
def test_every_way_of_reducing_gives_the_same_bits(
    way: str, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    chosen = getattr(plans, way)
    monkeypatch.setattr(plans, way, lambda *arguments: taken.append(way) or chosen(*arguments))
    for most in ("ADDED_BYTES", "ADDED_BY_TWO"):
        monkeypatch.setattr(plans, most, 1 << 40 if way == "posting_plan" else 0)
    monkeypatch.setattr(plans, "HANDED_BYTES", 1 << 16 if way == "handover_plan" else 0)
    size = 4001
    kinds = [
        ("float32", Reduction.SUM),
        ("float32", Reduction.MEAN),
        ("float32", Reduction.MIN),
        ("float64", Reduction.SUM),
        ("float16", Reduction.PRODUCT),
        ("bfloat16", Reduction.SUM),
        ("float8_e4m3fn", Reduction.SUM),
        ("int32", Reduction.MIN),
        ("int32", Reduction.SUM),
        ("int64", Reduction.SUM),
        ("uint8", Reduction.MAX),
    ]

    def work(group: Group) -> None:
        for dtype, reduction in kinds:
            parts = [values(dtype, size, rank) for rank in range(members)]
            mine = group.allocate(dtype, dtype, size)
            want = bits(expected(parts, reduction))
            for _ in range(3):
                mine[:] = parts[group.rank]
                assert bits(group.all_reduce(dtype, reduction)) == want
                assert bits(mine) == bits(parts[group.rank])
                if way != "handover_plan":
                    assert bits(group.all_reduce(dtype, reduction, in_place=True)) == want
                mine[:] = parts[group.rank]
                few = [part[:7] for part in parts]
                assert bits(group.all_reduce(dtype, reduction, count=7)) == bits(expected(few, reduction))

    with ranks(members) as groups:
        assert on_all(groups, work) == [None] * members
    assert set(taken) == {way}
