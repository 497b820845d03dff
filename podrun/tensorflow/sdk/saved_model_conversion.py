"""SavedModels for IPUs: conversion as a call and as a command, and running what was converted.

`create_parser` has the commands ``convert ... ipu`` and ``run`` of the SDK's ``ipu_saved_model_cli``; ``show`` and
``scan`` are those of TensorFlow's ``saved_model_cli``.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from podrun.private_apis.tensorflow import private_module, symbol
from podrun.tensorflow.sdk.config import IPUConfig
from podrun.tensorflow.sdk.conversion_params import IpuConversionParams, check_conversion_params
from podrun.tensorflow.sdk.graph_converters import ConverterPipeline

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef

_FILE = "saved_model.pb"
_SERVE = "serve"
_SIGNATURE = "serving_default"


class IpuGraphConverter:
    """Converts one signature of a SavedModel, with its variables as constants. ValueError for a source that is missing,
    or of which there are two.
    """

    def __init__(
        self,
        input_saved_model_dir: str | None = None,
        input_saved_model_tags: Sequence[str] | None = None,
        input_saved_model_signature_key: str | None = None,
        input_meta_graph_def: MetaGraphDef | None = None,
        input_sess: tf.compat.v1.Session | None = None,
        conversion_params: IpuConversionParams | None = None,
        output_saved_model_dir: str | None = None,
    ) -> None:
        if input_meta_graph_def and input_saved_model_dir:
            raise ValueError("Can only specify one of input_meta_graph_def and input_saved_model_dir.")
        if not input_meta_graph_def and not input_saved_model_dir:
            raise ValueError("Must specify one of input_meta_graph_def and input_saved_model_dir.")
        if input_meta_graph_def and not input_sess:
            raise ValueError("Must specify input_sess when specify input_meta_graph_def.")
        self._params = IpuConversionParams() if conversion_params is None else conversion_params
        check_conversion_params(self._params)
        self._folder, self._meta_graph, self._session = (
            input_saved_model_dir, input_meta_graph_def, input_sess,
        )  # fmt: skip
        self._tags = list(input_saved_model_tags or [_SERVE])
        self._key = input_saved_model_signature_key or _SIGNATURE
        self._converted: tuple[GraphDef, Any] | None = None

    def convert(self) -> GraphDef:
        """The converted graph. RuntimeError the second time; KeyError for a signature that the model does not have."""
        if self._converted is not None:
            raise RuntimeError("The model can't be converted multiple times.")
        if self._meta_graph is None:
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                meta_graph = tf.compat.v1.saved_model.load(session, self._tags, self._folder)
                frozen = self._frozen(session, meta_graph)
        else:
            meta_graph, frozen = self._meta_graph, self._frozen(self._session, self._meta_graph)
        signature = meta_graph.signature_def[self._key]
        pipeline = ConverterPipeline(self._params, self._key)
        self._converted = pipeline.ApplyConverters(frozen, signature)
        return self._converted[0]

    def _frozen(self, session: tf.compat.v1.Session, meta_graph: MetaGraphDef) -> GraphDef:
        if self._key not in meta_graph.signature_def:
            raise KeyError(
                f"the model has no signature {self._key!r}, but {', '.join(map(repr, meta_graph.signature_def))}"
            )
        outputs = meta_graph.signature_def[self._key].outputs.values()
        names = [tensor.name.split(":")[0] for tensor in outputs]
        graph_def = session.graph.as_graph_def(add_shapes=True)
        frozen = tf.compat.v1.graph_util.convert_variables_to_constants(session, graph_def, names)
        return without_calls(frozen, names)

    def save(self, output_saved_model_dir: str) -> None:
        """Write the converted graph as a SavedModel, with ``conversion_params.json`` and ``ipu_cfg.json`` beside it."""
        if self._converted is None:
            raise RuntimeError("Convert the model before it is saved: converter.convert().")
        graph_def, signature = self._converted
        builder = tf.compat.v1.saved_model.builder.SavedModelBuilder(output_saved_model_dir)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.graph_util.import_graph_def(graph_def, name="")
            builder.add_meta_graph_and_variables(
                session, self._tags, signature_def_map={self._key: signature}
            )
        builder.save()
        path = Path(output_saved_model_dir, _FILE)
        kind = private_module("saved_model.loader_impl").saved_model_pb2.SavedModel
        model = kind.FromString(path.read_bytes())
        model.meta_graphs[0].graph_def.CopyFrom(graph_def)  # As it is: a session's graph names no IPUs.
        path.write_bytes(model.SerializeToString())
        self._params.pb_md5sum = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        self._params.save_to_json_file(output_saved_model_dir)
        Path(output_saved_model_dir, "ipu_cfg.json").write_text(
            _config(_memory_options(self._params)).to_json(), encoding="utf-8"
        )


def without_calls(graph_def: GraphDef, outputs: Sequence[str]) -> GraphDef:
    """The graph with the functions that it calls in the place of their calls, as models of TensorFlow 2 have them: the
    converters see the nodes of a graph. Functions of branches and loops stay.
    """
    if not graph_def.library.function:
        return graph_def
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
        meta_graph = tf.compat.v1.train.export_meta_graph(graph=graph, graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(outputs)
    for nodes in (meta_graph.graph_def.node, *(f.node_def for f in meta_graph.graph_def.library.function)):
        for node in nodes:
            if node.op in _BRANCHES_AND_LOOPS:
                node.attr["_lower_using_switch_merge"].b = False
    config = tf.compat.v1.ConfigProto()
    rewriting = config.graph_options.rewrite_options
    rewriting.min_graph_nodes = -1  # Small graphs as well.
    rewriting.optimizers.append("function")
    inlined: GraphDef = symbol("grappler.tf_optimizer.OptimizeGraph")(config, meta_graph)
    for node in inlined.node:
        node.attr.pop("_class", None)  # Beside its reader in a function, wherever that is placed.
    return inlined


_BRANCHES_AND_LOOPS = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")


def _memory_options(params: IpuConversionParams) -> dict[str, Any]:
    """The options of a configuration that parameters have."""
    names = ("num_ipus", "matmul_amp", "conv_amp", "matmul_partial_type", "conv_partial_type")
    return {name: getattr(params, name) for name in names}


def _config(options: Mapping[str, Any]) -> IPUConfig:
    config = IPUConfig()
    config.auto_select_ipus = options["num_ipus"]
    for category, short in (("matmuls", "matmul"), ("convolutions", "conv")):
        getattr(config, category).poplar_options = {
            "availableMemoryProportion": str(options[f"{short}_amp"]),
            "partialsType": options[f"{short}_partial_type"],
        }
    return config


def create_inference_graph(
    batch_size: int = 1,
    input_saved_model_dir: str | None = None,
    input_saved_model_tags: Sequence[str] | None = None,
    input_saved_model_signature_key: str | None = None,
    output_saved_model_dir: str | None = None,
    config_file: str | None = None,
    **options: Any,
) -> GraphDef:
    """Convert a SavedModel, and save it in ``output_saved_model_dir``. ``options``: those of `IpuConversionParams`;
    what a JSON file ``config_file`` says goes before them.
    """
    params = IpuConversionParams(batch_size=batch_size, **options)
    if config_file:
        params.load_from_json_file(config_file)
    converter = IpuGraphConverter(
        input_saved_model_dir,
        input_saved_model_tags,
        input_saved_model_signature_key,
        conversion_params=params,
        output_saved_model_dir=output_saved_model_dir,
    )
    graph_def = converter.convert()
    if output_saved_model_dir:
        converter.save(output_saved_model_dir)
    return graph_def


def run_signature(args: argparse.Namespace) -> None:
    """The command ``run``: feed arrays to a signature, print or write its results. AttributeError without inputs."""
    if not (args.inputs or args.input_exprs or args.input_examples):
        raise AttributeError("At least one of --inputs, --input_exprs or --input_examples must be required")
    if args.init_ipu:
        print("Initializing IPU System ...")
        _config(vars(args)).configure_ipu_system()
    tool = private_module("tools.saved_model_cli")
    fed = tool.load_inputs_from_input_arg_string(args.inputs, "", args.input_examples)
    fed |= tool.preprocess_input_exprs_arg_string(
        args.input_exprs, safe=False
    )  # The user's own: ``x=np.ones(2)``.
    tool.run_saved_model_with_feed_dict(
        args.dir, args.tag_set, args.signature_def, fed, args.outdir, args.overwrite,
        worker=args.worker, tf_debug=args.tf_debug,
    )  # fmt: skip


def convert_with_ipu(args: argparse.Namespace) -> None:
    """The command ``convert ... ipu``."""
    create_inference_graph(
        batch_size=args.batch_size,
        input_saved_model_dir=args.dir,
        input_saved_model_tags=args.tag_set.split(","),
        output_saved_model_dir=args.output_dir,
        config_file=args.config_file,
        ipu_placement=not args.no_ipu_placement,
        **{name: getattr(args, name) for name in _SAME_NAMES},
    )


_SAME_NAMES = (
    "excluded_nodes", "num_ipus", "batch_per_step", "matmul_amp", "conv_amp", "matmul_partial_type",
    "conv_partial_type", "precision_mode", "remove_excluded_nodes", "merge_subgraphs", "gelu_replacement",
    "manual_sharding", "precision_conversion_excluded_nodes", "int64_to_int32_conversion",
    "embedded_runtime_save_config", "pipeline_cfg",
)  # fmt: skip


def _gelu(text: str) -> Any:
    """The nodes of gelu, alone or under their name."""
    value = json.loads(text)
    return value.get("gelu_replacement", value) if isinstance(value, dict) else value


def _add_memory_options(parser: argparse.ArgumentParser, kind: type) -> None:
    parser.add_argument("--num_ipus", type=int, default=1, help="number of IPUs")
    for short, of in (("matmul", "matrix products"), ("conv", "convolutions")):
        parser.add_argument(
            f"--{short}_amp", type=kind, default=kind(0.6), help=f"available memory proportion of {of}"
        )
        parser.add_argument(
            f"--{short}_partial_type", default="float", help=f"type of partial sums of {of}: float or half"
        )


def create_parser() -> argparse.ArgumentParser:
    """The parser of the commands, whose results have the function of the command as ``func``."""
    parser = argparse.ArgumentParser(description="ipu_saved_model_cli: SavedModels on IPUs")
    commands = parser.add_subparsers(title="commands")
    running = commands.add_parser("run", help="run a signature of a SavedModel")
    for name in ("dir", "tag_set", "signature_def"):
        running.add_argument(f"--{name}", required=True)
    for name in ("inputs", "input_exprs", "input_examples"):
        running.add_argument(f"--{name}", default="", help="values, as for TensorFlow's saved_model_cli")
    running.add_argument("--outdir", help="folder for the results, one .npy each")
    running.add_argument("--worker", help="target of the session")
    for name in ("overwrite", "tf_debug", "init_ipu"):
        running.add_argument(f"--{name}", action="store_true")
    _add_memory_options(running, str)
    running.set_defaults(func=run_signature)
    converting = commands.add_parser("convert", help="convert a SavedModel")
    for name in ("dir", "output_dir", "tag_set"):
        converting.add_argument(f"--{name}", required=True)
    _add_conversion(converting.add_subparsers(title="conversion methods", required=True).add_parser("ipu"))
    return parser


def _add_conversion(parser: argparse.ArgumentParser) -> None:
    for name in ("excluded_nodes", "precision_conversion_excluded_nodes"):
        parser.add_argument(f"--{name}", nargs="+", default=[], help="patterns of names of nodes")
    _add_memory_options(parser, float)
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--batch_per_step", type=int, default=0)
    parser.add_argument("--precision_mode", help="FP16 or FP32")
    for name in (
        "no_ipu_placement", "int64_to_int32_conversion", "remove_excluded_nodes", "merge_subgraphs",
    ):  # fmt: skip
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--manual_sharding",
        type=ast.literal_eval,
        default=[],
        help="for each IPU a list of patterns of names",
    )
    parser.add_argument("--gelu_replacement", type=_gelu, help="JSON: the nodes that compute gelu")
    for name in ("embedded_runtime_save_config", "pipeline_cfg"):
        parser.add_argument(f"--{name}", type=json.loads, help="JSON; refused: use ipu.serving")
    parser.add_argument("--config_file", help="a JSON file with these options")
    parser.set_defaults(func=convert_with_ipu)


def saved_model_command(arguments: Sequence[str] | None = None) -> None:
    """The command ``ipu_saved_model_cli``."""
    parser = create_parser()
    args = parser.parse_args(arguments)
    if not hasattr(args, "func"):
        parser.error("too few arguments")
    args.func(args)
