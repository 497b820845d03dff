"""Devices: ids, acquiring, what is busy, models and offline devices; errors that come up from below."""

from __future__ import annotations

import numpy as np
import pytest

import podrun.popart as popart
from podrun.core import errors
from podrun.core.error_codec import error_from_dict, error_to_dict
from podrun.core.errors import UsageError
from podrun.core.layout import IpuRange
from podrun.popart.values.exceptions import surfaced
from podrun.runtime.device import device_ids
from tests.popart.popart_sessions import linear


@pytest.fixture
def manager(monkeypatch):
    return popart.DeviceManager({"PODRUN_STANDALONE_IPUS": "4"})


def test_ids_count_singles_then_pairs_then_quads():
    ids = device_ids(4)
    assert len(ids) == 7
    assert ids[6] == IpuRange(0, 4)
    assert [device_ids(16)[i] for i in (24, 25, 26, 27)] == [IpuRange(4 * i, 4) for i in range(4)]


def test_a_process_cannot_have_more_than_there_is(manager):
    with manager.acquireAvailableDevice(2) as first, manager.acquireAvailableDevice(2) as second:
        assert (first.driverIds, second.driverIds) == ([0, 1], [2, 3])
        assert first.isAttached
        assert str(first.version) == "ipu2"
        assert manager.tryAcquireAvailableDevice(1) is None
        with pytest.raises(
            popart.popart_exception, match=r"Failed to acquire device with 1 IPUs.*gc-monitor"
        ):
            manager.acquireAvailableDevice(1)
        with pytest.raises(popart.popart_exception, match="Failed to acquire device with id '0'"):
            manager.acquireDeviceById(0)
        assert manager.tryAcquireDeviceById(6) is None
    assert not first.isAttached
    with manager.acquireDeviceById(6) as whole:
        assert whole.numIpus == 4
    with pytest.raises(popart.popart_exception, match="Failed to acquire device with 8"):
        manager.acquireAvailableDevice(8)


def test_devices_that_there_are_not_are_refused(manager):
    with pytest.raises(popart.popart_exception, match="power of two"):
        manager.acquireAvailableDevice(3)
    with pytest.raises(popart.poplar_exception, match="No such device set id: '999'"):
        manager.acquireDeviceById(999)
    with pytest.raises(popart.poplar_exception):
        manager.tryAcquireDeviceById(999)
    with pytest.raises(popart.popart_exception, match="never attached"):
        manager.acquireAvailableDevice(1, connectionType=popart.DeviceConnectionType.Never)
    with pytest.raises(popart.popart_exception, match="numIPUs, tilesPerIPU"):
        manager.createIpuModelDevice({"ipus": 2})


def test_enumeration_does_not_mind_who_uses_them(manager):
    with manager.acquireAvailableDevice(4):
        assert [d.id for d in manager.enumerateDevices(numIpus=2)] == [4, 5]
        assert manager.enumerateDevices(numIpus=8) == []
        assert manager.enumerateDevices(deviceType=popart.DeviceType.Cpu) == []


def test_on_demand_devices_attach_when_they_are_used(manager):
    manager.setOnDemandAttachTimeout(0)
    device = manager.acquireAvailableDevice(1, connectionType=popart.DeviceConnectionType.OnDemand)
    assert not device.isAttached
    assert device.version == "<unknown-ipu-unattached>"
    with manager.acquireAvailableDevice(4), pytest.raises(UsageError, match="Failed to attach"):
        device.device.ensure_attached()
    with device:
        device.device.ensure_attached()
        assert device.isAttached
    device.detach()


def test_random_devices_on_demand_leave_what_the_process_holds(manager):
    kinds = (popart.DeviceConnectionType.OnDemand, popart.DeviceSelectionCriterion.Random)
    total = max(device.id for device in manager.enumerateDevices(numIpus=1)) + 1
    with manager.acquireAvailableDevice(total // 2) as held:
        for _ in range(8):
            device = manager.acquireAvailableDevice(
                total // 2, connectionType=kinds[0], selectionCriterion=kinds[1]
            )
            with device:
                device.device.ensure_attached()
                assert device.id != held.id


def test_devices_that_are_no_hardware_have_their_types_and_sizes(manager):
    cpu = manager.createCpuDevice()
    assert (cpu.type, cpu.numIpus, cpu.version) == (popart.DeviceType.Cpu, 1, "<unknown-cpu>")
    model = manager.createIpuModelDevice({"numIPUs": 2, "tilesPerIPU": 8})
    assert (model.type, model.numIpus, model.tilesPerIPU) == (popart.DeviceType.IpuModel, 2, 8)
    offline = manager.createOfflineIpuFromDeviceInfo(model)
    assert (offline.numIpus, offline.version) == (2, "<offline-ipu>")
    for call in (offline.attach, offline.detach):
        with pytest.raises(popart.popart_exception, match="offline device"):
            call()
    assert manager.createOfflineIpuFromSystemString("bow-pod16", 16).device.target == "bow"
    assert popart.syncPatternToString(popart.SyncPattern.SinglePipeline) == "singlePipeline"
    assert popart.syncPatternFromString("replicaAndLadder") is popart.SyncPattern.ReplicaAndLadder


# --- Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "surfaces"),
    [
        (errors.PoplarError("m"), popart.poplar_exception),
        (errors.ApplicationRuntimeError("m"), popart.poplar_application_runtime_error),
        (errors.SystemRuntimeError("m"), popart.poplar_system_runtime_error),
        (errors.UnrecoverableRuntimeError("m"), popart.poplar_unrecoverable_runtime_error),
        (errors.UnknownRuntimeError("m"), popart.poplar_unknown_runtime_error),
        (errors.GraphMemoryAllocationError("m", profile_path="p"), popart.OutOfMemoryException),
        (errors.UsageError("m"), popart.popart_exception),
        (errors.UnsupportedError("m"), popart.popart_exception),
        (errors.UnimplementedError("m"), popart.popart_exception),
        (errors.InternalError("m"), popart.popart_internal_exception),
    ],
)
def test_errors_from_below_surface_under_both_names(raised, surfaces):
    with pytest.raises(surfaces) as caught, surfaced():
        raise raised
    assert type(caught.value) is surfaces or issubclass(type(caught.value), popart.popart_exception)
    assert caught.value.args[0] == "m"
    assert caught.value.__cause__ is raised
    if not isinstance(raised, (errors.UsageError, errors.InternalError)):
        assert isinstance(caught.value, type(raised))


def test_recoverable_errors_keep_their_action():
    with pytest.raises(popart.poplar_recoverable_runtime_error) as caught, surfaced():
        raise errors.RecoverableRuntimeError(
            "parity", recovery_action=errors.RecoveryAction.IPU_RESET, where="IPU 5", hint="reset"
        )
    error = caught.value
    assert error.recoveryAction is popart.RecoveryAction.IPU_RESET
    assert isinstance(error, (popart.poplar_runtime_error, popart.poplar_exception))
    assert isinstance(error, errors.RecoverableRuntimeError)
    assert (error.args[0], error.where, error.hint) == ("parity", "IPU 5", "reset")
    again = error_from_dict(error_to_dict(error))
    assert type(again) is type(error)
    assert error_to_dict(again) == error_to_dict(error)


def test_exceptions_derive_from_each_other_as_in_the_sdk():
    assert issubclass(popart.popart_runtime_error, popart.popart_exception)
    assert issubclass(popart.poplar_unknown_runtime_error, popart.poplar_system_runtime_error)
    assert issubclass(popart.poplar_application_runtime_error, popart.poplar_runtime_error)
    assert not issubclass(popart.poplar_application_runtime_error, popart.poplar_system_runtime_error)
    assert not issubclass(popart.poplar_exception, popart.popart_exception)


def one_weight(device):
    """A session that trains one weight on the device."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 2]))
    w = builder.addInitializedInputTensor(np.ones((2, 2), np.float32))
    loss = builder.aiGraphcore.identityloss([builder.aiOnnx.matmul([x, w])])
    flow = popart.DataFlow(1, {loss: popart.AnchorReturnType("All")})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.1), device)
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    return lambda: session.run(popart.PyStepIO({x: np.ones((2, 2), np.float32)}, anchors))


def test_the_environment_reaches_ipus_inside_of_the_process(tmp_path):
    environ = {"PODRUN_FAULTS": "ipu:0@batch=1:tile-parity", "PODRUN_CACHE_DIR": str(tmp_path)}
    with popart.DeviceManager(environ).acquireAvailableDevice(1) as device:
        run = one_weight(device)
        run()
        with pytest.raises(popart.poplar_recoverable_runtime_error, match="parity error on a tile of IPU 0"):
            run()
    assert list(tmp_path.iterdir())
    with popart.DeviceManager(environ).createIpuModelDevice({}) as model:
        model.attach()
        run = one_weight(model)
        run()
        run()


@pytest.mark.parametrize("how", ["session option", "engine option", "not asked"])
def test_floating_point_exceptions_on_request(how):
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2]))
    y = builder.aiOnnx.reciprocal([x])
    builder.addOutputTensor(y)
    options = popart.SessionOptions()
    options.enableFloatingPointChecks = how == "session option"
    if how == "engine option":
        options.engineOptions = {"debug.floatPointOpException": "true"}
    with popart.DeviceManager({}).acquireAvailableDevice(1) as device:
        flow = popart.DataFlow(1, [y])
        session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options)
        session.prepareDevice()
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: np.ones(2, np.float32)}, anchors))
        zero = popart.PyStepIO({x: np.zeros(2, np.float32)}, anchors)
        if how == "not asked":
            session.run(zero)
            assert np.isinf(anchors[y]).all()
            return
        said = r"TEXCPT_FP_OFLO in batch 1: Reciprocal:0, made by Reciprocal \(.*\), has values that are infinite"
        with pytest.raises(popart.poplar_application_runtime_error, match=said):
            session.run(zero)
        session.run(popart.PyStepIO({x: np.full(2, 4, np.float32)}, anchors))
        assert anchors[y].tolist() == [0.25, 0.25]


def test_a_program_that_was_launched_without_ipus_gets_none():
    manager = popart.DeviceManager({"PODRUN_OFFLINE_MODE": "1"})
    with pytest.raises(popart.popart_exception, match="launched without IPUs"):
        manager.acquireAvailableDevice(1)
    with manager.createIpuModelDevice({}) as model:
        assert model.attach()


def test_a_device_that_is_dropped_lets_its_ipus_go():
    manager = popart.DeviceManager({})
    held = [manager.acquireAvailableDevice(32) for _ in range(2)]
    assert manager.tryAcquireAvailableDevice(32) is None
    held.clear()
    with manager.acquireAvailableDevice(64) as device:
        assert device.isAttached


def test_a_session_keeps_its_device_and_lets_it_go_with_itself():
    manager = popart.DeviceManager({})
    case = linear()
    flow = popart.DataFlow(1, [case.y])
    session = popart.InferenceSession(case.model, flow, manager.acquireAvailableDevice(64), name="last")
    session.prepareDevice()
    assert manager.tryAcquireAvailableDevice(64) is None
    del session
    with manager.acquireAvailableDevice(64):
        pass


def test_out_of_memory_is_found_where_programs_look_for_it():
    assert popart.session.OutOfMemoryException is popart.OutOfMemoryException


@pytest.mark.parametrize("text", ["abc", "3", "0", "-4", ""])
def test_a_number_of_ipus_that_cannot_be(text):
    with pytest.raises(popart.popart_exception, match="PODRUN_STANDALONE_IPUS"):
        popart.DeviceManager({"PODRUN_STANDALONE_IPUS": text}).acquireAvailableDevice(1)


def test_a_model_has_the_architecture_that_it_is_asked_to_be(capsys):
    manager = popart.DeviceManager()
    assert [manager.createIpuModelDevice({"ipuVersion": v}).version for v in ("ipu1", "ipu2")] == [
        "ipu1",
        "ipu2",
    ]
    assert "modelled as of ipu2" in capsys.readouterr().err
    with pytest.raises(popart.popart_exception, match="Unknown ipuVersion 'ipu7'"):
        manager.createIpuModelDevice({"ipuVersion": "ipu7"})
