"""The configuration of IPUs: `IPUConfig` with all its options, and what takes effect when it is applied."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from podrun.popdist import core
from podrun.popdist.core import popdist_error
from podrun.runtime.device import device_ids
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.poplar_flags import flags
from podrun.tensorflow.sdk.config_classes import _ConfigBase as _ConfigBase
from podrun.tensorflow.sdk.config_classes import deprecate_config_attribute as deprecate_config_attribute
from podrun.tensorflow.sdk.config_classes import deprecate_config_attributes as deprecate_config_attributes
from podrun.tensorflow.sdk.config_messages import enumerations, message_of
from podrun.tensorflow.sdk.config_options import AttributeMetadata as AttributeMetadata
from podrun.tensorflow.sdk.config_options import OptionCategory, flat_options

if TYPE_CHECKING:
    import tensorflow as tf


class SelectionOrder(Enum):
    """The order in which IPUs are chosen; without a meaning for numbers."""

    AUTO = 0
    ZIGZAG = 1
    SNAKE = 2
    HOOF = 3


class ExecutionProfileType(Enum):
    """Which profile a program makes."""

    NO_PROFILE = 0
    DEVICE_PROFILE = 1
    IPU_PROFILE = 2
    TILE_PROFILE = 3


DeviceConnectionType = Enum("DeviceConnectionType", "ALWAYS ON_DEMAND PRE_COMPILE NEVER", start=0)
"""When a process attaches to its IPUs."""


class MergeRemoteBuffersBehaviour(Enum):
    """Whether buffers in streaming memory are merged."""

    NO_MERGING = 1
    MERGE = 2
    IF_BENEFICIAL = 0


class SchedulingAlgorithm(Enum):
    """How operations are scheduled."""

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class StochasticRoundingBehaviour(Enum):
    """Where float16 results are rounded stochastically."""

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @classmethod
    def from_bool(cls, value: bool) -> StochasticRoundingBehaviour:
        """ON for True."""
        return cls.ON if value else cls.OFF


_POPLAR: dict[str, Any] = {"poplar_options": (dict, {})}
_OPTIONS: dict[str, Any] = {
    "auto_select_ipus": ((int, list, tuple), []),
    "select_ipus": ((int, list, tuple), []),
    "allow_recompute": (bool, False),
    "selection_order": (SelectionOrder, SelectionOrder.AUTO),
    "serialization_output_folder": (str, ""),
    "compilation_poplar_options": (dict, {}),
    "gcl_poplar_options": (dict, {}),
    "convolutions": _POPLAR,
    "device_connection": {
        "type": (DeviceConnectionType, DeviceConnectionType.ALWAYS),
        "version": (str, ""),
        "enable_remote_buffers": (bool, False),
    },
    "experimental": {
        "always_rearrange_copies_on_the_host": (bool, False),
        "enable_remote_buffer_embedding": (bool, False),
        "enable_prng_stability": (bool, False),
        "multi_replica_distribution": {"process_index": (int, 0), "process_count": (int, 0)},
    },
    "floating_point_behaviour": {
        "inv": (bool, False),
        "div0": (bool, False),
        "oflo": (bool, False),
        "esr": (StochasticRoundingBehaviour, StochasticRoundingBehaviour.OFF),
        "nanoo": (bool, False),
        "set_all": (bool, False),
    },
    "io_tiles": {
        "num_io_tiles": (int, 0),
        "place_ops_on_io_tiles": (bool, False),
        "available_memory_proportion": (float, 0.9),
    },
    "ipu_model": {"compile_ipu_code": (bool, True), "tiles_per_ipu": (int, 0), "version": (str, "ipu2")},
    "matmuls": {**_POPLAR, "clear_pass_type": (bool, False)},
    "norms": {
        "use_stable_statistics": (bool, False),
        "experimental": {"distributed_batch_norm_replica_group_size": (int, 1)},
    },
    "optimizations": {
        "math": {"fast": (bool, False), "dot_strength": (bool, True)},
        "prefetch_data_streams": (bool, True),
        "combine_embedding_lookups": (bool, False),
        "combine_matmuls": (bool, False),
        "enable_graph_outlining": (bool, True),
        "merge_infeed_io_copies": (bool, True),
        "maximum_cross_replica_sum_buffer_size": (int, 0),
        "maximum_reduce_scatter_buffer_size": (int, 0),
        "maximum_inter_ipu_copies_buffer_size": (int, 0),
        "maximum_send_recv_cluster_size": (int, 0),
        "maximum_reduce_many_buffer_size": (int, 0),
        "maximum_all_gather_buffer_size": (int, 0),
        "minimum_remote_tensor_size": (int, 128),
        "merge_remote_buffers": (MergeRemoteBuffersBehaviour, MergeRemoteBuffersBehaviour.IF_BENEFICIAL),
        "enable_gather_simplifier": (bool, True),
        "triangular_solve_expander_block_size": (int, 0),
        "cholesky_block_size": (int, 0),
        "enable_fast_math": (bool, False, "Use optimizations.math.fast."),
        "enable_dynamic_slice_replacement": (bool, True),
    },
    "pooling": _POPLAR,
    "scheduling": {
        "algorithm": (SchedulingAlgorithm, SchedulingAlgorithm.CHOOSE_BEST),
        "maximum_scheduler_lookahead_depth": (int, 5),
        "maximum_scheduler_search_space_size": (int, 64),
    },
    "slices": _POPLAR,
}


class IPUConfig(OptionCategory):
    """All options of an IPU system. `configure_ipu_system` applies them."""

    def __init__(self) -> None:
        super().__init__("", _OPTIONS)
        object.__setattr__(self, "_profiling", SimpleNamespace())

    def _create_protobuf(self) -> SimpleNamespace:
        """The options as a message, which tests of the SDK read. Raises what `configure_ipu_system` does."""
        _check_options(self)
        return message_of(flat_options(self))

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Apply the options. Exception or ValueError for options that contradict each other."""
        configure_ipu_system(self, device)


MESSAGE_ENUMERATIONS = enumerations(
    {
        "DeviceConnectionType": DeviceConnectionType,
        "SelectionOrder": SelectionOrder,
        "ExecutionProfileType": ExecutionProfileType,
        "SchedulingAlgorithm": SchedulingAlgorithm,
    }
)
"""What ``config_pb2`` has."""


def running_on_ipu_model() -> bool:
    """Whether TF_POPLAR_FLAGS asks for the IPU Model."""
    return flags().ipu_model


def _counts(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _check_options(config: OptionCategory) -> None:
    chosen, selected = config.auto_select_ipus, config.select_ipus
    if chosen and selected:
        raise Exception(  # noqa: TRY002 - the SDK's class
            "Only one of `auto_select_ipus` and `select_ipus` can be set."
        )
    numbers = _counts(selected)
    if len(set(numbers)) != len(numbers):
        raise ValueError("All device indices in `select_ipus` must be unique.")
    if selected and running_on_ipu_model():
        raise Exception(  # noqa: TRY002 - the SDK's class
            "When using the IPUModel, the devices to attach to cannot be selected: use `auto_select_ipus` instead of "
            "`select_ipus`."
        )
    tiles = config.io_tiles
    if tiles.place_ops_on_io_tiles and tiles.num_io_tiles == 0:
        raise ValueError("Cannot place ops on I/O tiles when io_tiles.num_io_tiles == 0")
    offline = (DeviceConnectionType.PRE_COMPILE, DeviceConnectionType.NEVER)
    if config.device_connection.type in offline and not config.device_connection.version:
        raise ValueError(
            "device_connection.version must be set when device_connection.type is PRE_COMPILE or NEVER."
        )
    if running_on_ipu_model() and not config.ipu_model.version:
        raise ValueError("ipu_model.version must be set when the IPU Model is used.")
    spread = config.experimental.multi_replica_distribution
    if spread.process_count and not 0 <= spread.process_index < spread.process_count:
        raise ValueError(
            "experimental.multi_replica_distribution.process_index must be in the range "
            f"[0, {spread.process_count}), not {spread.process_index}."
        )
    if spread.process_count and running_on_ipu_model():
        raise Exception(  # noqa: TRY002 - the SDK's class
            "Multi-replica distribution is not supported on the IPU model."
        )
    group = config.norms.experimental.distributed_batch_norm_replica_group_size
    if group < 1:
        raise ValueError("distributed_batch_norm_replica_group_size must be at least 1.")
    if group > 1 and tiles.num_io_tiles > 0:
        raise ValueError("distributed_batch_norm_replica_group_size > 1 is not supported with I/O tiles.")


def configure_ipu_system(config: Any, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Apply a configuration; one that is applied already is reset first, with a warning."""
    if not isinstance(config, IPUConfig):
        raise TypeError("`config` must be an IpuOptions instance")
    _check_options(config)
    if DEVICES.config is not None:
        if not reset_configuration:
            import tensorflow as tf

            if DEVICES.config.to_dict() == config.to_dict():
                return
            raise tf.errors.FailedPreconditionError(None, None, "IPU devices have been configured already.")
        warnings.warn("Configuring the IPU system again resets it.", stacklevel=3)
    kept = copy.deepcopy(config)
    object.__setattr__(kept, "_profiling", copy.copy(config._profiling))
    ids = _counts(config.select_ipus)
    counts = _counts(config.auto_select_ipus) or tuple(_ipus_of_id(number) for number in ids) or (1,)
    spread = config.experimental.multi_replica_distribution
    distributed = (spread.process_index, spread.process_count) if spread.process_count else None
    DEVICES.configure(kept, counts, distributed)
    DEVICES.attach_now()


_MOST_IPUS = 64


def _ipus_of_id(number: int) -> int:
    """How many IPUs the device of an id has: single IPUs come first, then pairs, and so on. Under a launch the ids are
    those of its IPUs, as `popdist.core.getDeviceId` gives them.
    """
    total = _MOST_IPUS
    if core.isPopdistEnvSet():
        used = core.getNumTotalReplicas() * core.getNumIpusPerReplica()
        total = 1 << (used - 1).bit_length()
    ranges = device_ids(total)
    return ranges[number].count if number in ranges else 1


def reset_ipu_configuration() -> None:
    """Release all devices; the default (one IPU) holds again."""
    DEVICES.release()


def get_ipu_config(session: tf.compat.v1.Session | None = None) -> list[SimpleNamespace]:
    """The options as a message (`config_messages`), once for each device. RuntimeError without a configuration."""
    if DEVICES.config is None:
        raise RuntimeError("No IPU devices configured.")
    return [message_of(flat_options(DEVICES.config)) for _ in DEVICES.ipus]


def set_ipu_config(
    config: IPUConfig, ipus_per_replica: int | None = None, configure_device: bool = True
) -> IPUConfig:
    """Let ``config`` name this instance's IPUs and its number among all, and return it. With ``configure_device`` it is
    applied too; without, a number of IPUs that it has stays. Outside of ``podrun`` one instance has one replica.

    TypeError for what is no IPUConfig; popdist_error for another number of IPUs than the launch gave a replica.
    """
    if not isinstance(config, IPUConfig):
        raise TypeError("`config` must be an instance of `IPUConfig`.")
    launched = core.isPopdistEnvSet()
    count = ipus_per_replica or (core.getNumIpusPerReplica() if launched else 1)
    if launched and not core.checkNumIpusPerReplica(count):
        raise popdist_error(
            f"The program wants {count} IPUs per replica, but was launched with {core.getNumIpusPerReplica()}: "
            f"podrun --ipus-per-replica {count}."
        )
    chosen = config.auto_select_ipus, config.select_ipus
    config.select_ipus = []
    place_instance(config, count)
    if configure_device:
        config.configure_ipu_system()
    elif any(chosen):
        config.auto_select_ipus, config.select_ipus = chosen
    return config


def place_instance(config: IPUConfig, ipus_per_replica: int) -> None:
    """Write this instance's IPUs and its number among all into a configuration."""
    if not core.isPopdistEnvSet():
        config.auto_select_ipus = ipus_per_replica
        return
    config.auto_select_ipus = core.getNumLocalReplicas() * ipus_per_replica
    distribution = config.experimental.multi_replica_distribution
    distribution.process_index = core.getInstanceIndex()
    distribution.process_count = core.getNumInstances()
