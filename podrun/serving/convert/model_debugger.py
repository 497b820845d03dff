"""``poprt_exec model_debugger.py``: compare a model in two engines, change it, print it.

PopRT publishes a script of that name; sub-commands, options and their defaults are its.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.onnx_models.model_loader import read_onnx_model
from podrun.serving.compiler import model_proto
from podrun.serving.convert.frontends import write_model
from podrun.serving.convert.structure_passes import true_inputs
from podrun.serving.convert.tools import topological_sort
from podrun.serving.convert.type_inference import infer_types
from podrun.serving.poprt_words import SeveralWords, listed, pairs_of
from podrun.serving.sessions import ModelSession, get_session

BACKENDS = click.Choice(["onnxruntime", "poprt", "tensorflow"])
MADE_UP = ("zeros", "ones", "rand")
METHODS: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mse": lambda a, b: float(np.mean(np.square(a - b))),
    "rmse": lambda a, b: float(np.sqrt(np.mean(np.square(a - b)))),
    "mae": lambda a, b: float(np.mean(np.abs(a - b))),
    "mape": lambda a, b: float(np.mean(np.abs((a - b) / np.where(a == 0, np.nan, a))) * 100),
    "r2": lambda a, b: float(1 - np.sum(np.square(a - b)) / np.sum(np.square(a - a.mean()))),
}
"""How two tensors are compared, in float64: the first is the source's."""
_SEED = 2023


def data_of_tensor(name: str, told: str, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Values of a tensor: ``zeros``, ``ones``, ``rand`` (from a fixed seed, 0 to 1), or a file of NumPy's. UsageError
    where they do not fit.
    """
    if told == "rand":
        return np.random.default_rng(_SEED).random(tuple(shape)).astype(dtype)
    if told in MADE_UP:
        return np.full(tuple(shape), MADE_UP.index(told)).astype(dtype)
    path = Path(told)
    if not path.is_file():
        raise NotFoundError(
            f"{name}={told}: there is no file {told!r}",
            hint=f"Name a .npy file, or one of {', '.join(MADE_UP)}.",
        )
    try:
        value = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ConfigError(f"{told} is no array of NumPy: {error}", hint="numpy.save(file, array)") from error
    if not isinstance(value, np.ndarray) or value.size != np.prod(shape, dtype=np.int64):
        raise UsageError(f"{name}={told}: the file does not hold the {list(shape)} of {name!r}")
    return value.reshape(tuple(shape)).astype(dtype)


def with_outputs(model: ModelProto, names: Sequence[str]) -> ModelProto:
    """The model with tensors within it as further outputs."""
    types = infer_types(model)
    known = {value.name for value in model.graph.output}
    for name in names:
        kind = types.get(name)
        if name not in known and kind is not None:
            model.graph.output.append(helper.make_tensor_value_info(name, kind.element, kind.shape))
    return model


def inner_tensors(model: ModelProto) -> list[str]:
    """The tensors that nodes of the main graph make, in order."""
    return [name for node in model.graph.node for name in node.output if name]


def session_of(path: Path, backend: str, outputs: Sequence[str]) -> ModelSession:
    """A model in an engine, with further outputs."""
    if backend == "tensorflow":
        session = get_session(str(path), 1, backend)
        if outputs:
            session.set_output_names(outputs)
        return session
    return get_session(with_outputs(model_proto(path), outputs).SerializeToString(), None, backend)


def compared_names(paths: Sequence[Path], backends: Sequence[str], marked: str | None) -> list[str]:
    """Tensors within both models that ``--mark_outputs`` asks for. UsageError for one that is not in both."""
    if marked is None:
        return []
    if "tensorflow" in backends:
        return listed(marked)
    there = [inner_tensors(model_proto(path)) for path in paths]
    common = [name for name in there[0] if name in there[1]]
    if marked == "all":
        return common
    for name in listed(marked):
        if name not in common:
            raise UsageError(
                f"tensor {name!r} is not in both models", hint="--mark_outputs all takes all that are."
            )
    return listed(marked)


@click.group("model_debugger.py", context_settings=HELP_OPTIONS)
def debugger_command() -> None:
    """Find out where numbers of a model differ, and what is in it."""


@debugger_command.command(
    "compare",
    cls=SeveralWords,
    several=("--input_data", "--mark_io_mapping"),
    context_settings=HELP_OPTIONS,
)
@click.option("--src_model", "--model", "source", required=True, type=click.Path(path_type=Path))
@click.option("--src_backend", default="onnxruntime", show_default=True, type=BACKENDS)
@click.option("--dst_model", "other", type=click.Path(path_type=Path), help="[the source]")
@click.option("--dst_backend", default="poprt", show_default=True, type=BACKENDS)
@click.option("--compare_method", default="mse", show_default=True, help="mse,rmse,mae,mape,r2")
@click.option(
    "--input_data", multiple=True, metavar="NAME=DATA", help="zeros, ones, rand or a .npy file [rand]."
)
@click.option("--mark_outputs", metavar="NAME,NAME|all", help="Tensors within both models.")
@click.option("--mark_io_mapping", multiple=True, metavar="NAME=NAME", help="Names of the one in the other.")
@click.option("--dump_data", is_flag=True, help="Write the tensors.")
@click.option(
    "--dump_dir", type=click.Path(path_type=Path), default=Path("compare_output"), show_default=True
)
def compare_verb(
    source: Path,
    src_backend: str,
    other: Path | None,
    dst_backend: str,
    compare_method: str,
    **options: object,
) -> int:
    """Run two models on the same data and tell how far their outputs are apart."""
    methods = listed(compare_method)
    if unknown := [name for name in methods if name not in METHODS]:
        raise UsageError(
            f"--compare_method: there is no {unknown[0]!r}", hint=f"There are {', '.join(METHODS)}."
        )
    mapping = pairs_of(_words(options["mark_io_mapping"]), "--mark_io_mapping")
    marked = options["mark_outputs"]
    paths, backends = (source, other or source), (src_backend, dst_backend)
    names = compared_names(paths, backends, str(marked) if marked else None)
    wanted = (names or [*mapping], names or [*mapping.values()])
    sessions = [session_of(*three) for three in zip(paths, backends, wanted, strict=True)]
    data = pairs_of(_words(options["input_data"]), "--input_data")
    pairs = outputs_side_by_side(sessions, data, mapping)
    for (name, partner), (first, second) in pairs.items():
        _dump(options, {f"{name}_src": first, f"{partner}_dst": second})
        click.echo(f"{name} - shape: {first.shape}")
        if first.shape != second.shape:
            click.echo(f"    {partner} has shape {second.shape}: not compared")
            continue
        for method in methods:
            diff = METHODS[method](first.astype(np.float64), second.astype(np.float64))
            click.echo(f"    {method} - diff: {diff}")
    return 0


def outputs_side_by_side(
    sessions: Sequence[ModelSession], data: Mapping[str, str], mapping: Mapping[str, str]
) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """Outputs of two models on the same inputs, by their names in both. UsageError where they have none in common."""
    (inputs, outputs), (other_inputs, other_outputs) = (session.get_io_info() for session in sessions)
    if unknown := sorted(data.keys() - inputs.keys()):
        raise UsageError(
            f"--input_data: there is no input {unknown[0]!r}", hint=f"There are {', '.join(inputs)}."
        )
    feeds = {n: data_of_tensor(n, data.get(n, "rand"), s, d) for n, (s, d) in inputs.items()}
    partners = {name: mapping.get(name, name) for name in outputs}
    pairs = [(name, partner) for name, partner in partners.items() if partner in other_outputs]
    if not pairs:
        raise UsageError(
            "the models have no outputs in common",
            hint=f"Say which belong together: --mark_io_mapping {next(iter(outputs))}={next(iter(other_outputs))}",
        )
    theirs = {mapping.get(name, name): value for name, value in feeds.items()}
    cast = {n: v.astype(other_inputs[n][1]) for n, v in theirs.items() if n in other_inputs}
    first = sessions[0].run([name for name, _ in pairs], feeds)
    second = sessions[1].run([partner for _, partner in pairs], cast)
    return dict(zip(pairs, zip(first, second, strict=True), strict=True))


def _words(told: object) -> tuple[str, ...]:
    return tuple(map(str, told)) if isinstance(told, (list, tuple)) else ()


def _dump(options: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    if not options["dump_data"]:
        return
    folder = Path(str(options["dump_dir"]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in arrays.items():
            np.save(folder / f"{name.replace('/', '_')}.npy", value)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written to: {error.strerror or error}", hint="--dump_dir"
        ) from error


@debugger_command.command(
    "modify", cls=SeveralWords, several=("--update", "--extract"), context_settings=HELP_OPTIONS
)
@click.option("--src_model", "--model", "source", required=True, type=click.Path(path_type=Path))
@click.option(
    "--update", multiple=True, metavar="NAME=DATA", help="New values of weights, or of inputs that go."
)
@click.option("--extract", multiple=True, metavar="KEY=NAMES", help="input_names=a,b output_names=c")
@click.option("--sort", is_flag=True, help="Sort the nodes.")
@click.option("--output_model", "target", type=click.Path(path_type=Path), help="[<input>.updated.onnx]")
def modify_verb(
    source: Path, update: tuple[str, ...], extract: tuple[str, ...], sort: bool, target: Path | None
) -> int:
    """Change a model: new values, a part of it, its nodes sorted."""
    chosen = [name for name, told in (("--update", update), ("--extract", extract), ("--sort", sort)) if told]
    if len(chosen) != 1:
        raise UsageError(
            f"modify does one thing, not {' and '.join(chosen) or 'none'}",
            hint="--update, --extract or --sort",
        )
    model = read_onnx_model(source) if sort else model_proto(source)  # One that is not sorted is not valid.
    if update:
        updated(model, pairs_of(update, "--update"))
    elif extract:
        model = extracted(model, pairs_of(extract, "--extract"))
    else:
        topological_sort(model.graph)
    path = write_model(model, target or source.with_name(f"{source.name}.updated.onnx"))
    click.echo(f"wrote {path}")
    return 0


def updated(model: ModelProto, values: Mapping[str, str]) -> None:
    """Give weights new values, and make inputs weights with values. UsageError for a name that is neither."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    inputs = true_inputs(model)
    for name, told in values.items():
        if name in weights:
            dtype = helper.tensor_dtype_to_np_dtype(weights[name].data_type)
            value = data_of_tensor(name, told, list(weights[name].dims), dtype)
            weights[name].CopyFrom(numpy_helper.from_array(value, name))
        elif name in inputs:
            kind = inputs[name].type.tensor_type
            shape = [size.dim_value for size in kind.shape.dim]
            value = data_of_tensor(name, told, shape, helper.tensor_dtype_to_np_dtype(kind.elem_type))
            model.graph.initializer.append(numpy_helper.from_array(value, name))
            model.graph.input.remove(inputs[name])
        else:
            raise UsageError(
                f"--update: the model has no weight or input {name!r}", hint="print shows its names."
            )


def extracted(model: ModelProto, ends: Mapping[str, str]) -> ModelProto:
    """The part of a model between ``input_names`` and ``output_names``. UsageError for tensors that do not exist."""
    if ends.keys() != {"input_names", "output_names"}:
        raise UsageError(
            f"--extract takes input_names and output_names, not {', '.join(sorted(ends))}",
            hint="--extract input_names=a,b output_names=c",
        )
    types = infer_types(model)
    names = [listed(ends[key]) for key in ("input_names", "output_names")]
    for name in (*names[0], *names[1]):
        if name not in types:
            raise UsageError(
                f"--extract: the model has no tensor {name!r}", hint="print --level node shows names."
            )
    stated = {value.name for value in (*model.graph.value_info, *model.graph.input, *model.graph.output)}
    for name, kind in types.items():
        if name not in stated:
            model.graph.value_info.append(helper.make_tensor_value_info(name, kind.element, kind.shape))
    part: ModelProto = onnx.utils.Extractor(model).extract_model(*names)
    return part


@debugger_command.command("print", context_settings=HELP_OPTIONS)
@click.option("--src_model", "--model", "source", required=True, type=click.Path(path_type=Path))
@click.option(
    "--level", type=click.Choice(["model", "graph", "node", "tensor"]), default="model", show_default=True
)
@click.option("--name", "pattern", default=None, help="Nodes, else tensors, whose name matches.")
def print_verb(source: Path, level: str, pattern: str | None) -> int:
    """Print what is in a model."""
    model = model_proto(source)
    if pattern is not None:
        click.echo("\n".join(_matching(model, pattern)))
    elif level == "model":
        click.echo("\n".join(_head_lines(model)))
    else:
        lines = [line for node in model.graph.node for line in node_lines(model, node, level)]
        click.echo("\n".join(["Model graph:", *lines]))
    return 0


def _head_lines(model: ModelProto) -> list[str]:
    lines = [
        "Model metadata:",
        f"  IR version: {model.ir_version}",
        f"  Producer name: {model.producer_name}",
    ]
    lines += [f"  Producer version: {model.producer_version}", f"  Model version: {model.model_version}"]
    for what, values in (("inputs", true_inputs(model).values()), ("outputs", model.graph.output)):
        lines += [f"Model {what}:", *(line for value in values for line in tensor_lines(value, ""))]
    return lines


def tensor_lines(value: ValueInfoProto | TensorProto, indent: str) -> list[str]:
    """Name, shape and type of a tensor, as lines."""
    if isinstance(value, TensorProto):
        shape, element = list(value.dims), value.data_type
    else:
        kind = value.type.tensor_type
        shape, element = [size.dim_value for size in kind.shape.dim], kind.elem_type
    dtype = helper.tensor_dtype_to_np_dtype(element).name if element else "unknown"
    lines = (f"  Name: {value.name}", f"    Shape: {shape}", f"    Data type: {dtype}")
    return [indent + line for line in lines]


def node_lines(model: ModelProto, node: NodeProto, level: str) -> list[str]:
    """A node as lines: its name; with ``node`` its ends and attributes; with ``tensor`` also what these are."""
    lines = [f"  Node: {node.name}"]
    if level == "graph":
        return lines
    known: dict[str, ValueInfoProto | TensorProto]
    known = {v.name: v for v in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
    known |= {tensor.name: tensor for tensor in model.graph.initializer}
    for what, names in (("Inputs", node.input), ("Outputs", node.output)):
        lines.append(f"    {what}: {list(names)}")
        if level == "tensor":
            lines += [line for n in names if n in known for line in tensor_lines(known[n], "    ")]
    lines += [f"    Op type: {node.op_type}", "    Attributes:"]
    return [*lines, *(f"      {one.name}: {helper.get_attribute_value(one)}" for one in node.attribute)]


def _matching(model: ModelProto, pattern: str) -> list[str]:
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"--name: {pattern!r} is no pattern: {error}", hint="As in --name MatMul.*"
        ) from error
    nodes = [node for node in model.graph.node if wanted.search(node.name)]
    if nodes:
        return [line for node in nodes for line in node_lines(model, node, "tensor")]
    values: list[ValueInfoProto | TensorProto] = [
        *model.graph.input,
        *model.graph.output,
        *model.graph.value_info,
        *model.graph.initializer,
    ]
    lines: list[str] = []
    for value in (value for value in values if wanted.search(value.name)):
        lines += tensor_lines(value, "")
        if isinstance(value, TensorProto) and value.name == pattern:
            lines.append(f"    Value: {numpy_helper.to_array(value)}")
    if not lines:
        raise UsageError(
            f"no node or tensor of the model matches {pattern!r}", hint="print --level node shows names."
        )
    return lines
