"""The allocator's state holds together after any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ConflictError, NotFoundError, UsageError
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.placement import ipus_of
from podrun.partition.state.values import PartitionState, Requirements, SyncType
from tests.sampling import examples

S = PartitionState


def make(allocator: Allocator, name: str, size: int, **needs: object) -> list[ev.MachineOrder]:
    return allocator.handle(ev.CreatePartition(Requirements(name, size, **needs), now=1.0))  # type: ignore[arg-type]


def activate(allocator: Allocator, name: str) -> None:
    operation = allocator.partition(name).operation
    allocator.handle(ev.OperationStarted(name, operation))
    allocator.handle(ev.OperationSucceeded(name, operation))


@pytest.fixture
def pod16() -> Allocator:
    return Allocator(load_cluster("pod16"))


def test_a_partition_goes_from_creation_to_removal(pod16: Allocator) -> None:
    instructions = make(pod16, "p", 8)
    assert instructions == [ev.ProvisionMachines("p", 1)]
    assert pod16.partition("p").state is S.PENDING
    pod16.handle(ev.OperationStarted("p", 1))
    assert pod16.partition("p").state is S.PROVISIONING
    assert pod16.handle(ev.OperationSucceeded("p", 1)) == []
    assert pod16.partition("p").state is S.ACTIVE
    assert pod16.partition("p").generation == 1
    assert pod16.handle(ev.ResetPartition("p")) == [ev.ResetMachines("p", 2)]
    assert pod16.partition("p").state is S.RESETTING
    pod16.handle(ev.OperationSucceeded("p", 2))
    assert pod16.partition("p").generation == 2
    slices = pod16.partition("p").slices
    assert pod16.handle(ev.RemovePartition("p")) == [
        ev.ReleaseMachines("p", 3, slices),
    ]
    assert pod16.handle(ev.RemovePartition("p")) == []
    assert pod16.handle(ev.OperationSucceeded("p", 3)) == []
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
def test_an_impossible_request_is_refused_and_changes_nothing(
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
        ConflictError,
        match="no 8 aligned IPUs are free: 5 IPUs are, room for a partition of 4; partitions in the way: eight",
    ):
        make(pod16, "more", 8)
    with pytest.raises(ConflictError, match="exists already"):
        make(pod16, "one", 1)


def test_small_partitions_leave_large_blocks_whole(pod16: Allocator) -> None:
    for name in "abcd":
        make(pod16, name, 4)
    for name in "acd":
        pod16.handle(ev.RemovePartition(name))
        pod16.handle(ev.OperationSucceeded(name, pod16.partition(name).operation))
    make(pod16, "small", 2)
    assert ipus_of(pod16.cluster, pod16.partition("small").slices) == (0, 1)
    make(pod16, "large", 8)
    assert ipus_of(pod16.cluster, pod16.partition("large").slices) == tuple(range(8, 16))


def test_deciding_changes_nothing(pod16: Allocator) -> None:
    make(pod16, "p", 4)
    before = dict(pod16.partitions)
    decision = pod16.propose(ev.AgentLost("ipum1", "its process ended"))
    assert (pod16.partitions, pod16.lost) == (before, set())
    assert decision.instructions == (ev.StopAgentMachines("ipum1"),)
    pod16.apply(decision)
    assert pod16.lost == {"ipum1"}
    assert pod16.partition("p").state is S.ERROR
    pod16.validate_state()


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
    done = pod16.handle(ev.AgentLost("ipum2", "its process ended"))
    assert done == [ev.StopAgentMachines("ipum2")]
    assert pod16.partition("p").state is S.ERROR
    assert "vipu-admin restart agent ipum2" in pod16.partition("p").error
    assert pod16.handle(ev.AgentLost("ipum2", "again")) == []
    with pytest.raises(ConflictError, match="ipum2 is lost"):
        pod16.handle(ev.ResetPartition("p"))
    with pytest.raises(ConflictError, match="cannot reach it"):
        pod16.handle(ev.PowerCycleAgent("ipum2"))
    done = pod16.handle(ev.RestartAgent("ipum2"))
    assert done[-1] == ev.ReplaceAgentMachines("ipum2", ("p",))
    assert pod16.partition("p").state is S.ERROR
    pod16.handle(ev.ResetPartition("p"))
    operation = pod16.partition("p").operation
    pod16.handle(ev.OperationSucceeded("p", operation))
    assert pod16.partition("p").state is S.ACTIVE
    pod16.validate_state()


def test_a_lost_machine_is_not_given_out(pod16: Allocator) -> None:
    pod16.handle(ev.AgentLost("ipum1", "its process ended"))
    make(pod16, "p", 4)
    assert pod16.partition("p").slices[0].agent_id == "ipum2"
    with pytest.raises(ConflictError, match="lost agents: ipum1"):
        make(pod16, "q", 8) and make(pod16, "r", 8)


def test_reports_of_old_operations_are_ignored(pod16: Allocator) -> None:
    make(pod16, "p", 16)
    pod16.handle(ev.OperationStarted("p", 1))
    pod16.handle(ev.AgentLost("ipum1", "its process ended"))
    assert pod16.handle(ev.OperationSucceeded("p", 1)) == []
    assert pod16.partition("p").state is S.ERROR
    assert pod16.handle(ev.OperationFailed("p", 1, "late")) == []
    assert "is lost" in pod16.partition("p").error


def test_a_failed_operation_says_why(pod16: Allocator) -> None:
    make(pod16, "p", 4)
    pod16.handle(ev.OperationFailed("p", 1, "machine ipum1 did not start"))
    assert pod16.partition("p").state is S.ERROR
    assert pod16.partition("p").error == "machine ipum1 did not start"
    assert pod16.partition("p").story[-1] == "PENDING -> ERROR: an operation failed"


def test_a_power_cycle_breaks_partitions_until_reset(pod16: Allocator) -> None:
    make(pod16, "p", 2)
    make(pod16, "q", 2)
    activate(pod16, "p")
    activate(pod16, "q")
    done = pod16.handle(ev.PowerCycleAgent("ipum1"))
    assert done[-1] == ev.PowerCycleMachines("ipum1")
    assert pod16.partition("p").state is pod16.partition("q").state is S.ERROR
    assert "vipu reset partition q" in pod16.partition("q").error


def test_a_restarted_server_provisions_active_partitions(pod16: Allocator) -> None:
    make(pod16, "a", 4)
    activate(pod16, "a")
    make(pod16, "b", 4)
    pod16.handle(ev.OperationFailed("b", 2, "broken"))
    make(pod16, "c", 4)
    pod16.handle(ev.RemovePartition("c"))
    again = Allocator(pod16.cluster, partitions=pod16.partitions.values())
    done = again.handle(ev.ServerStarted())
    assert [type(instruction) for instruction in done] == [
        ev.ProvisionMachines,
        ev.ReleaseMachines,
    ]
    assert again.partition("a").state is S.PENDING
    assert again.partition("b").state is S.ERROR
    again.validate_state()


@given(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), min_size=1, max_size=24))
def test_partitions_in_order_of_falling_size_all_fit_if_their_sum_does(sizes: list[int]) -> None:
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
            if isinstance(step, ev.ProvisionMachines | ev.ResetMachines | ev.ReleaseMachines):
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
        self.run(ev.CreatePartition(needs, now=0.0))

    @rule(name=names)
    def reset(self, name: str) -> None:
        self.run(ev.ResetPartition(name))

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.run(ev.RemovePartition(name))

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), how=st.sampled_from(["started", "succeeded", "failed"]))
    def report(self, data: st.DataObject, how: str) -> None:
        name, operation = data.draw(st.sampled_from(self.pending))
        if how == "started":
            self.run(ev.OperationStarted(name, operation))
        elif how == "succeeded":
            self.run(ev.OperationSucceeded(name, operation))
        else:
            self.run(ev.OperationFailed(name, operation, "it broke"))

    @rule(agent=agents)
    def lose(self, agent: str) -> None:
        self.run(ev.AgentLost(agent, "its process ended"))

    @rule(agent=agents)
    def restart(self, agent: str) -> None:
        self.run(ev.RestartAgent(agent))

    @rule(agent=agents)
    def power_cycle(self, agent: str) -> None:
        self.run(ev.PowerCycleAgent(agent))

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
        self.run(ev.ServerStarted())

    @invariant()
    def holds_together(self) -> None:
        self.allocator.validate_state()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_of_several_resets_of_one_generation_the_first_counts(pod16: Allocator) -> None:
    make(pod16, "p", 16)
    activate(pod16, "p")
    assert pod16.handle(ev.ResetPartition("p", 1)) == [ev.ResetMachines("p", 2)]
    for late in (ev.ResetPartition("p", 1), ev.ResetPartition("p"), ev.PowerCycleAgent("ipum1", 1)):
        assert pod16.handle(late) == [], "it is under way"
        assert pod16.partition("p").state is S.RESETTING
    pod16.handle(ev.OperationSucceeded("p", 2))
    for later in (ev.ResetPartition("p", 1), ev.RestartAgent("ipum1", 1), ev.PowerCycleAgent("ipum2", 1)):
        assert pod16.handle(later) == [], "it is done"
        assert pod16.partition("p").state is S.ACTIVE
    assert pod16.handle(ev.ResetPartition("p", 2)) == [ev.ResetMachines("p", 3)]


def test_a_reset_of_an_earlier_generation_still_mends_what_broke_since(pod16: Allocator) -> None:
    make(pod16, "p", 16)
    activate(pod16, "p")
    pod16.handle(ev.ResetPartition("p", 1))
    pod16.handle(ev.OperationSucceeded("p", 2))
    pod16.handle(ev.AgentLost("ipum2", "gone"))
    assert pod16.handle(ev.RestartAgent("ipum2", 1)) == [ev.ReplaceAgentMachines("ipum2", ("p",))]
    assert len(pod16.handle(ev.ResetPartition("p", 1))) == 1
