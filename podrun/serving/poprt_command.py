"""The command ``poprt``: convert an ONNX model for IPUs, check it, compile it, export it, time it.

The options are PopRT's; `podrun.serving.poprt_flow` does what they ask for. Numbers under ``--run`` are modelled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from podrun.core.command_line import HELP_OPTIONS, FiniteRange, run_command
from podrun.core.errors import UsageError
from podrun.serving.poprt_words import ManyWords

_PATH = click.Path(path_type=Path)
_PRECISIONS = click.Choice(["fp32", "fp16", "fp8", "fp8_weight"])
_LOSSES = click.Choice(["kld", "mse", "mae", "snr", "cos_dist", "gptq"])
_LEVELS = click.Choice(["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG"], case_sensitive=False)

Decorator = Callable[[Any], Any]


def _flag(name: str, text: str, *others: str) -> Decorator:
    return click.option(name, *others, is_flag=True, help=text)


def _words(name: str, metavar: str, text: str) -> Decorator:
    return click.option(name, multiple=True, metavar=metavar, help=text)


def _csv(name: str, text: str, metavar: str = "NAME,NAME") -> Decorator:
    return click.option(name, metavar=metavar, help=text)


def _number(name: str, default: int | None, text: str, least: int = 0) -> Decorator:
    return click.option(
        name, type=click.IntRange(least), default=default, show_default=default is not None, help=text
    )


_MODEL = (
    click.option("-i", "--input_model", type=_PATH, help="The model: a file, or a SavedModel's folder."),
    click.option("--output_model", help="Name of the converted model; <input>.optimized.onnx if not given."),
    click.option("--output_dir", type=_PATH, default=Path(), help="Folder of results."),
    click.option("--framework", type=click.Choice(["onnx", "tensorflow"]), default="onnx", show_default=True),
    _words("--input_shape", "NAME=1,8", "Shapes of inputs that the model leaves open."),
    _number("--batch_size", None, "Batch of all inputs, where they leave it open.", 1),
    _number("--batch_axis", None, "Axis of the batch."),
    _number("--convert_version", 11, "Version of ONNX's operators.", 7),
    _csv("--checkpoints", "Tensors within the model that become outputs."),
    _csv("--remove_outputs", "Outputs that go."),
    _flag("--eightbitsio", "Images come in and go out in 8 bits."),
)
_PRECISION = (
    click.option("--precision", type=_PRECISIONS, default="fp32", show_default=True),
    _csv("--fp16_skip_op_types", "Operators that stay in float32.", "TYPE,TYPE"),
    _csv("--fp8_skip_op_names", "Nodes that stay in float16."),
    _csv("--fp8_params", "Formats and scales [F143,F143,-1,-1].", "INPUT,WEIGHT,SCALE,SCALE"),
    _flag("--calibration_with_data", "Choose formats and scales by data.", "--quantize"),
    click.option("--calibration_loss_type", "--quantize_loss_type", type=_LOSSES, help="[kld]"),
    click.option("--data_preprocess", type=_PATH, help="A .npz file of calibration data by input."),
    _number("--num_of_layers_keep_fp16", 0, "So many layers with the largest losses stay in float16."),
    _flag("--precision_compare", "Compare layers with the original: precision_compare.log."),
    _flag("--enable_avoid_overflow_patterns", "Sums of squares stay in float32."),
    _flag("--disable_fast_norm", "Keep normalisations of half precision as they are."),
)
_PASSES = (
    _csv("--passes", "Passes to run besides, in this order.", "PASS,PASS"),
    _csv("--skip_passes", "Passes not to run.", "PASS,PASS"),
    _flag("--list_all_passes", "Print the names of all passes and stop."),
    _csv("--custom_pass_config", "Python files that register passes.", "FILE,FILE"),
    _csv("--custom_shape_inference", "Python files with shape functions.", "FILE,FILE"),
    _words("--custom_library_so_paths", "FILE", "Refused: compiled operators cannot run here."),
    _flag("--infer_shape_ahead", "Infer shapes first."),
    _flag("--enable_erf_gelu", "GELU by erf becomes one operator."),
    _flag("--enable_compress_pattern", "Compress by a constant becomes a Gather."),
    _flag("--merge_if_with_same_cond", "Ifs of one condition become one."),
    _flag("--fold_periodic_initializer", "Weights that repeat themselves are tiled."),
    _flag("--optimize_internal_exchange_code", "Accepted; code of exchanges is not modelled."),
    _flag("--disable_compilation_progress_bar", "Show no progress."),
    _flag("--perf_tuner", "Refused: not in PopRT either."),
    _flag("--enable_insert_remap", "Lay results of operators out anew."),
    _csv("--remap_mode", "Where: before_ or after_ an operator [after_matmul].", "PLACE,PLACE"),
    click.option("--max_tensor_size", type=int, default=-1, show_default=True, help="Bytes folded at most."),
    _words("--serialize_matmul", "NODE=FACTOR[/MODE[/KEEP]]", "Compute products in slices."),
    _words("--serialize_matmul_add", "MATMUL/ADD=FACTOR", "Divide products with their bias."),
    _csv("--merge_matmul", "MatMuls that become one."),
    _csv("--merge_matmul_add", "Pairs of MatMul and Add that become one."),
    _csv("--merge_moe", "Experts that become one: begin,end,begin,end."),
    _words("--pack_args", "KEY=VALUE", "Pack samples: max_valid_num, segment_max_size."),
    _words("--apply_hcsr", "TYPE,SHAPE[,NUMBER]", "Merge inputs of one form on the host: fp32,[512,1],50."),
)
_PLACES = (
    click.option("--manual_sharding_config", type=_PATH, help="YAML: a list of {node, device, stage}."),
    _flag("--only_manual_sharding", "Shard, and nothing else."),
    click.option(
        "--available_memory_proportion",
        type=FiniteRange(0, 1, min_open=True),
        help="Share of tile memory for products.",
    ),
    _number("--batches_per_step", 1, "Iterations in a run.", 1),
    _number("--num_io_tiles", 0, "Tiles that move data while others compute."),
    click.option(
        "--ipu_version", type=click.Choice(["ipu2", "ipu21"]), default="ipu2", show_default=True, help="Chip."
    ),
    _words("--compiler_options", "NAME=VALUE", "num_ipus, partials_type and others."),
    _words("--popart_options", "NAME=VALUE", "Fields of PopART's SessionOptions."),
)
_ACTIONS = (
    _flag("--check", "Compare with onnxruntime on made-up data."),
    _flag("--run", "Run on random data; print batch, latency and throughput, modelled."),
    _flag("--show", "Print inputs and outputs."),
    _flag("--show_io_stat", "Print how many bytes go in and out."),
    _flag("--export_popef", "Write executable.popef."),
    click.option("--config_yaml", type=_PATH, help="Options from a YAML file; model_fusion lists models."),
    click.option("--logging_level", type=_LEVELS, default="WARNING", show_default=True),
    click.option(
        "--print_completion", type=click.Choice(["bash", "zsh"]), help="Print a script for a shell."
    ),
    _flag("--version", "Print versions.", "-v"),
)


class PoprtGroup(ManyWords):
    """``poprt``, whose one sub-command says how a SavedModel is read."""

    several = (
        *("--input_shape", "--serialize_matmul", "--serialize_matmul_add", "--pack_args", "--apply_hcsr"),
        *("--custom_library_so_paths", "--compiler_options", "--popart_options"),
    )


def _all_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed((*_MODEL, *_PRECISION, *_PASSES, *_PLACES, *_ACTIONS)):
        command = option(command)
    return command


@click.group(
    "poprt",
    cls=PoprtGroup,
    invoke_without_command=True,
    context_settings=HELP_OPTIONS,
    options_metavar="[OPTIONS]",
    subcommand_metavar="[tf2onnx [OPTIONS]]",
    epilog="Example: poprt -i model.onnx --input_shape x=1,8 --precision fp16 --export_popef --run",
)
@_all_options
@click.pass_context
def poprt_command(ctx: click.Context, /, **options: Any) -> int:
    """Convert an ONNX model for IPUs; check, compile, run and export it."""
    from podrun.serving import poprt_flow

    if options["version"]:
        click.echo("\n".join(poprt_flow.version_lines()))
        return 0
    if options["print_completion"]:
        click.echo(poprt_flow.poprt_completion(ctx.command, options["print_completion"]))
        return 0
    if options["list_all_passes"]:
        click.echo("\n".join(poprt_flow.pass_names(options["custom_pass_config"])))
        return 0
    typed = {
        name for name in options if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if ctx.invoked_subcommand is not None:
        ctx.obj = (options, typed)
        return 0
    return poprt_flow.convert_and_run(poprt_command, options, typed)


@poprt_command.command("tf2onnx")
@click.option(
    "--saved_model", is_flag=True, default=True, help="Read a SavedModel; what else there was is not read."
)
@click.option("--signature_def", default="", help="The signature.")
@click.option("--tag", default="", help="The tag of the graph.")
@click.option("--inputs", help="Tensors to begin at.", metavar="NAME,NAME")
@click.option("--outputs", help="Tensors to end at.", metavar="NAME,NAME")
@click.option("--opset", type=click.IntRange(7), default=11, show_default=True)
@click.option("--inputs_as_nchw", help="Images whose channels come first.", metavar="NAME,NAME")
@click.option("--outputs_as_nchw", help="Results whose channels come first.", metavar="NAME,NAME")
@click.pass_context
def tf2onnx_command(ctx: click.Context, /, **settings: Any) -> int:
    """How a SavedModel of TensorFlow is read (--framework tensorflow)."""
    from podrun.serving import poprt_flow

    options, typed = ctx.obj
    if options["framework"] != "tensorflow":
        raise UsageError(
            "tf2onnx is for --framework tensorflow", hint="Put it before: poprt --framework tensorflow"
        )
    return poprt_flow.convert_and_run(poprt_command, options, typed, settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``poprt``; returns its exit code."""
    return run_command(poprt_command, list(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(main())
