"""The options of `IPUConfig` as the SDK hands them to its devices: messages with numbers of enumerations.

``IPUConfig._create_protobuf()`` gives one, after the checks of `configure_ipu_system`. podrun applies the options
themselves; programs and tests read messages. ``config_pb2`` of the driver has the enumerations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any


class MessageEnumeration(IntEnum):
    """An enumeration of messages, whose members are asked for by name and by number."""

    @classmethod
    def Name(cls, number: int) -> str:
        """The name of a number."""
        return cls(number).name

    @classmethod
    def Value(cls, name: str) -> int:
        """The number of a name."""
        return int(cls[name])


class FrontendAttributeId(MessageEnumeration):
    """What the compiler reads of operations: the keys of `podrun.tensorflow.sdk.scopes.frontend_attribute`."""

    STOCHASTIC_ROUNDING = 0
    CALL_CONFIG_TYPE = 1
    PARTIALS_TYPE = 2
    GRADIENT_ACCUMULATION_COUNT = 3
    PIPELINE_STAGE_ID = 4
    PIPELINE_REPEAT_COUNT = 5
    PIPELINE_SCHEDULE = 6
    PIPELINE_POPLAR_CONFIG = 7
    OFFLOAD_WEIGHT_UPDATE_VARIABLES = 8
    NUM_BATCHES_TO_ACCUMULATE = 9
    ML_TYPE = 10
    OPTION_FLAGS = 11
    PIPELINE_BATCH_SERIALIZATION_ITERATIONS = 12
    PARTITION_OFFLOADED_WEIGHT_UPDATE_VARIABLES = 13
    OFFLOAD_ACTIVATIONS = 14
    OFFLOAD_GRADIENT_ACCUMULATION_BUFFERS = 15
    PARTITION_VARIABLES = 16
    OFFLOAD_VARIABLES = 17
    RECOMPUTATION_MODE = 18
    UNIQUE_SHARDING = 19
    KEEP_INPUT_LAYOUTS = 20


class MLType(MessageEnumeration):
    """The pass that a product or convolution belongs to: of inference, or one of training."""

    NONE = 0
    INFERENCE_FWD = 1
    TRAINING_FWD = 2
    TRAINING_BWD = 3
    TRAINING_WU = 4


def _same(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _not(value: object) -> bool:
    return not value


def _pairs(options: Mapping[str, Any]) -> list[SimpleNamespace]:
    """Options of a library: their names and values in order."""
    return [SimpleNamespace(option=str(k), value=str(v)) for k, v in options.items()]


_SIZES = ("cross_replica_sum", "reduce_scatter", "inter_ipu_copies", "reduce_many", "all_gather")
_FIELDS: dict[str, str | tuple[str, Callable[[Any], Any]]] = {
    "allow_recompute": "speed_size_config.allow_recompute",
    "selection_order": "selection_order",
    "serialization_output_folder": "serialization_folder",
    "compilation_poplar_options": ("compilation_options", _pairs),
    "gcl_poplar_options": ("gcl_options", _pairs),
    "convolutions.poplar_options": ("convolution_options", _pairs),
    "matmuls.poplar_options": ("matmul_options", _pairs),
    "pooling.poplar_options": ("pooling_options", _pairs),
    "slices.poplar_options": ("slice_options", _pairs),
    "matmuls.clear_pass_type": "clear_matmul_pass_type",
    "device_connection.type": "device_connection_type",
    "device_connection.version": "ipu_version",
    "device_connection.enable_remote_buffers": "enable_remote_buffers_without_device",
    "experimental.always_rearrange_copies_on_the_host": "speed_size_config.always_rearrange_copies_on_the_host",
    "experimental.enable_remote_buffer_embedding": "enable_experimental_remote_buffer_embedding",
    "experimental.enable_prng_stability": "enable_experimental_prng_stability",
    "experimental.multi_replica_distribution.process_count": "multi_replica_process_count",
    "experimental.multi_replica_distribution.process_index": "multi_replica_process_index",
    "io_tiles.num_io_tiles": "num_io_tiles",
    "io_tiles.place_ops_on_io_tiles": "place_ops_on_io_tiles",
    "io_tiles.available_memory_proportion": "io_tile_available_memory_proportion",
    "ipu_model.compile_ipu_code": "ipu_model_config.compile_ipu_code",
    "ipu_model.tiles_per_ipu": "ipu_model_config.tiles_per_ipu",
    "ipu_model.version": "ipu_model_config.ipu_model_version",
    "norms.use_stable_statistics": "use_stable_norm_statistics",
    "norms.experimental.distributed_batch_norm_replica_group_size":
        "experimental_distributed_batch_norm_replica_group_size",
    "optimizations.math.fast": "algebraic_simplifier_config.enable_fast_math",
    "optimizations.math.dot_strength": "algebraic_simplifier_config.enable_dot_strength",
    "optimizations.enable_fast_math": "enable_fast_math",
    "optimizations.prefetch_data_streams": "prefetch_data_streams",
    "optimizations.combine_embedding_lookups": "enable_multi_slice_combiner",
    "optimizations.combine_matmuls": "enable_matmul_combiner",
    "optimizations.enable_graph_outlining": ("speed_size_config.disable_graph_outlining", _not),
    "optimizations.merge_infeed_io_copies": "speed_size_config.merge_infeed_io_copies",
    **{f"optimizations.maximum_{size}_buffer_size": f"max_{size}_buffer_size" for size in _SIZES},
    "optimizations.maximum_send_recv_cluster_size": "max_send_recv_cluster_size",
    "optimizations.minimum_remote_tensor_size": "minimum_remote_tensor_size",
    "optimizations.merge_remote_buffers": "remote_buffer_merging_mode",
    "optimizations.enable_gather_simplifier": ("disable_gather_simplifier", _not),
    "optimizations.triangular_solve_expander_block_size": "triangular_solve_expander_block_size",
    "optimizations.cholesky_block_size": "cholesky_block_size",
    "optimizations.enable_dynamic_slice_replacement": "enable_dynamic_slice_replacement",
    "scheduling.algorithm": "speed_size_config.scheduler_selection",
    "scheduling.maximum_scheduler_lookahead_depth": "max_scheduler_lookahead_depth",
    "scheduling.maximum_scheduler_search_space_size": "max_scheduler_search_space_size",
}  # fmt: skip
"""Option -> the field of the message that has it, and how its value changes."""
_MADE_BY_A_PROGRAM = 1
_BEHAVIOUR = ("inv", "div0", "oflo", "esr", "nanoo")


def message_of(options: Mapping[str, Any]) -> SimpleNamespace:
    """The message for options by dotted name."""
    message = SimpleNamespace(creator_id=_MADE_BY_A_PROGRAM)
    for name, field in _FIELDS.items():
        path, change = field if isinstance(field, tuple) else (field, _same)
        *outer, last = path.split(".")
        place = message
        for part in outer:
            place.__dict__.setdefault(part, SimpleNamespace())
            place = getattr(place, part)
        setattr(place, last, change(options[name]))
    every = options["floating_point_behaviour.set_all"]
    said = {name: _same(options[f"floating_point_behaviour.{name}"]) for name in _BEHAVIOUR}
    message.floating_point_behaviour = SimpleNamespace(**(dict.fromkeys(_BEHAVIOUR, True) if every else said))
    counts, numbers = _numbers(options["auto_select_ipus"]), _numbers(options["select_ipus"])
    message.device_config = [SimpleNamespace(auto_count=count, cfg_index=0) for count in counts]
    message.device_config += [SimpleNamespace(auto_count=0, cfg_index=number) for number in numbers]
    return message


def _numbers(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def enumerations(kinds: Mapping[str, type[Enum]]) -> dict[str, Any]:
    """Enumerations of numbers, under the names that messages give them: ``Ipu`` before that of the option's."""
    members = {f"Ipu{name}": {m.name: m.value for m in kind} for name, kind in kinds.items()}
    return {name: IntEnum(name, numbers) for name, numbers in members.items()}
