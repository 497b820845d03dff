"""popdist: its view of the environment, for every layout that podrun can launch and some that it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun import popdist
from podrun.core.errors import UnimplementedError
from podrun.popdist import collectives, core
from podrun.runtime.device import device_ids

NAMES = (
    "POPDIST_NUM_TOTAL_REPLICAS",
    "POPDIST_NUM_LOCAL_REPLICAS",
    "POPDIST_NUM_IPUS_PER_REPLICA",
    "POPDIST_REPLICA_INDEX_OFFSET",
    "POPDIST_LOCAL_INSTANCE_INDEX",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE",
)


def environment(total, local, ipus=1, instance=0, **more):
    return {
        "POPDIST_NUM_TOTAL_REPLICAS": str(total),
        "POPDIST_NUM_LOCAL_REPLICAS": str(local),
        "POPDIST_NUM_IPUS_PER_REPLICA": str(ipus),
        "POPDIST_REPLICA_INDEX_OFFSET": str(instance * local),
        "POPDIST_LOCAL_INSTANCE_INDEX": str(instance),
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
        **more,
    }


@pytest.fixture
def launched(monkeypatch):
    """Set the environment as podrun would."""

    def launch(**variables):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    launch()
    return launch


def test_outside_of_podrun_a_program_is_one_instance_with_one_replica(launched):
    assert not popdist.isPopdistEnvSet()
    numbers = [
        popdist.getNumTotalReplicas(),
        popdist.getNumLocalReplicas(),
        popdist.getNumIpusPerReplica(),
        popdist.getNumInstances(),
        popdist.getInstanceIndex(),
        popdist.getLocalInstanceIndex(),
        popdist.getReplicaIndexOffset(),
        popdist.getDeviceId(),
    ]
    assert numbers == [1, 1, 1, 1, 0, 0, 0, 0]
    assert popdist.checkNumIpusPerReplica(1)
    assert popdist.execute_on_instances({0}, max, 3, 4) == 4


powers = st.integers(0, 4).map(lambda n: 1 << n)


@given(instances=powers, local=powers, ipus=powers.filter(lambda n: n <= 4), data=st.data())
def test_every_uniform_layout_is_read_from_the_environment(instances, local, ipus, data):
    instance = data.draw(st.integers(0, instances - 1))
    layout = core.layout(environment(instances * local, local, ipus, instance))
    assert layout is not None
    assert (layout.job.count, layout.part.ipus.count) == (instances * local * ipus, local * ipus)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(instances * local, local, ipus, instance).items():
            patch.setenv(name, value)
        assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (instances, instance)
        assert popdist.getReplicaIndexOffset() == instance * local
        # The device id is that of the instance's IPUs among the devices of the whole partition.
        assert device_ids(layout.job.count)[popdist.getDeviceId()] == layout.part.ipus


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        (environment(4, 3), "does not divide"),
        (environment(4, 2, instance=2), "go beyond"),
        (environment(4, 2, POPDIST_REPLICA_INDEX_OFFSET="1"), "does not divide"),
        (environment(4, 2, POPDIST_NUM_LOCAL_REPLICAS="two"), "must be a number"),
        (environment(0, 1), "at least 1"),
        (environment(4, 2, POPDIST_REPLICA_INDEX_OFFSET="-2"), "at least 0"),
    ],
)
def test_environments_that_contradict_themselves(launched, variables, word):
    launched(**variables)
    with pytest.raises(popdist.popdist_error, match=word):
        popdist.getNumLocalReplicas()


def test_instances_of_different_sizes_have_no_number(launched):
    launched(**environment(5, 3, POPDIST_UNIFORM_REPLICAS_PER_INSTANCE="0"))
    assert popdist.getNumLocalReplicas() == 3
    for call in (popdist.getNumInstances, popdist.getInstanceIndex):
        with pytest.raises(popdist.popdist_error, match="equally many"):
            call()


def test_a_function_runs_on_the_named_instances_alone(launched):
    launched(**environment(4, 2, instance=1))
    assert popdist.execute_on_instances({0}, pytest.fail) is None
    assert popdist.execute_on_instances({0, 1}, "{}-{x}".format, 1, x=2) == "1-2"
    with pytest.raises(popdist.popdist_error, match="no instance 7"):
        popdist.execute_on_instances({7}, print)


def test_the_program_must_want_the_ipus_per_replica_it_was_launched_with(launched):
    launched(**environment(4, 2, ipus=2))
    assert popdist.checkNumIpusPerReplica(2)
    assert not popdist.checkNumIpusPerReplica(1)
    with pytest.raises(popdist.popdist_error, match="--ipus-per-replica 4"):
        popdist.getDeviceId(4)


def test_the_backend_is_registered_initialised_and_finalised_in_this_order_once():
    backend = popdist.backends
    popdist.init()
    popdist.init()
    assert popdist.isBackendInitialized()
    with pytest.raises(popdist.popdist_error, match="registered already"):
        popdist.registerDefaultBackend()
    with pytest.raises(popdist.popdist_error, match="initialised already"):
        popdist.initializeBackend()
    popdist.finalizeBackend()
    for call in (popdist.finalizeBackend, popdist.initializeBackend):
        with pytest.raises(popdist.popdist_error):
            call()
    assert not backend._backend.registered


def test_what_is_not_there_is_refused_by_name(launched):
    with pytest.raises(UnimplementedError, match="compiled for the SDK"):
        popdist.registerBackend("lib.so")


def test_an_instance_alone_collects_its_own(launched):
    array = np.arange(3.0)
    assert popdist.allReduceSum(array) is array
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert popdist.allGather(array).tolist() == [[0.0, 1.0, 2.0]]
    assert popdist.broadcast(array, 0) is array
    popdist.barrier()
    with pytest.raises(popdist.popdist_error, match="no instance 1"):
        popdist.broadcast(array, 1)
    collectives.instance_groups.close()


@pytest.mark.parametrize("array", [1, [1.0], "x"])
def test_collectives_take_arrays(launched, array):
    with pytest.raises(TypeError, match="incompatible function arguments"):
        popdist.allReduceSum(array)


def test_collectives_that_write_need_room_to(launched):
    with pytest.raises(popdist.popdist_error, match="contiguous and writable"):
        popdist.broadcast(np.zeros((4, 4))[:, 1])


def test_instances_that_no_launch_brought_together_say_so(launched):
    launched(**environment(4, 2))
    with pytest.raises(popdist.popdist_error, match="PODRUN_HOST_COLLECTIVES names no address"):
        popdist.barrier()


@pytest.mark.parametrize("seconds", ["0", "soon", "-3"])
def test_a_deadline_is_a_number_of_seconds(seconds):
    with pytest.raises(popdist.popdist_error, match="number of seconds"):
        collectives.Instances({collectives.TIMEOUT: seconds}).timeout  # noqa: B018


def test_session_options_take_the_replicas_of_the_launch(launched):
    import podrun.popart as popart
    from podrun.popart.sessions.instances import configureSessionOptions

    opts = configureSessionOptions(popart.SessionOptions())
    assert not opts.enableReplicatedGraphs
    launched(**environment(8, 4, instance=1))
    configureSessionOptions(opts)
    assert opts.enableReplicatedGraphs
    assert opts.enableDistributedReplicatedGraphs
    assert (opts.replicatedGraphCount, opts.globalReplicationFactor, opts.globalReplicaOffset) == (4, 8, 4)
    launched(**environment(8, 1, instance=3))
    configureSessionOptions(opts)
    assert not opts.enableReplicatedGraphs
    assert (opts.globalReplicationFactor, opts.globalReplicaOffset) == (8, 3)
