"""Which core a machine computes on, whose turn it is, and who may wait awake."""

from __future__ import annotations

import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from podrun.device.connection import AttachRequest, IpuRange
from podrun.device.program.cores import ANY_TIME, core_for, for_each, turn_on
from podrun.device.service.bell import LOOK, look_of


@given(st.integers(2, 64), st.integers(1, 300))
def test_no_core_has_two_more_than_another_and_neighbours_in_a_process_share_one(
    cores: int, machines: int
) -> None:
    for shared in (False, True):
        places = [core_for(place, machines, range(cores), shared=shared) for place in range(machines)]
        if machines < cores:
            assert set(places) == {None}
            continue
        chosen = [core for core in places if core is not None]
        if shared:
            assert chosen == sorted(chosen)
        else:
            assert chosen[:cores] == list(range(cores))
        counts = [chosen.count(core) for core in range(cores)]
        assert max(counts) - min(counts) <= 1


def test_a_host_with_one_core_leaves_the_choice_to_the_system() -> None:
    assert core_for(0, 4, [3]) is None


def test_machines_of_a_process_take_turns_on_a_core_and_not_elsewhere() -> None:
    assert turn_on(None) is ANY_TIME
    assert turn_on(100) is turn_on(100)
    here = threading.Event()

    def take_turn() -> None:
        with turn_on(100):
            here.set()

    with turn_on(100), turn_on(101), turn_on(None), turn_on(None):
        other = threading.Thread(target=take_turn)
        other.start()
        assert not here.is_set()
    other.join(10)
    assert here.is_set()


def test_processes_wait_awake_only_where_each_has_a_core() -> None:
    cores = len(os.sched_getaffinity(0))
    assert for_each(cores - 1, 1)
    assert not for_each(cores, 1)

    def request(job: int, owned: int) -> AttachRequest:
        return AttachRequest(IpuRange(0, job), IpuRange(0, owned), 1, "user", "command")

    assert look_of(request(4 * cores, 4 * cores), 4) == 0.0
    assert look_of(request(4, 1), 4) == (LOOK if cores >= 5 else 0.0)
    assert look_of(request(2, 2), 4) == (LOOK if cores >= 2 else 0.0)
