"""`IPUConfig`: names, defaults, types and messages of its options."""

from __future__ import annotations

import copy
import typing
import warnings
from types import SimpleNamespace

import pytest

from podrun.tensorflow.sdk import config as config_module
from podrun.tensorflow.sdk.config import (
    MESSAGE_ENUMERATIONS,
    DeviceConnectionType,
    IPUConfig,
    SelectionOrder,
    StochasticRoundingBehaviour,
    _ConfigBase,
    deprecate_config_attribute,
    deprecate_config_attributes,
    get_ipu_config,
    reset_ipu_configuration,
)
from podrun.tensorflow.sdk.config_descriptions import DESCRIPTIONS
from podrun.tensorflow.sdk.pipeline_rules import ThreeState


def test_all_options_are_there_with_their_defaults() -> None:
    options = IPUConfig().to_dict()
    assert len(options) == 57
    assert options["io_tiles.available_memory_proportion"] == 0.9
    assert options["optimizations.minimum_remote_tensor_size"] == 128


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("io_tiles.num_io_tiles", True),
        ("allow_recompute", 1),
        ("device_connection.type", True),
        ("auto_select_ipus", "2"),
        ("auto_select_ipus", [1, True]),
    ],
)
def test_types_are_exact(path: str, value: object) -> None:
    with pytest.raises(TypeError, match=r"Trying to set .* but it must be of type"):
        IPUConfig().from_dict({path: value})


def test_unknown_options_get_a_suggestion() -> None:
    config = IPUConfig()
    with pytest.raises(
        ValueError,
        match=r"'auto_select_ipu' is not a valid attribute of this config\. Did you mean 'auto_select_ipus'\?",
    ):
        config.auto_select_ipu = 1
    with pytest.raises(ValueError, match="is not a valid attribute"):
        _ = config.matmuls.options


def test_a_category_is_not_assigned_to() -> None:
    with pytest.raises(Exception, match="is a category and cannot be assigned to"):
        IPUConfig().matmuls = {}


def test_a_bool_of_an_old_program_is_a_rounding_behaviour() -> None:
    config = IPUConfig()
    config.floating_point_behaviour.esr = True
    assert config.floating_point_behaviour.esr is StochasticRoundingBehaviour.ON


def test_it_goes_through_json_and_copies() -> None:
    config = IPUConfig()
    config.device_connection.type = DeviceConnectionType.ON_DEMAND
    config.matmuls.poplar_options = {"availableMemoryProportion": "0.3"}
    other = IPUConfig()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.from_json(copy.deepcopy(config).to_json())
    assert other.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"auto_select_ipus": 1, "select_ipus": 2}, Exception, "Only one of"),
        ({"select_ipus": [1, 1]}, ValueError, "unique"),
        ({"io_tiles.place_ops_on_io_tiles": True}, ValueError, "num_io_tiles == 0"),
        ({"device_connection.type": DeviceConnectionType.NEVER}, ValueError, r"device_connection\.version"),
        (
            {
                "experimental.multi_replica_distribution.process_count": 2,
                "experimental.multi_replica_distribution.process_index": 2,
            },
            ValueError,
            "process_index",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    options: dict[str, object], kind: type[Exception], said: str
) -> None:
    config = IPUConfig()
    config.from_dict(options)
    with pytest.raises(kind, match=said):
        config.configure_ipu_system()


@pytest.mark.parametrize("name", ["create_ipu_config", "auto_select_ipus", "set_convolution_options"])
def test_functions_that_configured_ipus_before_ipu_config_are_refused_by_name(name: str) -> None:
    from podrun.tensorflow.sdk import utils

    with pytest.raises(NotImplementedError, match=rf"utils\.{name}: .*Use ipu\.config\.IPUConfig"):
        getattr(utils, name)(True)


def test_a_configuration_is_a_message_of_the_sdk() -> None:
    config, connections = IPUConfig(), MESSAGE_ENUMERATIONS["IpuDeviceConnectionType"]
    orders = MESSAGE_ENUMERATIONS["IpuSelectionOrder"]
    message = config._create_protobuf()
    assert message.device_config == []
    assert message.selection_order == orders.AUTO
    assert message.remote_buffer_merging_mode == ThreeState.THREESTATE_UNDEFINED
    assert not message.speed_size_config.disable_graph_outlining
    config.auto_select_ipus = (4, 2)
    config.selection_order = SelectionOrder.SNAKE
    config.device_connection.type = DeviceConnectionType.ON_DEMAND
    config.matmuls.poplar_options = {"a": "b", "c": True}
    config.optimizations.enable_graph_outlining = False
    config.optimizations.maximum_all_gather_buffer_size = 7
    config.floating_point_behaviour.nanoo = True
    message = config._create_protobuf()
    assert [device.auto_count for device in message.device_config] == [4, 2]
    assert message.selection_order == orders.SNAKE
    assert message.device_connection_type == connections.ON_DEMAND
    assert [(option.option, option.value) for option in message.matmul_options] == [("a", "b"), ("c", "True")]
    assert message.speed_size_config.disable_graph_outlining
    assert message.max_all_gather_buffer_size == 7
    behaviour = message.floating_point_behaviour
    assert [behaviour.inv, behaviour.div0, behaviour.oflo, behaviour.esr, behaviour.nanoo] == [0, 0, 0, 0, 1]
    config.select_ipus = 1
    with pytest.raises(Exception, match="Only one of `auto_select_ipus` and `select_ipus` can be set"):
        config._create_protobuf()


def test_the_configuration_that_holds_is_read_as_messages() -> None:
    config = IPUConfig()
    config.auto_select_ipus = [2, 1]
    config.ipu_model.compile_ipu_code = False
    config.configure_ipu_system()
    messages = get_ipu_config()
    assert messages == [config._create_protobuf()] * 2
    assert [device.auto_count for device in messages[0].device_config] == [2, 1]
    assert (messages[1].creator_id, messages[1].ipu_model_config.compile_ipu_code) == (1, False)
    reset_ipu_configuration()
    with pytest.raises(RuntimeError, match="No IPU devices configured"):
        get_ipu_config()


def test_metadata_says_what_each_option_and_category_is_for() -> None:
    config = IPUConfig()
    options = config.to_dict()
    categories = {name.rsplit(".", depth)[0] for name in options for depth in range(1, name.count(".") + 1)}
    assert DESCRIPTIONS.keys() == options.keys() | categories
    version = config.get_attribute_metadata("device_connection.version")
    assert (version.__doc__, version._depth) == (DESCRIPTIONS["device_connection.version"], 2)
    assert config.get_attribute_metadata("norms.experimental").__doc__ == "Options of norms that may change."


class _Depth(_ConfigBase):
    def __init__(self) -> None:
        self.layers = 3


@deprecate_config_attributes({"width": "Widths are chosen."})
class _Shape(_ConfigBase):
    def __init__(self) -> None:
        """How wide it is,
        in columns.
        """
        self.width: typing.Union[int, typing.Tuple[int, str]] = 4  # noqa: UP006, UP007 - as programs write it
        self.rows: list[float] | None = None
        self.depth = _Depth()

    def _to_protobuf(self, pb: object) -> None:
        assert isinstance(pb, dict)
        pb["width"] = self.width
        super()._to_protobuf(pb)


@deprecate_config_attribute("shape", "Shapes are found out.")
class _Program(_ConfigBase):
    def __init__(self) -> None:
        self.name = "x"
        self.shape = _Shape()
        self._finalize_base_config()


def test_programs_write_classes_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python.platform import tf_logging

    warned: list[str] = []
    monkeypatch.setattr(tf_logging, "warn", warned.append)
    program, other = _Program(), _Program()
    program.shape.width = (2, "a")
    program.shape.rows = [0.5]
    assert [line.partition(":")[2] for line in warned[-3::2]] == [
        " Widths are chosen.",
        " Shapes are found out.",
    ]
    message: dict[str, object] = {}
    copy.deepcopy(program)._to_protobuf(message)
    assert (message, other.shape.width) == ({"width": (2, "a")}, 4)
    width = program.get_attribute_metadata("shape.width")
    assert (width.type, width.default) == ("typing.Union[int, typing.Tuple[int, str]]", 4)
    assert (width.__doc__, width.deprecated_msg) == ("How wide it is,\nin columns.", "Widths are chosen.")
    layers = program.get_attribute_metadata("shape.depth.layers")
    assert (layers.name, layers._depth, layers.deprecated_msg) == (
        "shape.depth.layers",
        3,
        "Shapes are found out.",
    )
    assert program.shape.depth._get_full_name("layers") == "shape.depth.layers"
    assert '      .. py:attribute:: name\n         :type: str\n         :value: "x"\n' in str(
        _Program.__doc__
    )
    assert str(_Program.__doc__).count(".. py:attribute:: shape.shape.depth.layers\n") == 1
    for wrong in (True, (2,), (2, 3), "a"):
        with pytest.raises(TypeError, match=r"Trying to set shape.width to .* of type typing.Union\[int"):
            program.shape.width = wrong
    with pytest.raises(TypeError, match=r"of type list\[float\] \| None"):
        program.shape.rows = [1]
    with pytest.raises(Exception, match=r"shape.depth is a category and cannot be assigned to"):
        program.shape.depth = 1
    with pytest.raises(ValueError, match=r"'widht' is not a valid attribute.* Did you mean 'shape.width'"):
        program.shape.widht = 1


def test_ids_of_devices_are_those_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 IPUs, the ids 0 to 3 are single ones; 4 and 5 are pairs, which the instances of a launch take."""
    counts = []
    monkeypatch.setattr(config_module.core, "isPopdistEnvSet", lambda: True)
    monkeypatch.setattr(config_module.core, "getNumTotalReplicas", lambda: 2)
    monkeypatch.setattr(config_module.core, "getNumIpusPerReplica", lambda: 2)
    table = SimpleNamespace(
        config=None,
        configure=lambda kept, ipus, distributed: counts.append(ipus),
        attach_now=lambda: None,
    )
    monkeypatch.setattr(config_module, "DEVICES", table)
    config = IPUConfig()
    for number in (3, 4, 5, 6):
        config.select_ipus = [number]
        config.configure_ipu_system()
    assert counts == [(1,), (2,), (2,), (4,)]
