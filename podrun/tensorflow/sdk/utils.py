"""``ipu.utils``: the configuration's names, and helpers of programs."""

from __future__ import annotations

import warnings
from enum import Enum
from typing import Any

import tensorflow as tf

from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.poplar_flags import flags
from podrun.tensorflow.sdk.config import *  # noqa: F403
from podrun.tensorflow.sdk.config import configure_ipu_system as configure_ipu_system
from podrun.tensorflow.sdk.config import reset_ipu_configuration as reset_ipu_configuration


def move_variable_initialization_to_cpu(graph: tf.Graph | None = None) -> None:
    """Place on the host what computes the initial values of a graph's variables. The host computes them in any case;
    this says so to `DeviceConnectionType.NEVER`, which refuses those of an IPU. In eager mode there are none.
    """
    if graph is None and tf.executing_eagerly():
        return
    chosen = graph or tf.compat.v1.get_default_graph()
    nowhere = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue())
    variables = chosen.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
    initializers = [v.initializer for v in variables if v.initializer is not None]
    waiting = [o.inputs[1].op for o in initializers if len(o.inputs) > 1]
    seen = set(waiting)
    while waiting:
        operation = waiting.pop()
        operation._set_device("/device:CPU:0")
        operation._set_attr("_class", nowhere)
        before = [t.op for t in operation.inputs if t.dtype != tf.resource and t.op not in seen]
        waiting += before
        seen.update(before)


def reset_ipu_seed(
    seed: int,
    device: str = "/device:IPU:0",
    cpu_device: str = "cpu",
    experimental_identical_replicas: bool = False,
) -> None:
    """Start the device's random numbers from ``seed``, at once also where a graph is made."""
    ordinal = int(device.rpartition(":")[2])
    if experimental_identical_replicas and DEVICES.count(ordinal) > 1:
        warnings.warn(
            "reset_ipu_seed(experimental_identical_replicas=True) has no effect in podrun: each replica draws random "
            "numbers of its own.",
            stacklevel=2,
        )
    DEVICES.start_stream(ordinal, int(seed))


def get_num_of_ipus_in_device(ipu_device: str, device: str = "cpu") -> int:
    """IPUs of ``/device:IPU:n``; 1 without a configuration."""
    return DEVICES.count(int(ipu_device.rpartition(":")[2]))


class SyntheticDataCategory(Enum):
    """What synthetic data stand for."""

    Seed = 1
    Infeed = 2
    Outfeed = 3
    HostEmbedding = 4
    Parameters = 5


def use_synthetic_data_for(category: SyntheticDataCategory) -> bool:
    """Whether TF_POPLAR_FLAGS ask for synthetic data of a category."""
    return category.name.lower() in flags().synthetic


def _refused(name: str, instead: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"podrun does not have ipu.utils.{name}: {instead}")

    return refuse


_OLD_CONFIGURATION = (
    "create_ipu_config", "set_ipu_connection_type", "set_convolution_options", "set_matmul_options",
    "set_pooling_options", "set_recomputation_options", "set_optimization_options", "set_norm_options",
    "set_gcl_options", "set_floating_point_behaviour_options", "set_compilation_options", "set_io_tile_options",
    "set_transfer_options", "set_verification_options", "auto_select_ipus", "select_ipus",
)  # fmt: skip
_FILES = (
    "export_dataset_to_file", "export_inputs_to_file", "export_variables_from_live_session",
    "export_variables_from_live_model", "import_data_in_live_session", "import_data_in_live_model",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _OLD_CONFIGURATION:
        return _refused(name, "it is of SDK 2.2 and earlier. Use ipu.config.IPUConfig and its options.")
    if name in _FILES:
        return _refused(name, "files for the Poplar executable runner. Use tf.train.Saver or save_weights.")
    raise AttributeError(f"module 'tensorflow.python.ipu.utils' has no attribute {name!r}")
