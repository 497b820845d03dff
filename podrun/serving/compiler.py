"""From an ONNX model to one compiled file: `Compiler`, its options, and the `ServedModel` that it gives.

    executable = Compiler.compile("model.onnx", ["y"], CompilerOptions(num_ipus=1))
    Compiler.compile_and_export("model.onnx", ["y"], "executable.popef", CompilerOptions())

The model is compiled as PopART's InferenceSession compiles it, for a device that need not be there. Options are those
of `podrun.serving.compiler_options`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.errors import ConfigError, UsageError
from podrun.onnx_models.annotations import HOST_CONCAT_KEY
from podrun.popef.metadata import PopefMetadata
from podrun.popef.reader import PopefReader
from podrun.serving.compiler_options import CompilerOptions as CompilerOptions

if TYPE_CHECKING:
    import numpy as np
    from onnx import GraphProto, ModelProto

    from podrun.core.executable import Executable
    from podrun.popart.options.session_options import SessionOptions
    from podrun.popart.sessions.session import InferenceSession

    ModelSource = ModelProto | bytes | str | os.PathLike[str]

GRAPHCORE = "ai.graphcore"
"""The domain of PopART's and PopRT's own operators."""
_PRODUCTS = ("MatMul", "Conv", "Gemm", "ConvTranspose")
"""Operators that the memory proportion is for."""
_GRAPH_MODES = {"off": "Off", "manual": "Manual", "automatic": "Auto"}
"""Values of ``virtual_graph_mode``, with PopART's names."""


class ServedModel:
    """A compiled model, read from a PopEF file or from its bytes. ConfigError for a file that is none, or that holds a
    training program.
    """

    def __init__(self, source: str | bytes | os.PathLike[str]) -> None:
        self.reader = PopefReader()
        if isinstance(source, bytes):
            self.reader.parseBytes(source)
        else:
            self.reader.parseFile(source)
        self.label = "the compiled model" if isinstance(source, bytes) else os.fspath(source)
        self._written = None if isinstance(source, bytes) else _written(source)
        described = self.reader.metadata()
        if len(described) != 1:
            raise UsageError(f"{self.label} describes {len(described)} programs; a server takes one")
        self.metadata: PopefMetadata = described[0]
        if not self.metadata.isInference:
            raise UsageError(f"{self.label} holds a training program", hint="Compile an InferenceSession.")

    def check_unchanged(self) -> None:
        """ConfigError if the file was written to since it was read: its weights are mapped, not copied."""
        if self._written is not None and _written(self.label) != self._written:
            raise ConfigError(
                f"{self.label} was changed while it was in use: load the model again",
                hint="Write a new version's folder, or move a whole file into place.",
            )

    def program(self) -> Executable:
        """The compiled program."""
        return self.reader.executables()[0].program()

    def variables(self) -> dict[str, np.ndarray]:
        """Weights and other values that a run starts with, as they lie in the file."""
        return {tensor.name: tensor.data() for tensor in self.reader.tensors()}


def _written(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """What tells one state of a file from another; None for a file that is gone."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


class Compiler:
    """Compiles ONNX models to files. All methods are static; ``model`` is a path, bytes or a ModelProto, ``outputs``
    are the tensors that come back (None: the model's outputs).
    """

    @staticmethod
    def compile(
        model: ModelSource, outputs: Sequence[str] | None = None, options: CompilerOptions | None = None
    ) -> ServedModel:
        """The compiled model. OutOfMemoryException, a RuntimeError, if it does not fit the tiles."""
        with tempfile.TemporaryDirectory(prefix="podrun-") as folder:
            path = Path(folder, "executable.popef")
            Compiler.compile_and_export(model, outputs, path, options)
            return ServedModel(path.read_bytes())

    @staticmethod
    def compile_and_export(
        model: ModelSource,
        outputs: Sequence[str] | None,
        filename: str | os.PathLike[str],
        options: CompilerOptions | None = None,
    ) -> None:
        """Compile, and write the file (``executable.popef`` in a folder)."""
        from podrun.runtime.executable_files import check_writable, in_folder

        path = check_writable(os.fspath(filename))
        chosen = options or CompilerOptions()
        proto = model_proto(model)
        session = _session(proto, outputs, chosen)
        report = chosen.compilation_progress_logger or (lambda step, total: None)
        report(0, 100)
        session.prepareDevice(loadEngine=False)
        report(100, 100)
        blobs = {
            entry.key: entry.value.encode() for entry in proto.metadata_props if entry.key == HOST_CONCAT_KEY
        }
        session.parts.files.save(in_folder(path, "executable.popef"), blobs=blobs | dict(chosen.opaque_blobs))
        for line in tile_mapping_lines(proto, chosen):
            sys.stderr.write(line + "\n")
        if chosen.serialize_ir:
            write_ir(proto, chosen.serialized_ir_dest)

    @staticmethod
    def compile_and_get_summary_report(
        model: ModelSource,
        outputs: Sequence[str] | None = None,
        options: CompilerOptions | None = None,
        reset_profile: bool = True,
    ) -> str:
        """The tile model's report as text."""
        session = _session(model, outputs, options or CompilerOptions())
        session.prepareDevice(loadEngine=False)
        return session.getSummaryReport(reset_profile)


def _session(model: ModelSource, outputs: Sequence[str] | None, options: CompilerOptions) -> InferenceSession:
    """A session for an offline device."""
    from podrun import popart

    proto = model_proto(model)
    named = [value.name for value in proto.graph.output]
    if outputs is None:
        outputs = named
    elif missing := [name for name in outputs if name not in named]:
        raise UsageError(f"the model has no output {missing[0]!r}; it has {', '.join(named)}")
    options.check()
    _annotate(proto, options)
    version = options.ipu_version or "ipu2"
    device = popart.DeviceManager().createOfflineIPUDevice(
        {"numIPUs": options.num_ipus, "ipuVersion": version}
    )
    kind = popart.AnchorReturnType("All")
    if options.num_io_tiles:
        overlap = popart.ExchangeStrategy.OverlapInnerLoop
        kind = popart.AnchorReturnType("All", tileSet=popart.TileSet.IO, exchangeStrategy=overlap)
        overlap_inputs(proto)
    flow = popart.DataFlow(options.batches_per_step, dict.fromkeys(outputs, kind))
    return popart.InferenceSession(
        proto.SerializeToString(),
        flow,
        device,
        userOptions=_session_options(options),
        patterns=_patterns(options),
    )


def overlap_inputs(proto: ModelProto) -> None:
    """Let all inputs of a model move through I/O tiles while it computes."""
    from podrun.onnx_models.annotations import TRANSFERS_KEY

    held = {tensor.name for tensor in proto.graph.initializer}
    names = [value.name for value in proto.graph.input if value.name not in held]
    for index in reversed([i for i, e in enumerate(proto.metadata_props) if e.key == TRANSFERS_KEY]):
        del proto.metadata_props[index]
    proto.metadata_props.add(key=TRANSFERS_KEY, value=json.dumps(dict.fromkeys(names, "OverlapInnerLoop")))


def write_ir(proto: ModelProto, path: str) -> None:
    """Write a model's graphs as JSON: name -> operators, each with its ``type``, name, inputs and outputs."""
    graphs = {}
    for graph in _graphs_of(proto.graph):
        graphs[graph.name or "main"] = [
            {"type": n.op_type, "domain": n.domain or "ai.onnx", "name": n.name,
             "inputs": list(n.input), "outputs": list(n.output)}
            for n in graph.node
        ]  # fmt: skip
    Path(path or "ir.json").write_text(json.dumps(graphs, indent=1) + "\n", encoding="utf-8")


def tile_mapping_lines(proto: ModelProto, options: CompilerOptions) -> list[str]:
    """What PrintTileMapping tells of tensors as a model is compiled: how many elements lie on how many tiles.

    The tile model takes all tensors as spread evenly over an IPU's tiles, so that is what is told.
    """
    from podrun.costmodel.target import chip

    nodes = [n for graph in _graphs_of(proto.graph) for n in graph.node if n.op_type == "PrintTileMapping"]
    if not nodes:
        return []
    from podrun.serving.convert.type_inference import infer_types

    tiles = chip("c600" if options.ipu_version == "ipu21" else "gc200").tiles
    types = infer_types(proto)
    lines = []
    for node in nodes:
        kind = types.get(node.input[0])
        count = math.prod(kind.sizes) if kind is not None and kind.sizes is not None else None
        told = "of unknown size" if count is None else _spread(count, tiles)
        lines.append(f"PrintTileMapping {node.input[0]}: {told}")
    return lines


def _spread(count: int, tiles: int) -> str:
    most = -(-count // tiles)
    used = -(-count // most) if count else 0
    return f"{count} elements on {used} of {tiles} tiles, at most {most} on one (modelled: spread evenly)"


def _graphs_of(graph: GraphProto) -> list[GraphProto]:
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [graph, *(deeper for one in inner for deeper in _graphs_of(one))]


def _patterns(options: CompilerOptions) -> Any:
    from podrun import popart

    patterns = popart.Patterns(popart.PatternsLevel.Default)
    for name, enabled in options.patterns().items():
        patterns.enablePattern(name, enabled)
    return patterns


def model_proto(model: object) -> ModelProto:
    """The model of a path, of bytes, or a copy of a ModelProto. UsageError for anything else.

    Models with operators of ai.graphcore need not import that domain: PopRT's examples do not.
    """
    import onnx

    from podrun.onnx_models.model_loader import check_onnx_model, read_onnx_model

    if isinstance(model, onnx.ModelProto):
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        _import_graphcore(copied)
        return copied
    if not isinstance(model, (bytes, str, os.PathLike)):
        raise UsageError(f"a model is a path, bytes or a ModelProto, not {type(model).__name__}")
    proto = read_onnx_model(model)
    _import_graphcore(proto)
    check_onnx_model(proto)
    return proto


def _import_graphcore(proto: ModelProto) -> None:
    used = {node.domain for graph in _graphs_of(proto.graph) for node in graph.node}
    if GRAPHCORE in used and all(entry.domain != GRAPHCORE for entry in proto.opset_import):
        proto.opset_import.add(domain=GRAPHCORE, version=1)


def _annotate(proto: ModelProto, options: CompilerOptions) -> None:
    """Put the memory proportion on products that have none of their own."""
    from onnx import helper

    from podrun.onnx_models.annotations import AVAILABLE_MEMORY

    share = options.available_memory_proportion
    if not 0 < share <= 1:
        raise UsageError(f"available_memory_proportion is above 0 and at most 1, not {share}")
    for node in proto.graph.node:
        if node.op_type in _PRODUCTS and all(a.name != AVAILABLE_MEMORY for a in node.attribute):
            node.attribute.append(helper.make_attribute(AVAILABLE_MEMORY, float(share)))


def _session_options(options: CompilerOptions) -> SessionOptions:
    from podrun import popart

    session = popart.SessionOptions()
    session.partialsTypeMatMuls = options.partials_type
    session.convolutionOptions = {"partialsType": options.partials_type}
    session.numIOTiles = options.num_io_tiles
    session.constantWeights = options.constant_weights
    session.enableOutlining = options.enable_outlining
    session.enablePipelining = options.enable_pipelining
    mode = options.virtual_graph_mode
    if not isinstance(mode, str) or mode not in _GRAPH_MODES:
        raise UsageError(
            f"there is no virtual_graph_mode {mode!r}", hint=f"The modes are {', '.join(_GRAPH_MODES)}."
        )
    session.virtualGraphMode = popart.VirtualGraphMode[_GRAPH_MODES[mode]]
    session.virtualGraphSplitRatios = list(options.virtual_graph_split_ratios)
    session.engineOptions = dict(options.engine_options)
    if options.enable_engine_caching:
        session.enableEngineCaching, session.cachePath = True, options.cache_path
    for name, value in options.popart_options.items():
        setattr(session, name, value)
    return session
