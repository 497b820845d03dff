"""The closed sets of the records' schema: what a parameter that is a word may be, by kind.

A word that is not in its set is a mistake in the file, or a schema newer than this model: the record is
refused by name instead of being predicted as if the word were not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

DATA_TYPES = ("fp8", "fp16", "fp32", "int32")
MODES = ("train", "inference")
PHASES = ("total", "compute", "exchange", "global_exchange", "sync", "host", "pre_arrange", "post_arrange")
FRAMEWORKS = ("popart", "popxl", "pytorch", "tf1", "tf2", "paddle", "poplibs")
NORMS = ("batch", "group", "none")
NETWORKS = (
    *("alexnet", "resnet18", "resnet50", "resnet_depth_unstated", "resnext101", "efficientnet_b0"),
    *("efficientnet_b4", "efficientnet_edgetpu_l", "mobilenet_version_unstated", "googlenet", "bert_base"),
    *("bert_large", "bert_3_layer", "albert", "roberta", "deberta", "roformer", "roformer_v2", "videobert"),
    *("gpt_117m", "transformer_synthetic", "vit_variant_unstated", "swin_t", "swin_l", "clip", "clip_text"),
    *("mini_dalle", "conformer", "conformer_wenet", "rnnt", "lstm", "wide_and_deep", "dlrm_hashing_trick"),
    *("dlrm_deep_hash", "dlrm_compositional", "nerf", "graphsage", "gps_plus_plus", "tutorial_cnn_28x28"),
)
_VARIANTS = ("current", "previous", "first_configuration", "tuned_configuration", "planner_before_change")

WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "amp_tile": {"input_type": DATA_TYPES, "partials_type": DATA_TYPES},
        "vertex": {
            "op": (
                *("conv_nx1", "conv", "conv_depthwise", "conv_pointwise", "fully_connected", "avg_pool"),
                *("reduce_add", "reduce_max", "ctc_loss", "ctc_beam_search", "attention"),
                *("scatter_reduce_grad", "index_put", "qr", "dot", "spin_loop", "block_of_compute_sets"),
                "vector_arithmetic",
            ),
            "scope": ("vertex", "supervisor", "worker", "program"),
            "part": (
                *("total", "instructions", "stalls", "syncs", "amp_call", "zero_loop", "partition_loop"),
                *("amp_inner", "busiest_worker", "other_workers", "stage_1", "stage_2", "update", "generate"),
                *("merge", "select", "input_transform", "exchange", "compute", "reduction"),
                "loss_and_gradient_reduction",
            ),
            "implementation": (
                *("current", "previous", "generic", "continuous_reduce", "embedding_planner", "no_planner"),
                *("custom_op", "onnx_ops", "custom_op_grouped_matmul", "onnx_ops_grouped_matmul"),
                *("concurrent", "sequential", "vectorised"),
            ),
            "mode": MODES,
            "input_type": DATA_TYPES,
            "partials_type": DATA_TYPES,
        },
        "memory_bandwidth": {
            "pattern": ("stream_triad", "load_only", "load_latency"),
            "implementation": (
                *("naive_cpp", "optimised_cpp", "vendor_assembly", "coissue_codelet", "assembly_loop"),
                "compiler_loop",
            ),
            "data_type": DATA_TYPES,
        },
        "exchange": {
            "pattern": ("point_to_point", "latency_under_load", "halo_swap", "network_inference"),
            "implementation": (
                *("implicit", "grouped_directions", "two_wave_copies", "many_tensors", "single_width"),
                "double_width",
            ),
            "phase": PHASES,
            "network": NETWORKS,
            "data_type": DATA_TYPES,
        },
        "sync": {"pattern": ("counter_gap", "compute_set_residue")},
        "host_stream": {
            "pattern": ("stream_copy", "program_host_exchange", "output_return", "dataloader"),
            "direction": ("to_device", "from_device", "both"),
            "phase": ("total", "begin", "mid", "end"),
            "data_type": DATA_TYPES,
        },
        "session_call": {
            "workload": ("mnist_remote_variables", "mnist_phased"),
            "mode": MODES,
            "input_type": DATA_TYPES,
        },
        "ipu_link": {"pattern": ("latency_under_load", "layer_global_exchange"), "network": NETWORKS},
        "all_reduce": {"method": ("meet_in_middle", "default"), "data_type": DATA_TYPES},
        "gemm": {
            "input_type": DATA_TYPES,
            "partials_type": DATA_TYPES,
            "implementation": ("library", "custom_codelet"),
            "phase": PHASES,
            "serial_split_variant": ("switch", "if", "zeroing"),
            "allocator": ("optimised", "linear"),
        },
        "sparse_matmul": {"pattern": ("static", "dynamic"), "input_type": DATA_TYPES},
        "network": {
            "name": NETWORKS,
            "mode": MODES,
            "task": (
                *("mlperf_closed", "mlperf_open", "mlperf_open_or_closed_unstated", "pretrain_phase_1"),
                *("pretrain_phase_2", "squad", "imagenet"),
            ),
            "framework": FRAMEWORKS,
            "phase": PHASES,
            "norm": NORMS,
            "input_type": DATA_TYPES,
            "partials_type": DATA_TYPES,
            "optimizer": ("sgd", "lars", "adam", "lamb"),
            "data_source": ("host", "on_device", "host_loader_only"),
            "variant": _VARIANTS,
        },
        "memory": {
            "name": (*NETWORKS, "wave_equation_3d", "stencil_2d"),
            "mode": MODES,
            "framework": FRAMEWORKS,
            "category": (
                *("total", "total_including_gaps", "total_excluding_gaps", "max_tile", "mean_tile"),
                *("variables", "variables_non_interleaved", "variables_interleaved", "variables_peak"),
                *("max_live", "vertex_data", "vertex_state", "vertex_code", "edge_pointers", "copy_pointers"),
                *("vertex_padding", "vector_descriptors", "run_instructions", "exchange_code"),
                *("control_code", "executable_code"),
            ),
            "op": (
                *("qkv_matmul", "qk_matmul", "softmax", "pv_matmul", "attention_out_matmul", "layer_norm"),
                "ff1_matmul",
            ),
            "norm": NORMS,
            "input_type": DATA_TYPES,
            "variant": _VARIANTS,
        },
        "stencil": {
            "name": (
                *("gaussian_blur_3x3", "stencil_2d_32b", "lbm_d2q9", "heat_2d", "heat_3d"),
                *("aliev_panfilov_2d", "diffusion_3d", "acoustic_wave_3d"),
            ),
            "implementation": ("stencil_codelet", "poplin_conv", "simple_vertex", "optimised_vertex"),
            "phase": PHASES,
            "data_type": DATA_TYPES,
        },
        "hpc_app": {"name": ("bfs", "xdrop_alignment"), "graph": ("kronecker", "graph500")},
        "scaling_ratio": {"comparison": ("pod_scaling", "generation")},
        "estimator_check": {
            "estimator": ("amp_1x1_supervisor_formula", "conv_1x1_planner"),
            "input_type": DATA_TYPES,
            "partials_type": DATA_TYPES,
        },
    }
)
"""By kind, then parameter: the words it may be. Parameters that are not here are numbers, sizes or names."""

REALS = frozenset(
    {"compute_set_cycles", "density", "available_memory_proportion", "ideal_ratio", "packing_factor"}
    | {"samples_per_micro_step", "mlperf_round", "epochs"}
)
"""Parameters that need not be whole. Whatever else is a number counts something."""


def mistakes(kind: str, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with a record's parameters: words outside their set, counts that are not positive whole
    numbers.
    """
    found = []
    words = WORDS.get(kind, {})
    for name, value in params.items():
        if value is None:
            continue
        if name in words:
            if value not in words[name]:
                found.append(f"{name} is {value!r}, which is none of {', '.join(words[name])}")
        elif isinstance(value, bool | str):
            continue
        elif isinstance(value, list):
            if not value or any(not _counts(one, least=0 if name == "reduce_dims" else 1) for one in value):
                found.append(f"{name} is {value!r}, which is no list of positive whole numbers")
        elif name in REALS:
            if not isinstance(value, int | float) or not value > 0:
                found.append(f"{name} is {value!r}, which is not above 0")
        elif not _counts(value, least=0 if name in _FROM_ZERO else 1):
            found.append(f"{name} is {value!r}, which is no positive whole number")
    return found


_FROM_ZERO = frozenset(
    {"first_layer", "last_layer", "compute_cycles", "bytes_to_device", "bytes_from_device"}
)


def _counts(value: Any, *, least: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) >= least
