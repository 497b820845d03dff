"""What ``poprt`` does: read, convert, calibrate, fuse, shard, write, show, compile, run."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from onnx import ModelProto

from podrun.core.errors import NotFoundError, UnsupportedError, UsageError
from podrun.serving.compiler import Compiler, ServedModel
from podrun.serving.compiler_options import CompilerOptions, compiler_option_of
from podrun.serving.convert.config_file import read_options
from podrun.serving.convert.converter import PROGRESS_STEPS, Converter
from podrun.serving.convert.frontends import get_frontend, write_model
from podrun.serving.convert.pass_manager import get_registered_passes
from podrun.serving.convert.report_passes import TOLERANCES, describe_ends, describe_io
from podrun.serving.poprt_words import listed, pack_args_of, pairs_of, shapes_of

if TYPE_CHECKING:
    from podrun.serving.fused_models import FusedGraph
    from podrun.serving.loaded_model import LoadedModel

Options = dict[str, Any]
_LOG_FORMAT = "%(asctime)s %(levelname)s poprt %(filename)s:%(lineno)d] %(message)s"
SDK_VERSION = "3.4.0"
"""The SDK that PopRT 1.5.0 belongs to."""


def version_lines() -> list[str]:
    """What ``--version`` prints."""
    from podrun import __version__

    return [
        f"PopRT version: {__version__} (podrun)",
        f"Build with SDK: {SDK_VERSION}",
        f"Runtime SDK: {SDK_VERSION}",
    ]


def poprt_completion(command: click.Command, shell: str) -> str:
    """A script that teaches a shell the command's options."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise UsageError(f"there is no completion for {shell}", hint="Shells: bash, zsh.")
    # Without asking bash for its version, which `source` does for bash.
    completion = kind(command, {}, "poprt", "_POPRT_COMPLETE")
    return str(completion.source_template % completion.source_vars())


def load_modules(text: str | None, option: str) -> None:
    """Run Python files of the user that register passes or shape functions."""
    for name in listed(text):
        path = Path(name)
        if not path.is_file():
            raise NotFoundError(
                f"{option}: there is no file {name!r}", hint=f"Look for one: ls {path.parent}"
            )
        spec = importlib.util.spec_from_file_location(f"poprt_custom_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{option}: {name!r} is no Python file", hint=f"As in {option} passes.py.")
        module = importlib.util.module_from_spec(spec)
        with _sdk_names():
            try:
                spec.loader.exec_module(module)
            except (ImportError, SyntaxError) as error:
                raise UsageError(f"{option}: {name}: {error}") from error


@contextlib.contextmanager
def _sdk_names() -> Iterator[None]:
    """Let files of the user import the names of the SDK, as programs do."""
    import podrun

    folder = str(Path(podrun.__file__).with_name("compat"))
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def pass_names(custom: str | None = None) -> list[str]:
    """Names of all passes, those of the user's files too."""
    load_modules(custom, "--custom_pass_config")
    return list(get_registered_passes())


def convert_and_run(
    command: click.Command, options: Options, typed: set[str], frontend: Mapping[str, Any] | None = None
) -> int:
    """Do what the options of ``command`` ask for. ``typed``: those of the command line, which win over those of a
    file."""
    logging.basicConfig(format=_LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("poprt").setLevel(options["logging_level"].upper())
    options = dict(options)
    models: list[Options] = []
    if options["config_yaml"]:
        models = _with_file(options, typed, command)
    _check(options)
    load_modules(options["custom_pass_config"], "--custom_pass_config")
    load_modules(options["custom_shape_inference"], "--custom_shape_inference")
    if options["only_manual_sharding"]:
        return _only_shard(options)
    if models:
        from podrun.serving.convert.model_fusion import MFConverter

        model = MFConverter().convert([_converted(options | one, frontend) for one in models])
        _show(model, options)
    else:
        model = _converted(options, frontend)
    if options["manual_sharding_config"]:
        model = _sharded(model, options)
    write_model(model, _output_path(options, fused=bool(models)))
    if options["export_popef"] or options["run"]:
        _compile(model, options)
    return 0


def _with_file(options: Options, typed: set[str], command: click.Command) -> list[Options]:
    """Take the options of a YAML file; returns those of each model of a fusion."""
    several = {p.name: bool(getattr(p, "multiple", False)) for p in command.params if p.name}
    plain, models = read_options(options["config_yaml"], several)
    types = {p.name: p for p in command.params}
    context = click.Context(command)
    for name, value in plain.items():
        if name not in typed:
            options[name] = types[name].type_cast_value(context, value)
    return (
        [{k: types[k].type_cast_value(context, v) for k, v in one.items()} for one in models]
        if models
        else []
    )


def _check(options: Options) -> None:
    """UsageError for options that contradict each other, UnsupportedError for what cannot be."""
    if options["input_model"] is None and not options["config_yaml"]:
        raise UsageError("there is no model to convert", hint="poprt -i model.onnx")
    if options["perf_tuner"]:
        raise UnsupportedError("--perf_tuner does nothing in PopRT, and is not there", hint="Leave it out.")
    if options["custom_library_so_paths"]:
        raise UnsupportedError(
            "--custom_library_so_paths: operators that are compiled for IPUs cannot run here",
            hint="Register what they compute: PODRUN_CUSTOM_OPS=ops.py poprt ... (podrun help popart).",
        )
    eight_bits = options["precision"] in ("fp8", "fp8_weight")
    for name in ("calibration_with_data", "precision_compare", "fp8_params", "fp8_skip_op_names"):
        if options[name] and not eight_bits:
            raise UsageError(f"--{name} is for --precision fp8 and fp8_weight", hint="Add --precision fp8.")
    if options["calibration_with_data"] and options["fp8_params"]:
        raise UsageError(
            "--fp8_params and --calibration_with_data exclude each other: data choose the formats",
            hint="Keep one of them.",
        )
    for name in ("calibration_loss_type", "data_preprocess", "num_of_layers_keep_fp16"):
        needed = options["calibration_with_data"] or (
            name == "data_preprocess" and options["precision_compare"]
        )
        if options[name] and not needed:
            raise UsageError(f"--{name} needs --calibration_with_data", hint="Add --calibration_with_data.")
    if options["only_manual_sharding"] and not options["manual_sharding_config"]:
        raise UsageError("--only_manual_sharding needs --manual_sharding_config", hint="Name the file of it.")
    if options["remap_mode"] and not options["enable_insert_remap"]:
        raise UsageError("--remap_mode needs --enable_insert_remap", hint="Add --enable_insert_remap.")
    compiler_options_of(options)


def _conversion(options: Options) -> Options:
    """The options of `Converter`."""
    same = (
        *("batch_size", "batch_axis", "convert_version", "precision", "checkpoints", "eightbitsio"),
        *("fp16_skip_op_types", "skip_passes", "disable_fast_norm", "fp8_skip_op_names", "max_tensor_size"),
        *("enable_insert_remap", "infer_shape_ahead", "enable_avoid_overflow_patterns", "enable_erf_gelu"),
        *("enable_compress_pattern", "merge_if_with_same_cond", "fold_periodic_initializer", "num_io_tiles"),
        *("merge_matmul", "merge_matmul_add", "merge_moe", "check"),
    )
    told = {name: options[name] for name in same}
    told["input_shape"] = shapes_of(options["input_shape"]) or None
    told["used_passes"] = listed(options["passes"])
    told["remove_outputs"] = listed(options["remove_outputs"])
    told["fp8_params"] = options["fp8_params"] or "F143,F143,-1,-1"
    told["quantize"] = bool(options["calibration_with_data"])
    if options["enable_insert_remap"] and options["remap_mode"]:
        told["remap_mode"] = listed(options["remap_mode"])
    for name in ("serialize_matmul", "serialize_matmul_add"):
        told[name] = pairs_of(options[name], f"--{name}") or None
    told["pack_args"] = pack_args_of(options["pack_args"])
    told["apply_hcsr"] = list(options["apply_hcsr"])
    return told


def _converted(options: Options, frontend: Mapping[str, Any] | None) -> ModelProto:
    if options["input_model"] is None:
        raise UsageError("there is no model to convert", hint="poprt -i model.onnx")
    origin = get_frontend(options["input_model"], options["framework"], **(frontend or {})).load_model()
    told = _conversion(options)
    checks = told.pop("check")
    calibrates = options["calibration_with_data"]
    converter = Converter(**told, check=checks and not calibrates)
    with _progress(options) as step:
        converter.progress = step
        model = converter.convert(origin)
    if calibrates:
        model = _calibrated(model, origin, told, options)
    elif options["precision_compare"]:
        _compare(model, origin, told, options)
    if checks:
        worst = converter.difference if not calibrates else _check_again(origin, model, told, options)
        click.echo(f"The outputs are onnxruntime's to {worst:.1e}.")
    _show(model, options)
    return model


def _plain(told: Options) -> Options:
    """Options of the same conversion in float32: what calibration and comparison start from."""
    changed = {"precision": "fp32", "quantize": False, "fp8_skip_op_names": None, "fp16_skip_op_types": None}
    return told | changed


def _calibrated(model: ModelProto, origin: ModelProto, told: Options, options: Options) -> ModelProto:
    from podrun.serving.convert.quantizer import quantize

    return quantize(
        model,
        origin,
        options["output_dir"],
        options["data_preprocess"],
        options["precision"],
        options["calibration_loss_type"] or "kld",
        options["num_of_layers_keep_fp16"],
        told | {"precision_compare": options["precision_compare"]},
    )


def _compare(model: ModelProto, origin: ModelProto, told: Options, options: Options) -> None:
    from podrun.serving.convert.calibration import compare_layers
    from podrun.serving.convert.quantizer import read_calibration_data
    from podrun.serving.convert.report_passes import made_up_inputs

    plain = Converter(**_plain(told)).convert(origin)
    file = options["data_preprocess"]
    data = read_calibration_data(file) if file else made_up_inputs(plain)
    compare_layers(plain, model, data, options["output_dir"])


def _check_again(origin: ModelProto, model: ModelProto, told: Options, options: Options) -> float:
    from podrun.serving.convert.report_passes import CheckWithFakeData

    check = CheckWithFakeData(Converter(**_plain(told)).fixed(origin), TOLERANCES[options["precision"]])
    check.run(model)
    return check.worst


def _show(model: ModelProto, options: Options) -> None:
    if options["show"]:
        click.echo("\n".join(describe_ends(model)))
    if options["show_io_stat"]:
        click.echo("\n".join(describe_io(model)))


def _sharded(model: ModelProto, options: Options) -> ModelProto:
    from podrun.serving.convert.sharder import read_sharding_file

    return read_sharding_file(options["manual_sharding_config"]).run(model)


def _only_shard(options: Options) -> int:
    if options["input_model"] is None:
        raise UsageError(
            "there is no model to shard", hint="poprt -i model.onnx --manual_sharding_config shards.yaml"
        )
    model = get_frontend(options["input_model"]).load_model()
    write_model(_sharded(model, options), _output_path(options))
    return 0


def _output_path(options: Options, *, fused: bool = False) -> Path:
    source = options["input_model"]
    name = options["output_model"] or (
        "fused.optimized.onnx" if fused else f"{Path(source).stem}.optimized.onnx"
    )
    if os.path.basename(name) != name:
        raise UsageError(
            f"--output_model is a name, not the path {name!r}", hint="--output_dir says where it goes."
        )
    return Path(options["output_dir"], name)


@contextlib.contextmanager
def _progress(options: Options) -> Iterator[Any]:
    """A bar on a terminal; silence elsewhere."""
    if options["disable_compilation_progress_bar"] or not sys.stderr.isatty():
        yield lambda step: None
        return
    with click.progressbar(length=PROGRESS_STEPS, label="PopRT conversion", file=sys.stderr) as bar:
        yield lambda step: bar.update(1)


def compiler_options_of(options: Options) -> CompilerOptions:
    """The compiler's options: of words, and of options that have a name of their own."""
    told = {
        n: compiler_option_of(n, t)
        for n, t in pairs_of(options["compiler_options"], "--compiler_options").items()
    }
    plain: Options = {"batches_per_step": options["batches_per_step"], "ipu_version": options["ipu_version"]}
    plain["num_io_tiles"] = options["num_io_tiles"]
    if options["available_memory_proportion"] is not None:
        plain["available_memory_proportion"] = options["available_memory_proportion"]
    for name, value in plain.items():
        usual = getattr(CompilerOptions(), name)
        if (
            name in told
            and value not in (usual, told[name])
            and not (name == "ipu_version" and value == "ipu2")
        ):
            raise UsageError(
                f"--{name} is {value}, and --compiler_options says {told[name]}", hint="Say it once."
            )
    session = pairs_of(options["popart_options"], "--popart_options")
    if session:
        told["popart_options"] = {name: _session_value(text) for name, text in session.items()}
    return CompilerOptions.from_dict(plain | told)


def _session_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _compile(model: ModelProto, options: Options) -> None:
    settings = compiler_options_of(options)
    with contextlib.ExitStack() as stack:
        if not options["disable_compilation_progress_bar"] and sys.stderr.isatty():
            bar = stack.enter_context(
                click.progressbar(length=100, label="Graph compilation", file=sys.stderr)
            )
            settings.compilation_progress_logger = lambda done, _: bar.update(done - bar.pos)
        if options["export_popef"]:
            path = Path(options["output_dir"], "executable.popef")
            Compiler.compile_and_export(model, None, path, settings)
            compiled = ServedModel(path)
        else:
            compiled = Compiler.compile(model, None, settings)
    if options["run"]:
        click.echo("\n".join(run_lines(compiled, settings.batches_per_step)))


def run_lines(compiled: ServedModel, batches: int) -> list[str]:
    """Run a model on random data; batch, latency and throughput, modelled, as lines: of each model of a fused one."""
    from podrun.serving.fused_models import FusedGraph, fused_graphs
    from podrun.serving.loaded_model import LoadedModel

    with LoadedModel(compiled) as loaded:
        graphs = fused_graphs(loaded.inputs)
        if not graphs:
            return _timed_run(loaded, batches)
        runs = {number: _timed_run(FusedGraph(loaded, number), batches) for number in graphs}
        return [line for number, lines in runs.items() for line in (f"graph{number}", *lines)]


def _timed_run(loaded: LoadedModel | FusedGraph, batches: int) -> list[str]:
    import numpy as np

    random = np.random.default_rng(0)
    count = max(batches, loaded.group)
    values = {
        name: random.standard_normal(d.whole_shape(count)).astype(d.dtype)
        if d.dtype.kind == "f"
        else np.zeros(d.whole_shape(count), d.dtype)
        for name, d in loaded.inputs.items()
    }
    _, cost = loaded.run(values, count)
    rows = max((d.shape[0] for d in loaded.inputs.values() if d.shape), default=1)
    seconds = (cost.compute_s + cost.transfer_s) / count
    return [f"Bs: {rows}", f"Latency: {seconds * 1e3:.3g}ms", f"Tput: {int(rows / seconds)}"]
