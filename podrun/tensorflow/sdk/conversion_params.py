"""What a conversion of a SavedModel is asked for, checked, and as a JSON file beside the model."""

from __future__ import annotations

import json
import os
from dataclasses import field, fields
from pathlib import Path
from typing import Any, Self

from podrun.core.quick_dataclass import dataclass

PARAMS_FILE = "conversion_params.json"
_GELU_KEYS = ("nodes", "node_as_gelu_input", "node_use_gelu_output")
_GELU_HELP = (
    "gelu must be a dictionary containing the following items { 'nodes': the node name of the gelu, "
    "'node_as_gelu_input': the node in front of the gelu function, "
    "'node_use_gelu_output': the node at the back of gelu function }."
)
_RUNTIME_HELP = (
    "`embedded_runtime_save_config` must be a dictionary containing the following items "
    "{ 'embedded_runtime_exec_cachedir': The cache output directory of the embedded application runtime, "
    "'runtime_api_timeout_us': The timeout for the embedded application }."
)
_JSON_TYPES: dict[str, type] = {
    "num_ipus": int, "batch_size": int, "batch_per_step": int, "matmul_amp": float, "conv_amp": float,
    "matmul_partial_type": str, "conv_partial_type": str, "excluded_nodes": list, "precision_mode": str,
    "precision_conversion_excluded_nodes": list, "remove_excluded_nodes": bool, "merge_subgraphs": bool,
    "gelu_replacement": dict, "manual_sharding": list, "int64_to_int32_conversion": bool,
    "embedded_runtime_save_config": dict, "pipeline_cfg": dict,
}  # fmt: skip
"""What a JSON file may say, and of which type; a value of another type is passed over, as by the SDK."""
_ONLY_IF_SET = {
    "precision_mode", "manual_sharding", "int64_to_int32_conversion", "embedded_runtime_save_config", "pipeline_cfg",
}  # fmt: skip


@dataclass(slots=True)
class IpuConversionParams:
    """What `create_inference_graph` does with a model. Nodes are named by regular expressions.

    ``excluded_nodes`` stay on the host, and with ``remove_excluded_nodes`` leave the model, whose inputs are then what
    they gave. ``precision_mode``: FP16 or FP32. ``manual_sharding``: for each IPU a list of expressions.
    ``matmul_amp``, ``conv_amp``: available memory proportions; partial types: float or half.
    """

    batch_size: int = 1
    excluded_nodes: list[str] | None = None
    num_ipus: int = 1
    batch_per_step: int = 0
    matmul_amp: float = 0.6
    conv_amp: float = 0.6
    matmul_partial_type: str = "float"
    conv_partial_type: str = "float"
    ipu_placement: bool = True
    precision_mode: str | None = None
    remove_excluded_nodes: bool = False
    merge_subgraphs: bool = False
    gelu_replacement: dict[str, list[str]] | None = None
    precision_conversion_excluded_nodes: list[str] | None = None
    manual_sharding: list[list[str]] | None = None
    int64_to_int32_conversion: bool = False
    embedded_runtime_save_config: dict[str, Any] | None = None
    pipeline_cfg: dict[str, Any] | None = None
    pb_md5sum: str | None = field(default=None, init=False)

    def load_from_json_file(self, config_file: str) -> Self:
        """Take over what a file says. ValueError for a file that cannot be read."""
        if not os.access(config_file, os.R_OK):
            raise ValueError(f"config_file {config_file} is not readable.")
        given_options = json.loads(Path(config_file).read_text(encoding="utf-8"))
        for name, kind in _JSON_TYPES.items():
            value = given_options.get(name)
            if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
                setattr(self, name, value)
        if isinstance(given_options.get("no_ipu_placement"), bool):
            self.ipu_placement = not given_options["no_ipu_placement"]
        return self

    def save_to_json_file(self, directory: str) -> None:
        """Write ``conversion_params.json`` in a folder. ValueError for a folder that cannot be written."""
        if not os.path.isdir(directory) or not os.access(directory, os.W_OK):
            raise ValueError(f"dir {directory} is not a directory or writeable.")
        values: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name == "ipu_placement":
                values["no_ipu_placement"] = not value
            elif entry.name == "pb_md5sum":
                values["md5sum"] = value
            elif value or entry.name not in _ONLY_IF_SET:
                values[entry.name] = value
        Path(directory, PARAMS_FILE).write_text(json.dumps(values, indent=4), encoding="utf-8")


def check_conversion_params(params: IpuConversionParams) -> None:
    """TypeError and ValueError in the SDK's words for what cannot be asked for."""
    if not isinstance(params.num_ipus, int) or params.num_ipus <= 0:
        raise ValueError("num_ipus should be an integer, and greater than 0.")
    if not isinstance(params.batch_per_step, int):
        raise TypeError("batch_per_step should be an integer.")
    if params.excluded_nodes is not None and not isinstance(params.excluded_nodes, list):
        raise TypeError("excluded_nodes should be a list.")
    for name in ("ipu_placement", "remove_excluded_nodes", "merge_subgraphs"):
        if not isinstance(getattr(params, name), bool):
            raise ValueError(f"{name} should be True or False.")
    check_gelu_replacement(params.gelu_replacement)
    if params.manual_sharding is not None:
        check_sharding(params.manual_sharding)


def check_gelu_replacement(nodes: object) -> None:
    """ValueError for anything but None and a dictionary of three lists of patterns."""
    if nodes is None:
        return
    if not isinstance(nodes, dict):
        raise ValueError("gelu_replacement should be a dict.")
    missing = [key for key in _GELU_KEYS if key not in nodes]
    if missing:
        raise ValueError(f"Missing items from gelu: {missing}. {_GELU_HELP}")
    for key in _GELU_KEYS:
        if not isinstance(nodes[key], list):
            raise ValueError(f"gelu_replacement['{key}'] should be a list.")


def check_sharding(patterns: object) -> None:
    """TypeError for anything but lists of patterns in a list."""
    if not isinstance(patterns, list):
        raise TypeError(f"manual_sharding must be a list, not {type(patterns)}.")
    for of_ipu in patterns:
        if not isinstance(of_ipu, list):
            raise TypeError(f"manual_sharding must only contain lists of strings, not {type(of_ipu)}.")
        for pattern in of_ipu:
            if not isinstance(pattern, str):
                raise TypeError(
                    f"manual_sharding must only contain lists of strings, not lists of {type(pattern)}."
                )


def check_embedded_runtime(params: IpuConversionParams) -> None:
    """TypeError and ValueError for an embedded runtime that goes with no other option, or lacks one of its own."""
    config: object = params.embedded_runtime_save_config
    if not config:
        return
    if params.merge_subgraphs:
        raise ValueError(
            "`merge_subgraphs` must be false with `merge_subgraphs=False` during the embedded application runtime "
            "compilation."
        )
    if not params.int64_to_int32_conversion:
        raise ValueError(
            "`int64_to_int32_conversion` must be True with `int64_to_int32_conversion=True` during the embedded "
            "application runtime compilation."
        )
    if not isinstance(config, dict):
        raise TypeError(
            f"Invalid type ({type(config).__name__}) for `embedded_runtime_save_config`. {_RUNTIME_HELP}"
        )
    for key in ("embedded_runtime_exec_cachedir", "runtime_api_timeout_us"):
        if key not in config:
            raise ValueError(f"Key '{key}' missing from `embedded_runtime_save_config`. {_RUNTIME_HELP}")
