"""The functions of ``ipu.utils`` that configured IPUs until SDK 2.3, before `IPUConfig`: each sets its options.

Each takes the options, changes them and returns them. Options of profiles are left to ``POPLAR_ENGINE_OPTIONS``.
Source of names and defaults: the API reference of SDK 2.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from podrun.tensorflow.sdk.config import (
    DeviceConnectionType,
    IPUConfig,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)

_NAMES = {
    "max_cross_replica_sum_buffer_size": "optimizations.maximum_cross_replica_sum_buffer_size",
    "max_reduce_scatter_buffer_size": "optimizations.maximum_reduce_scatter_buffer_size",
    "max_inter_ipu_copies_buffer_size": "optimizations.maximum_inter_ipu_copies_buffer_size",
    "max_send_recv_cluster_size": "optimizations.maximum_send_recv_cluster_size",
    "minimum_remote_tensor_size": "optimizations.minimum_remote_tensor_size",
    "merge_infeed_io_copies": "optimizations.merge_infeed_io_copies",
    "prefetch_data_streams": "optimizations.prefetch_data_streams",
    "combine_embedding_lookups": "optimizations.combine_embedding_lookups",
    "combine_matmuls": "optimizations.combine_matmuls",
    "gather_simplifier": "optimizations.enable_gather_simplifier",
    "triangular_solve_expander_block_size": "optimizations.triangular_solve_expander_block_size",
    "cholesky_block_size": "optimizations.cholesky_block_size",
    "enable_fast_math": "optimizations.math.fast",
    "max_scheduler_lookahead_depth": "scheduling.maximum_scheduler_lookahead_depth",
    "max_scheduler_search_space_size": "scheduling.maximum_scheduler_search_space_size",
    "always_rearrange_copies_on_the_host": "experimental.always_rearrange_copies_on_the_host",
    "enable_experimental_remote_buffer_embedding": "experimental.enable_remote_buffer_embedding",
    "selection_order": "selection_order",
}
"""Arguments of `create_ipu_config` and `set_optimization_options`, and the options that they are now."""
_PROFILES = {
    "profiling", "enable_ipu_events", "use_poplar_text_report", "use_poplar_cbor_report", "profile_execution",
    "enable_poplar_serialized_graph", "report_every_nth_execution", "max_report_size", "report_directory",
    "disable_graph_convolution_caching", "retain_control_dependencies",
}  # fmt: skip


def _set(opts: IPUConfig, path: str, value: object) -> None:
    *categories, last = path.split(".")
    target: object = opts
    for name in categories:
        target = getattr(target, name)
    setattr(target, last, value)


def _named(opts: IPUConfig, function: str, options: Mapping[str, object]) -> IPUConfig:
    for name, value in options.items():
        if name not in _NAMES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if value is not None:
            _set(opts, _NAMES[name], value)
    return opts


def create_ipu_config(
    *profiles: object,
    scheduler_selection: str = "",
    selection_order: SelectionOrder | None = None,
    disable_graph_outlining: bool = False,
    **options: object,
) -> IPUConfig:
    """Options with their defaults. Those of profiles have no effect. TypeError for an argument that never was."""
    warnings.warn(
        "ipu.utils.create_ipu_config is of SDK 2.3 and earlier: use ipu.config.IPUConfig.", stacklevel=2
    )
    opts = IPUConfig()
    opts.optimizations.enable_graph_outlining = not disable_graph_outlining
    if scheduler_selection:
        opts.scheduling.algorithm = SchedulingAlgorithm[scheduler_selection.upper().replace("-", "_")]
    kept = {name: value for name, value in options.items() if name not in _PROFILES}
    return _named(opts, "create_ipu_config", {"selection_order": selection_order, **kept})


def auto_select_ipus(opts: IPUConfig, num_ipus: int | Sequence[int]) -> IPUConfig:
    """Take so many IPUs, for each device of a list."""
    opts.auto_select_ipus = num_ipus if isinstance(num_ipus, int) else list(num_ipus)
    return opts


def select_ipus(opts: IPUConfig, indices: Sequence[int]) -> IPUConfig:
    """Take the devices of these ids, as ``gc-info`` lists them."""
    opts.select_ipus = list(indices)
    return opts


def set_ipu_connection_type(
    opts: IPUConfig,
    connection_type: DeviceConnectionType | None = None,
    ipu_version: str | int | None = None,
    enable_remote_buffers: bool = False,
) -> IPUConfig:
    """When to attach."""
    opts.device_connection.type = connection_type or DeviceConnectionType.ALWAYS
    opts.device_connection.enable_remote_buffers = enable_remote_buffers
    if ipu_version is not None:
        opts.device_connection.version = f"ipu{ipu_version}" if isinstance(ipu_version, int) else ipu_version
    return opts


def set_convolution_options(
    opts: IPUConfig, convolution_options: Mapping[str, str] | None = None
) -> IPUConfig:
    """Poplar's options of convolutions."""
    opts.convolutions.poplar_options = dict(convolution_options or {})
    return opts


def set_matmul_options(
    opts: IPUConfig, matmul_options: Mapping[str, str] | None = None, clear_pass_type: bool = False
) -> IPUConfig:
    """Poplar's options of matrix products."""
    opts.matmuls.poplar_options = dict(matmul_options or {})
    opts.matmuls.clear_pass_type = clear_pass_type
    return opts


def set_pooling_options(opts: IPUConfig, pooling_options: Mapping[str, str] | None = None) -> IPUConfig:
    """Poplar's options of pooling."""
    opts.pooling.poplar_options = dict(pooling_options or {})
    return opts


def set_recomputation_options(
    opts: IPUConfig, allow_recompute: bool = True, allow_stateful_recompute: bool | None = None
) -> IPUConfig:
    """Whether activations may be computed again."""
    opts.allow_recompute = allow_recompute
    return opts


def set_optimization_options(opts: IPUConfig, **options: object) -> IPUConfig:
    """Options of the compiler's optimizations. TypeError for an argument that never was."""
    return _named(opts, "set_optimization_options", options)


def set_norm_options(opts: IPUConfig, use_stable_statistics: bool = False) -> IPUConfig:
    """How statistics of norms are computed."""
    opts.norms.use_stable_statistics = use_stable_statistics
    return opts


def set_gcl_options(
    opts: IPUConfig, num_io_tiles: int = 0, gcl_options: Mapping[str, str] | None = None
) -> IPUConfig:
    """Options of the communication library."""
    opts.io_tiles.num_io_tiles = num_io_tiles
    opts.gcl_poplar_options = dict(gcl_options or {})
    return opts


def set_io_tile_options(
    opts: IPUConfig,
    num_io_tiles: int,
    place_ops_on_io_tiles: bool | None = None,
    io_tile_available_memory_proportion: float | None = None,
) -> IPUConfig:
    """Tiles for input and output."""
    opts.io_tiles.num_io_tiles = num_io_tiles
    if place_ops_on_io_tiles is not None:
        opts.io_tiles.place_ops_on_io_tiles = place_ops_on_io_tiles
    if io_tile_available_memory_proportion is not None:
        opts.io_tiles.available_memory_proportion = io_tile_available_memory_proportion
    return opts


def set_floating_point_behaviour_options(
    opts: IPUConfig,
    inv: bool = True,
    div0: bool = True,
    oflo: bool = True,
    esr: bool = True,
    nanoo: bool = True,
) -> IPUConfig:
    """Which results of arithmetic end a run, and how halves are rounded."""
    behaviour = opts.floating_point_behaviour
    behaviour.inv, behaviour.div0, behaviour.oflo, behaviour.nanoo = inv, div0, oflo, nanoo
    behaviour.esr = StochasticRoundingBehaviour.from_bool(esr)
    return opts


def set_compilation_options(
    opts: IPUConfig, compilation_options: Mapping[str, str] | None = None
) -> IPUConfig:
    """Poplar's options of the engine."""
    opts.compilation_poplar_options = dict(compilation_options or {})
    return opts


def set_ipu_model_options(
    opts: IPUConfig,
    compile_ipu_code: bool = True,
    tiles_per_ipu: int | None = None,
    ipu_model_version: str = "ipu2",
) -> IPUConfig:
    """Options of the IPU Model."""
    opts.ipu_model.compile_ipu_code, opts.ipu_model.version = compile_ipu_code, ipu_model_version
    opts.ipu_model.tiles_per_ipu = tiles_per_ipu or 0
    return opts


def set_serialization_options(opts: IPUConfig, output_folder: str = "") -> IPUConfig:
    """Where compiled programs are written."""
    opts.serialization_output_folder = output_folder
    return opts


def set_report_options(opts: IPUConfig, *_: object, **__: object) -> IPUConfig:
    """Options of reports: no effect, ``POPLAR_ENGINE_OPTIONS`` has them."""
    return opts
