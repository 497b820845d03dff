"""The command ``poprt``: fix the shapes of an ONNX model, check it, compile it, export it, time it.

The options are PopRT's; those of conversion that podrun does not have as yet (precisions below fp32, passes, packing,
calibration) are not among them, and click names the nearest that is. Numbers under ``--run`` are modelled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from podrun.core.command_line import HELP_OPTIONS, run_command
from podrun.core.errors import CallError, UsageError
from podrun.serving.compiler import Compiler, CompilerOptions, ServedModel, model_proto
from podrun.serving.loaded_model import LoadedModel

if TYPE_CHECKING:
    from onnx import ModelProto

TOLERANCE = 1e-3
"""Largest difference from onnxruntime that ``--check`` lets pass, of values and relative to them."""


def with_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """The model whose inputs have these shapes. UsageError for an unknown input, or one that has another shape."""
    known = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in known}
    for name, shape in shapes.items():
        if name not in inputs:
            raise UsageError(f"the model has no input {name!r}; it has {sorted(inputs)}")
        dims = inputs[name].type.tensor_type.shape.dim
        if len(dims) != len(shape) or any(
            d.dim_value not in (0, s) for d, s in zip(dims, shape, strict=True)
        ):
            told = [dim.dim_value or dim.dim_param or "?" for dim in dims]
            raise UsageError(f"input {name!r} has shape {told}, which cannot become {list(shape)}")
        for dim, size in zip(dims, shape, strict=True):
            dim.dim_value = size
    for name, value in inputs.items():
        if any(dim.dim_value <= 0 for dim in value.type.tensor_type.shape.dim):
            raise UsageError(f"the shape of input {name!r} is not known", hint=f"--input_shape {name}=1,8")
    return model


def with_batch(model: ModelProto, size: int, axis: int) -> ModelProto:
    """The model whose inputs have ``size`` along ``axis``, where that is open."""
    known = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name not in known and axis < len(dims) and dims[axis].dim_value <= 0:
            dims[axis].dim_value = size
    return model


def random_inputs(loaded: LoadedModel, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs of one micro-batch: standard normal numbers, zeros for integers."""
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(d.shape).astype(d.dtype)
        if d.dtype.kind == "f"
        else np.zeros(d.shape, d.dtype)
        for name, d in loaded.inputs.items()
    }


def difference(
    model: ModelProto, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> float:
    """The largest difference of outputs from onnxruntime's, relative to 1 or to the value."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wide = {
        i.name: inputs[i.name].astype(np.int64) if "int64" in i.type else inputs[i.name]
        for i in session.get_inputs()
    }
    expected = dict(zip(outputs, session.run(list(outputs), wide), strict=True))
    worst = 0.0
    for name, value in outputs.items():
        right = np.asarray(expected[name], np.float64)
        error = np.abs(value.astype(np.float64).reshape(right.shape) - right) / np.maximum(1.0, np.abs(right))
        worst = max(worst, float(error.max(initial=0.0)))
    return worst


def _pairs(words: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for word in (part for text in words for part in text.split()):
        name, equals, value = word.rpartition("=")
        if not equals or not name:
            raise UsageError(f"{option} takes NAME=VALUE, not {word!r}")
        pairs[name] = value
    return pairs


def _shapes(words: Sequence[str]) -> dict[str, list[int]]:
    shapes = {}
    for name, text in _pairs(words, "--input_shape").items():
        if not all(size.isdecimal() and int(size) > 0 for size in text.split(",")):
            raise UsageError(f"--input_shape {name}={text}: a shape is numbers above 0, as in {name}=1,8")
        shapes[name] = [int(size) for size in text.split(",")]
    return shapes


@click.command(
    "poprt", context_settings=HELP_OPTIONS, epilog="Example: poprt -i model.onnx --export_popef --run"
)
@click.option("-i", "--input_model", type=click.Path(path_type=Path), required=True, help="The ONNX model.")
@click.option(
    "--output_model", default="", help="Name of the converted model; <input>.optimized.onnx if not given."
)
@click.option("--output_dir", type=click.Path(path_type=Path), default=Path(), help="Folder of results.")
@click.option(
    "--input_shape", multiple=True, metavar="NAME=1,8", help="Shapes of inputs that the model leaves open."
)
@click.option("--batch_size", type=click.IntRange(1), help="Batch of inputs that leave it open.")
@click.option("--batch_axis", type=click.IntRange(0), default=0, show_default=True, help="Axis of the batch.")
@click.option(
    "--batches_per_step", type=click.IntRange(1), default=1, show_default=True, help="Iterations in a run."
)
@click.option(
    "--ipu_version", type=click.Choice(["ipu2", "ipu21"]), default="ipu2", show_default=True, help="Chip."
)
@click.option(
    "--compiler_options", multiple=True, metavar="NAME=VALUE", help="num_ipus, partials_type and others."
)
@click.option("--check", is_flag=True, help="Compare with onnxruntime on random data.")
@click.option(
    "--run", "runs", is_flag=True, help="Run on random data; print batch, latency and throughput, modelled."
)
@click.option("--show", is_flag=True, help="Print inputs and outputs.")
@click.option("--export_popef", is_flag=True, help="Write executable.popef.")
def poprt_command(input_model: Path, output_model: str, output_dir: Path, **options: Any) -> int:
    """Convert an ONNX model for IPUs; compile, check, run and export it."""
    model = model_proto(input_model)
    if options["batch_size"]:
        model = with_batch(model, options["batch_size"], options["batch_axis"])
    model = with_shapes(model, _shapes(options["input_shape"]))
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / (output_model or f"{input_model.stem}.optimized.onnx")).write_bytes(
        model.SerializeToString()
    )
    if not any(options[name] for name in ("check", "runs", "show", "export_popef")):
        return 0
    settings = _compiler_options(options)
    compiled: ServedModel
    if options["export_popef"]:
        Compiler.compile_and_export(model, None, output_dir / "executable.popef", settings)
        compiled = ServedModel(output_dir / "executable.popef")
    else:
        compiled = Compiler.compile(model, None, settings)
    if options["show"]:
        for kind, anchors in (("Input", compiled.metadata.inputs()), ("Output", compiled.metadata.outputs())):
            for anchor in anchors:
                click.echo(f"{kind} {anchor.name}: dtype - {anchor.tensorInfo.dataType.value}, "
                           f"shape - {list(anchor.tensorInfo.shape)}")  # fmt: skip
    if options["check"] or options["runs"]:
        _try(model, compiled, check=options["check"], runs=options["runs"])
    return 0


def _compiler_options(options: Mapping[str, Any]) -> CompilerOptions:
    typed: dict[str, Any] = {}
    defaults = CompilerOptions()
    for name, text in _pairs(options["compiler_options"], "--compiler_options").items():
        now = getattr(defaults, name, "")
        if isinstance(now, bool):
            typed[name] = text.lower() in ("1", "true")
        else:
            try:
                typed[name] = type(now)(text)
            except (TypeError, ValueError) as error:
                raise UsageError(f"the compiler option {name} cannot be {text!r}") from error
    plain = {"batches_per_step": options["batches_per_step"], "ipu_version": options["ipu_version"]}
    return CompilerOptions.from_dict(plain | typed)


def _try(model: ModelProto, compiled: ServedModel, *, check: bool, runs: bool) -> None:
    with LoadedModel(compiled) as loaded:
        inputs = random_inputs(loaded)
        outputs, cost = loaded.run(inputs, 1)
        if runs:
            seconds = cost.compute_s + cost.transfer_s
            rows = next(iter(loaded.inputs.values())).shape[0] if loaded.inputs else 1
            click.echo(f"Bs: {rows}\nLatency: {seconds * 1e3:.3g}ms\nTput: {int(rows / seconds)}")
        if check:
            worst = difference(model, inputs, outputs)
            if not worst <= TOLERANCE:
                raise CallError(
                    f"the outputs differ from onnxruntime's by {worst:.3g}, more than {TOLERANCE:g}"
                )
            click.echo(f"The outputs are onnxruntime's to {worst:.1e}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``poprt``; returns its exit code."""
    return run_command(poprt_command, list(sys.argv[1:] if arguments is None else arguments))
