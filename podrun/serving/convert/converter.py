"""`Converter`: a model of ONNX becomes a model for IPUs, by options with PopRT's names.

    converted = Converter(input_shape={"x": [1, 512]}, precision="fp16").convert(model)

The order: shapes and outputs are fixed; clean-up and folding; the version of operators; 64-bit types; the precision;
fusions that options ask for; passes that are asked for by name, in their order; the final check.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from typing import Any

import onnx
from onnx import ModelProto

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.convert.half_passes import listed_names
from podrun.serving.convert.opset import convert_opset
from podrun.serving.convert.pass_manager import Pass, pass_class, run_pass
from podrun.serving.convert.placing_passes import parse_hcsr
from podrun.serving.convert.report_passes import TOLERANCES, CheckWithFakeData
from podrun.serving.convert.structure_passes import check_shapes_known

PRECISIONS = ("fp32", "fp16", "fp8", "fp8_weight")
LOSSES = ("kld", "mse", "mae", "snr", "cos_dist", "gptq")
PROGRESS_STEPS = 5
"""Steps of a conversion that `Converter` reports: shapes, clean-up, precision, fusions, check."""


@dataclass(slots=True, kw_only=True)
class ConversionOptions:
    """Options of a conversion; names and defaults are PopRT's."""

    input_shape: Mapping[str, Sequence[int]] | None = None
    batch_size: int | None = None
    batch_axis: int | None = None
    convert_version: int = 11
    precision: str = "fp32"
    checkpoints: str | Sequence[str] | None = None
    eightbitsio: bool = False
    fp16_skip_op_types: str | None = None
    skip_passes: str | Sequence[str] | None = None
    used_passes: Sequence[str] = ()
    check: bool = False
    disable_fast_norm: bool = False
    pack_args: Mapping[str, Any] | None = None
    fp8_skip_op_names: str | None = None
    fp8_params: str = "F143,F143,0,0"
    quantize: bool = False
    enable_insert_remap: bool = False
    remap_mode: Sequence[str] = ("after_matmul",)
    infer_shape_ahead: bool = False
    enable_avoid_overflow_patterns: bool = False
    enable_compress_pattern: bool = False
    enable_erf_gelu: bool = False
    merge_if_with_same_cond: bool = False
    fold_periodic_initializer: bool = False
    max_tensor_size: int = -1
    serialize_matmul: Mapping[str, str] | None = None
    serialize_matmul_add: Mapping[str, str] | None = None
    merge_matmul: str | None = None
    merge_matmul_add: str | None = None
    merge_moe: str | None = None
    remove_outputs: Sequence[str] = ()
    apply_hcsr: Sequence[str] = ()
    num_io_tiles: int = 0
    optimize_internal_exchange_code: bool = False
    """Accepted; code of exchanges is not modelled."""
    disable_progress_bar: bool = False
    logger: logging.Logger | None = None
    fp8_input_dict: Mapping[str, Any] = field(default_factory=dict)
    """Formats of single nodes' inputs, as calibration chose them."""
    fp8_weight_dict: Mapping[str, Any] = field(default_factory=dict)
    """Formats of single nodes' weights."""


def _signature() -> inspect.Signature:
    """The keywords of `Converter`, with lists as PopRT has them."""
    signature = inspect.signature(ConversionOptions)
    parameters = [
        one.replace(default=list(one.default)) if isinstance(one.default, tuple) else one
        for one in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


class Converter:
    """See the module's text. Keywords are the fields of `ConversionOptions`. UsageError for options that cannot be."""

    __signature__ = _signature()

    def __init__(self, **options: Any) -> None:
        known = [f.name for f in fields(ConversionOptions)]
        for name in options:
            if name not in known:
                import difflib

                near = difflib.get_close_matches(name, known, 1)
                raise UsageError(
                    f"Converter has no parameter {name!r}",
                    hint=f"Did you mean {near[0]}?" if near else f"Its parameters are {', '.join(known)}.",
                )
        self.options = ConversionOptions(**options)
        self.progress: Callable[[str], None] = lambda step: None
        self.difference = 0.0
        """Largest difference from onnxruntime that the last check saw."""
        _check_options(self.options)
        self.skipped = listed_names(self.options.skip_passes, "skip_passes")
        for name in (*self.skipped, *self.options.used_passes):
            if isinstance(name, str):
                pass_class(name)

    def convert(self, model: ModelProto) -> ModelProto:
        """The converted model; the one that is given stays as it is."""
        if not isinstance(model, ModelProto):
            raise UsageError(
                f"convert takes a ModelProto, not {type(model).__name__}",
                hint='onnx.load("model.onnx") reads one.',
            )
        result = self.fixed(model)
        origin = ModelProto()
        if self.options.check:
            origin.CopyFrom(result)
        self.progress("shapes")
        result = self._stage(result, _cleaning(self.options))
        result = self._opset(result)
        self.progress("clean-up")
        result = self._stage(result, _types(self.options))
        self.progress("precision")
        result = self._stage(result, _fusions(self.options))
        result = self._stage(result, [*self.options.used_passes])
        self.progress("fusions")
        result = self._stage(result, _finishing(self.options, origin))
        self.progress("check")
        result.producer_name, result.producer_version = "podrun", _version()
        return result

    def fixed(self, model: ModelProto) -> ModelProto:
        """The model with inputs and outputs as the options fix them: what checks compare with."""
        result = ModelProto()
        result.CopyFrom(model)
        if result.functions:
            result = onnx.inliner.inline_local_functions(result)
        result = self._stage(result, _ends(self.options))
        check_shapes_known(result)
        return result

    def _opset(self, model: ModelProto) -> ModelProto:
        model = convert_opset(model, self.options.convert_version)
        return self._stage(model, ["extract_constant_to_initializer", "constant_folding", "apply_ir_pass"])

    def _stage(self, model: ModelProto, passes: Sequence[str | Pass]) -> ModelProto:
        kept = [one for one in passes if _name_of(one) not in self.skipped]
        for one in kept:
            chosen = Pass.get_pass(one) if isinstance(one, str) else one
            if chosen.pass_name == "apply_ir_pass" and self.skipped:
                chosen = Pass.get_pass("apply_ir_pass", passes=_cleanup_without(self.skipped))
            self._log(chosen)
            model = run_pass(chosen, model)
            if isinstance(chosen, CheckWithFakeData):
                self.difference = chosen.worst
        return model

    def _log(self, one: Pass) -> None:
        (self.options.logger or logging.getLogger("poprt")).debug("pass %s", one.pass_name)


def _name_of(one: str | Pass) -> str:
    return one if isinstance(one, str) else one.pass_name


def _cleanup_without(skipped: Sequence[str]) -> list[str]:
    from podrun.serving.convert.cleanup_passes import CLEANUP_ORDER

    return [name for name in CLEANUP_ORDER if name not in skipped]


def _version() -> str:
    from podrun import __version__

    return __version__


def _check_options(options: ConversionOptions) -> None:
    if options.precision not in PRECISIONS:
        raise UsageError(
            f"there is no precision {options.precision!r}",
            hint=f"The precisions are {', '.join(PRECISIONS)}.",
        )
    if (options.batch_size is None) != (options.batch_axis is None):
        missing = "batch_axis" if options.batch_axis is None else "batch_size"
        raise UsageError(
            f"batch_size and batch_axis go together; {missing} is missing", hint="batch_axis 0 is usual."
        )
    if options.batch_size is not None and options.input_shape:
        raise UsageError("give batch_size or input_shape, not both")
    eight_bits = options.precision in ("fp8", "fp8_weight")
    if options.fp8_skip_op_names and not eight_bits:
        raise UsageError("fp8_skip_op_names is for precision fp8 and fp8_weight")
    if options.fp16_skip_op_types and options.precision == "fp32":
        raise UsageError("fp16_skip_op_types is for precision fp16 and below")
    if tuple(options.remap_mode) != ("after_matmul",) and not options.enable_insert_remap:
        raise UsageError("remap_mode needs enable_insert_remap")
    for word in options.apply_hcsr:
        parse_hcsr(word)
    if not isinstance(options.num_io_tiles, int) or not 0 <= options.num_io_tiles < 1472:
        raise UsageError(f"num_io_tiles is from 0 to 1471, not {options.num_io_tiles!r}")


def _ends(options: ConversionOptions) -> list[str | Pass]:
    """Passes that fix inputs and outputs."""
    passes: list[str | Pass] = ["remove_initializer_from_input", "unique_name_for_nodes"]
    if options.input_shape:
        passes.append(Pass.get_pass("const_input_shape", input_shape=options.input_shape))
    if options.batch_size is not None:
        axis = options.batch_axis or 0
        passes.append(Pass.get_pass("const_batch_size", batch_size=options.batch_size, batch_axis=axis))
    if options.checkpoints:
        names = listed_names(options.checkpoints, "checkpoints")
        passes.append(Pass.get_pass("add_checkpoints", checkpoints=names))
    if options.remove_outputs:
        names = listed_names(options.remove_outputs, "remove_outputs")
        passes.append(Pass.get_pass("remove_outputs", remove_outputs=names))
    if options.infer_shape_ahead:
        passes.append("shape_inference")
    return passes


def _cleaning(options: ConversionOptions) -> list[str | Pass]:
    """Passes of every conversion before the version of operators changes."""
    passes: list[str | Pass] = [
        "sort_graph",
        "extract_constant_to_initializer",
        "double_to_float",
        Pass.get_pass("constant_folding", max_tensor_size=options.max_tensor_size),
        "replace_castlike",
        "apply_ir_pass",
        "replace_einsum_with_matmul",
        "fuse_bn_into_gemm",
        "batchnorm_workaround",
        "remove_empty_concat_inputs",
        "fill_squeeze_axes",
    ]
    if options.enable_erf_gelu:
        passes.append("erf_gelu_pattern")
    passes += ["gelu_pattern", "layer_norm_pattern"]
    if options.merge_if_with_same_cond:
        passes.append("merge_if_with_same_cond")
    if options.enable_compress_pattern:
        passes.append("compress_pattern")
    return passes


def _types(options: ConversionOptions) -> list[str | Pass]:
    """Passes that change element types."""
    passes: list[str | Pass] = ["int64_to_int32"]
    if options.eightbitsio:
        passes.append("eight_bits_io")
    if options.precision != "fp32":
        passes.append(
            Pass.get_pass(
                "float_to_half",
                skip_op_types=options.fp16_skip_op_types,
                enable_avoid_overflow_patterns=options.enable_avoid_overflow_patterns,
            )
        )
        if not options.disable_fast_norm:
            passes.append("replace_groupnorm_with_fast_norm")
    if options.precision in ("fp8", "fp8_weight") and not options.quantize:
        passes.append(
            Pass.get_pass(
                "float_to_fp8",
                fp8_params=options.fp8_params,
                skip_op_names=options.fp8_skip_op_names,
                convert_model=options.precision,
                fp8_input_dict=options.fp8_input_dict,
                fp8_weight_dict=options.fp8_weight_dict,
            )
        )
    return passes


def _fusions(options: ConversionOptions) -> list[str | Pass]:
    """Passes that options ask for by name."""
    passes: list[str | Pass] = []
    for name in ("merge_matmul", "merge_matmul_add", "merge_moe", "serialize_matmul", "serialize_matmul_add"):
        value = getattr(options, name)
        if value:
            passes.append(Pass.get_pass(name, **{name: value}))
    if options.enable_insert_remap:
        passes.append(Pass.get_pass("auto_insert_remap", remap_mode=list(options.remap_mode)))
    if options.fold_periodic_initializer:
        passes.append("fold_periodic_initializer")
    if options.apply_hcsr:
        passes.append(Pass.get_pass("apply_host_concat_split", apply_hcsr=list(options.apply_hcsr)))
    if options.pack_args is not None:
        passes.append(Pass.get_pass("packed_transformer", **options.pack_args))
    return passes


def _finishing(options: ConversionOptions, origin: ModelProto) -> list[str | Pass]:
    passes: list[str | Pass] = [
        "move_subgraph_initializer",
        "eliminate_unused_initializer",
        "sort_graph",
        "unique_name_for_nodes",
    ]
    if options.num_io_tiles:
        passes.append("overlap_io")
    passes += ["shape_inference", "final_check"]
    if options.check:
        tolerance = TOLERANCES[options.precision]
        passes.append(Pass.get_pass("check_with_fake_data", origin=origin, tolerance=tolerance))
    return passes


def stages_of(options: ConversionOptions) -> Iterator[str]:
    """Names of the passes that a conversion runs, in order."""
    stages = (_ends(options), _cleaning(options), _types(options), _fusions(options), [*options.used_passes])
    for stage in (*stages, _finishing(options, ModelProto())):
        yield from map(_name_of, stage)
