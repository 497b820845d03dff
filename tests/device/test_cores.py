"""The core on which a machine computes, turns on a core, and processes that may wait awake."""

from __future__ import annotations

import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest
from podrun.device.program.machine_groups import (
    NO_CORE_LOCK,
    choose_core,
    core_lock_of,
    has_core_for_each_process,
)
from podrun.device.service.doorbell import SPIN_SECONDS, spin_seconds_for


@given(st.integers(2, 64), st.integers(1, 300))
def test_no_core_has_two_more_than_another_and_neighbours_in_a_process_share_one(
    cores: int, machines: int
) -> None:
    for shared in (False, True):
        places = [choose_core(place, machines, range(cores), shared=shared) for place in range(machines)]
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
    assert choose_core(0, 4, [3]) is None


def test_machines_of_a_process_take_turns_on_a_core_and_not_elsewhere() -> None:
    assert core_lock_of(None) is NO_CORE_LOCK
    assert core_lock_of(100) is core_lock_of(100)
    here = threading.Event()

    def take_turn() -> None:
        with core_lock_of(100):
            here.set()

    with core_lock_of(100), core_lock_of(101), core_lock_of(None), core_lock_of(None):
        other = threading.Thread(target=take_turn)
        other.start()
        assert not here.is_set()
    other.join(60)
    assert here.is_set()


def test_processes_wait_awake_only_where_each_has_a_core() -> None:
    cores = len(os.sched_getaffinity(0))
    assert has_core_for_each_process(cores - 1, 1)
    assert not has_core_for_each_process(cores, 1)

    def request(job: int, owned: int) -> AttachRequest:
        return AttachRequest(IpuRange(0, job), IpuRange(0, owned), 1, "user", "command")

    assert spin_seconds_for(request(4 * cores, 4 * cores), 4) == 0.0
    assert spin_seconds_for(request(4, 1), 4) == (SPIN_SECONDS if cores >= 5 else 0.0)
    assert spin_seconds_for(request(2, 2), 4) == (SPIN_SECONDS if cores >= 2 else 0.0)
