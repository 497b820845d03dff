"""The allocator keeps its books straight, whatever is asked of it in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from podrun.cluster import load_cluster
from podrun.errors import ConflictError, NotFoundError, UsageError
from podrun.partition import events as ev
from podrun.partition.allocator import Allocator
from podrun.partition.placement import ipus_of
from podrun.partition.types import PartitionState, Requirements, SyncType

S = PartitionState


def make(allocator: Allocator, name: str, size: int, **needs: object) -> list[ev.Instruction]:
    return allocator.handle(ev.Create(Requirements(name, size, **needs), now=1.0))  # type: ignore[arg-type]


def activate(allocator: Allocator, name: str) -> None:
    operation = allocator.partition(name).operation
    allocator.handle(ev.Started(name, operation))
    allocator.handle(ev.Succeeded(name, operation))


@pytest.fixture
def pod16() -> Allocator:
    return Allocator(load_cluster("pod16"))


def test_life_of_a_partition(pod16: Allocator) -> None:
    instructions = make(pod16, "p", 8)
    assert instructions == [ev.SavePartition("p"), ev.Provision("p", 1)]
    assert pod16.partition("p").state is S.PENDING
    pod16.handle(ev.Started("p", 1))
    assert pod16.partition("p").state is S.PROVISIONING
    assert pod16.handle(ev.Succeeded("p", 1)) == [ev.SavePartition("p")]
    assert pod16.partition("p").state is S.ACTIVE
    assert pod16.partition("p").generation == 1
    assert pod16.handle(ev.RequestReset("p")) == [ev.SavePartition("p"), ev.Reset("p", 2)]
    assert pod16.partition("p").state is S.RESETTING
    pod16.handle(ev.Succeeded("p", 2))
    assert pod16.partition("p").generation == 2
    slices = pod16.partition("p").slices
    assert pod16.handle(ev.RequestRemove("p")) == [ev.SavePartition("p"), ev.Release("p", 3, slices)]
    assert pod16.handle(ev.RequestRemove("p")) == []
    assert pod16.handle(ev.Succeeded("p", 3)) == [ev.ForgetPartition("p")]
    assert pod16.partitions == {}


@pytest.mark.parametrize(
    ("size", "needs", "words"),
    [
        (3, {}, "power of two"),
        (0, {}, "power of two"),
        (32, {}, "larger than pod16"),
        (4, {"num_gcds": 3}, "GCDs"),
        (4, {"num_gcds": 8}, "GCDs"),
        (4, {"reconfigurable": True, "num_gcds": 2}, "one GCD"),
        (4, {"reconfigurable": True, "sync_type": SyncType.POD_NATIVE_DEFAULT}, "c2-compatible"),
        (4, {"num_ilds": 2}, "IPU-Link domains"),
        (4, {"allocation": "none"}, "no allocation 'none'"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    pod16: Allocator, size: int, needs: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        make(pod16, "p", size, **needs)
    assert caught.value.exit_code == 2
    assert pod16.partitions == {}
    pod16.validate_state()


@pytest.mark.parametrize("name", ["", "-x", "a b", "a/b", "x" * 65, "ä"])
def test_a_bad_name_is_refused(pod16: Allocator, name: str) -> None:
    with pytest.raises(UsageError, match="no name"):
        make(pod16, name, 4)


def test_sync_type_defaults(pod16: Allocator) -> None:
    make(pod16, "a", 4)
    make(pod16, "b", 4, reconfigurable=True)
    assert pod16.partition("a").sync_type is SyncType.POD_NATIVE_DEFAULT
    assert pod16.partition("b").sync_type is SyncType.C2_COMPATIBLE


def test_ipus_are_exclusive_and_aligned(pod16: Allocator) -> None:
    make(pod16, "one", 1)
    make(pod16, "two", 2)
    make(pod16, "eight", 8)
    assert ipus_of(pod16.cluster, pod16.partition("one").slices) == (0,)
    assert ipus_of(pod16.cluster, pod16.partition("two").slices) == (2, 3)
    assert ipus_of(pod16.cluster, pod16.partition("eight").slices) == tuple(range(8, 16))
    with pytest.raises(
        ConflictError, match="no 8 aligned IPUs are free: 5 IPUs are, partitions in the way: eight"
    ):
        make(pod16, "more", 8)
    with pytest.raises(ConflictError, match="exists already"):
        make(pod16, "one", 1)


def test_partitions_over_several_domains() -> None:
    allocator = Allocator(load_cluster("pod256"))
    with pytest.raises(UsageError, match="at least 2 GCDs"):
        make(allocator, "p", 128)
    make(allocator, "p", 128, num_gcds=2)
    make(allocator, "q", 64, num_ilds=2, num_gcds=4)
    assert ipus_of(allocator.cluster, allocator.partition("p").slices) == tuple(range(128))
    q = ipus_of(allocator.cluster, allocator.partition("q").slices)
    assert q == (*range(128, 160), *range(192, 224))
    with pytest.raises(UsageError, match="lies in one IPU-Link domain"):
        make(allocator, "r", 128, reconfigurable=True)
    allocator.validate_state()


def test_partitions_do_not_span_allocations(pod16: Allocator) -> None:
    pod16.handle(ev.RemoveAllocation("pod16"))
    pod16.handle(ev.CreateAllocation("left", ("ipum2", "ipum1")))
    pod16.handle(ev.CreateAllocation("right", ("ipum3",)))
    assert pod16.allocations["left"].agents == ("ipum1", "ipum2")
    with pytest.raises(ConflictError, match="is in allocation right"):
        pod16.handle(ev.CreateAllocation("more", ("ipum3", "ipum4")))
    with pytest.raises(UsageError, match="does not fit any allocation"):
        make(pod16, "p", 16)
    make(pod16, "p", 4, allocation="right")
    assert pod16.partition("p").slices[0].agent_id == "ipum3"
    with pytest.raises(ConflictError, match="has partitions: p"):
        pod16.handle(ev.RemoveAllocation("right"))
    with pytest.raises(NotFoundError, match="no allocation 'rigth'") as caught:
        pod16.handle(ev.RemoveAllocation("rigth"))
    assert "Did you mean right?" in str(caught.value.hint)


def test_a_lost_machine_needs_restart_and_then_reset(pod16: Allocator) -> None:
    make(pod16, "p", 16)
    activate(pod16, "p")
    done = pod16.handle(ev.MachineLost("ipum2", "its process ended"))
    assert done == [ev.SaveLost(), ev.StopMachines("ipum2"), ev.SavePartition("p")]
    assert pod16.partition("p").state is S.ERROR
    assert "vipu-admin restart agent ipum2" in pod16.partition("p").error
    assert pod16.handle(ev.MachineLost("ipum2", "again")) == []
    with pytest.raises(ConflictError, match="ipum2 is lost"):
        pod16.handle(ev.RequestReset("p"))
    with pytest.raises(ConflictError, match="does not reach it"):
        pod16.handle(ev.RequestPowerCycle("ipum2"))
    done = pod16.handle(ev.RequestRestart("ipum2"))
    assert done[-1] == ev.RestartMachines("ipum2", ("p",))
    assert pod16.partition("p").state is S.ERROR
    pod16.handle(ev.RequestReset("p"))
    operation = pod16.partition("p").operation
    pod16.handle(ev.Succeeded("p", operation))
    assert pod16.partition("p").state is S.ACTIVE
    pod16.validate_state()


def test_a_lost_machine_is_not_given_out(pod16: Allocator) -> None:
    pod16.handle(ev.MachineLost("ipum1", "its process ended"))
    make(pod16, "p", 4)
    assert pod16.partition("p").slices[0].agent_id == "ipum2"
    with pytest.raises(ConflictError, match="lost agents: ipum1"):
        make(pod16, "q", 8) and make(pod16, "r", 8)


def test_reports_of_old_operations_are_ignored(pod16: Allocator) -> None:
    make(pod16, "p", 16)
    pod16.handle(ev.Started("p", 1))
    pod16.handle(ev.MachineLost("ipum1", "its process ended"))
    assert pod16.handle(ev.Succeeded("p", 1)) == []
    assert pod16.partition("p").state is S.ERROR
    assert pod16.handle(ev.Failed("p", 1, "late")) == []
    assert "is lost" in pod16.partition("p").error


def test_a_failed_step_says_why(pod16: Allocator) -> None:
    make(pod16, "p", 4)
    pod16.handle(ev.Failed("p", 1, "machine ipum1 did not start"))
    assert pod16.partition("p").state is S.ERROR
    assert pod16.partition("p").error == "machine ipum1 did not start"
    assert pod16.partition("p").story[-1] == "PENDING -> ERROR: a step failed"


def test_a_power_cycle_breaks_partitions_until_reset(pod16: Allocator) -> None:
    make(pod16, "p", 2)
    make(pod16, "q", 2)
    activate(pod16, "p")
    activate(pod16, "q")
    done = pod16.handle(ev.RequestPowerCycle("ipum1"))
    assert done[-1] == ev.PowerCycle("ipum1")
    assert pod16.partition("p").state is pod16.partition("q").state is S.ERROR
    assert "vipu reset partition q" in pod16.partition("q").error


def test_recovery_provisions_what_was_active(pod16: Allocator) -> None:
    make(pod16, "a", 4)
    activate(pod16, "a")
    make(pod16, "b", 4)
    pod16.handle(ev.Failed("b", 2, "broken"))
    make(pod16, "c", 4)
    pod16.handle(ev.RequestRemove("c"))
    again = Allocator(pod16.cluster, partitions=pod16.partitions.values())
    done = again.handle(ev.Recover())
    assert [type(step) for step in done if not isinstance(step, ev.SavePartition)] == [
        ev.Provision,
        ev.Release,
    ]
    assert again.partition("a").state is S.PENDING
    assert again.partition("b").state is S.ERROR
    again.validate_state()


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), min_size=1, max_size=24))
def test_whatever_fits_by_size_in_falling_order_is_placed(sizes: list[int]) -> None:
    allocator = Allocator(load_cluster("pod64"))
    room = 64
    for i, size in enumerate(sorted(sizes, reverse=True)):
        if size > room:
            with pytest.raises(ConflictError):
                make(allocator, f"p{i}", size)
        else:
            make(allocator, f"p{i}", size)
            room -= size
        allocator.validate_state()


class AllocatorMachine(RuleBasedStateMachine):
    """Random requests and reports; the state holds together after each and refusals change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(load_cluster("pod128"))
        self.pending: list[tuple[str, int]] = []

    def run(self, event: ev.Event) -> None:
        before = dict(self.allocator.partitions), dict(self.allocator.allocations), set(self.allocator.lost)
        try:
            instructions = self.allocator.handle(event)
        except UsageError:
            after = self.allocator.partitions, self.allocator.allocations, self.allocator.lost
            assert before == after
            return
        for step in instructions:
            if isinstance(step, ev.Provision | ev.Reset | ev.Release):
                self.pending.append((step.partition, step.operation))

    names = st.sampled_from(["a", "b", "c", "d"])
    agents = st.sampled_from(["ipum1", "ipum2", "ipum16", "ipum17", "ipum32"])

    @rule(
        name=names,
        size=st.sampled_from([1, 2, 4, 16, 32, 64, 128, 5]),
        gcds=st.sampled_from([1, 2, 4]),
        ilds=st.sampled_from([0, 1, 2]),
        reconfigurable=st.booleans(),
    )
    def create(self, name: str, size: int, gcds: int, ilds: int, reconfigurable: bool) -> None:
        needs = Requirements(name, size, num_gcds=gcds, num_ilds=ilds, reconfigurable=reconfigurable)
        self.run(ev.Create(needs, now=0.0))

    @rule(name=names)
    def reset(self, name: str) -> None:
        self.run(ev.RequestReset(name))

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.run(ev.RequestRemove(name))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), how=st.sampled_from(["started", "succeeded", "failed"]))
    def report(self, data: st.DataObject, how: str) -> None:
        name, operation = data.draw(st.sampled_from(self.pending))
        if how == "started":
            self.run(ev.Started(name, operation))
        elif how == "succeeded":
            self.run(ev.Succeeded(name, operation))
        else:
            self.run(ev.Failed(name, operation, "it broke"))

    @rule(agent=agents)
    def lose(self, agent: str) -> None:
        self.run(ev.MachineLost(agent, "its process ended"))

    @rule(agent=agents)
    def restart(self, agent: str) -> None:
        self.run(ev.RequestRestart(agent))

    @rule(agent=agents)
    def power_cycle(self, agent: str) -> None:
        self.run(ev.RequestPowerCycle(agent))

    @rule(name=st.sampled_from(["x", "pod128"]), agents=st.lists(agents, min_size=1, max_size=3))
    def create_allocation(self, name: str, agents: list[str]) -> None:
        self.run(ev.CreateAllocation(name, tuple(agents)))

    @rule(name=st.sampled_from(["x", "pod128"]))
    def remove_allocation(self, name: str) -> None:
        self.run(ev.RemoveAllocation(name))

    @rule()
    def server_restart(self) -> None:
        old = self.allocator
        self.allocator = Allocator(
            old.cluster,
            allocations=old.allocations.values(),
            partitions=old.partitions.values(),
            lost=old.lost,
        )
        self.run(ev.Recover())

    @invariant()
    def holds_together(self) -> None:
        self.allocator.validate_state()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
