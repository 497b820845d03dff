"""From an ONNX model to one compiled file: `Compiler`, its options, and the `ServedModel` that it gives.

    executable = Compiler.compile("model.onnx", ["y"], CompilerOptions(num_ipus=1))
    Compiler.compile_and_export("model.onnx", ["y"], "executable.popef", CompilerOptions())

The model is compiled as PopART's InferenceSession compiles it, for a device that need not be there. Options have the
names and defaults of the SDK's compiler. Those that would change nothing here are accepted and do nothing
(`WITHOUT_EFFECT`); others that podrun does not have are refused by name.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.errors import ConfigError, UnsupportedError, UsageError
from podrun.popef.metadata import PopefMetadata
from podrun.popef.reader import PopefReader

if TYPE_CHECKING:
    import numpy as np
    from onnx import ModelProto

    from podrun.core.executable import Executable
    from podrun.popart.session import InferenceSession
    from podrun.popart.session_options import SessionOptions

_PRODUCTS = ("MatMul", "Conv", "Gemm", "ConvTranspose")
"""Operators that the memory proportion is for."""
_GRAPH_MODES = {"off": "Off", "manual": "Manual", "automatic": "Auto"}
"""Values of ``virtual_graph_mode``, with PopART's names."""
WITHOUT_EFFECT = (
    *("enable_prefetch_datastreams", "enable_gather_simplifier", "show_compilation_progress_bar"),
    *("enable_multi_stage_reduce", "rearrange_anchors_on_host", "rearrange_streams_on_host"),
    *("group_host_sync", "enable_non_stable_softmax", "stream_buffering_depth", "outline_threshold"),
    *("time_limit_scheduler", "swap_limit_scheduler", "transitive_closure_optimization_threshold"),
    *("enable_pad_conv_channel", "use_128bit_conv_unit_load", "enable_fast_reduce"),
    *("subgraph_copying_strategy", "create_host_transferable_tensor_with_offset"),
    "enable_efficient_overlap_io_topo_cons",
)
"""Options that change neither numbers nor what is modelled: any value is accepted."""


@dataclass(slots=True)
class CompilerOptions:
    """Options of `Compiler`; names and defaults are the SDK's. ``popart_options``: fields of SessionOptions."""

    num_ipus: int = 1
    ipu_version: str = ""
    batches_per_step: int = 1
    partials_type: str = "half"
    available_memory_proportion: float = 0.6
    num_io_tiles: int = 0
    constant_weights: bool = True
    enable_outlining: bool = True
    enable_pipelining: bool = False
    virtual_graph_mode: str = "off"
    virtual_graph_split_ratios: Sequence[float] = ()
    enable_engine_caching: bool = False
    cache_path: str = ""
    engine_options: Mapping[str, str] = field(default_factory=dict)
    popart_options: Mapping[str, Any] = field(default_factory=dict)
    without_effect: Mapping[str, Any] = field(default_factory=dict)
    """Options of `WITHOUT_EFFECT` that were set."""

    @staticmethod
    def from_dict(options: Mapping[str, Any]) -> CompilerOptions:
        """Options by name. UsageError for a name that does not exist, UnsupportedError for one of the SDK's that podrun
        does not have.
        """
        known = {f.name for f in fields(CompilerOptions)}
        plain = {name: value for name, value in options.items() if name not in WITHOUT_EFFECT}
        for name in plain:
            if name in ("enable_model_fusion", "serialize_ir", "custom_patterns", "opaque_blobs"):
                raise UnsupportedError(f"the compiler option {name!r} is not supported")
            if name not in known:
                raise UsageError(
                    f"there is no compiler option {name!r}",
                    hint=f"The options are {', '.join(sorted(known))}.",
                )
        ignored = {name: value for name, value in options.items() if name in WITHOUT_EFFECT}
        return CompilerOptions(**plain, without_effect=ignored)


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
        """The program."""
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
    """See the module docstring. All methods are static; ``model`` is a path, bytes or a ModelProto, ``outputs`` are the
    tensors that come back (None: the model's outputs).
    """

    @staticmethod
    def compile(
        model: Any, outputs: Sequence[str] | None = None, options: CompilerOptions | None = None
    ) -> ServedModel:
        """The compiled model. OutOfMemoryException, a RuntimeError, if it does not fit the tiles."""
        with tempfile.TemporaryDirectory(prefix="podrun-") as folder:
            path = Path(folder, "executable.popef")
            Compiler.compile_and_export(model, outputs, path, options)
            return ServedModel(path.read_bytes())

    @staticmethod
    def compile_and_export(
        model: Any,
        outputs: Sequence[str] | None,
        filename: str | os.PathLike[str],
        options: CompilerOptions | None = None,
    ) -> None:
        """Compile, and write the file (``executable.popef`` in a folder)."""
        from podrun.runtime.executable_files import check_writable, in_folder

        path = check_writable(os.fspath(filename))
        session = _session(model, outputs, options or CompilerOptions())
        session.prepareDevice(loadEngine=False)
        session.parts.files.save(in_folder(path, "executable.popef"))

    @staticmethod
    def compile_and_get_summary_report(
        model: Any,
        outputs: Sequence[str] | None = None,
        options: CompilerOptions | None = None,
        reset_profile: bool = True,
    ) -> str:
        """The tile model's report as text."""
        session = _session(model, outputs, options or CompilerOptions())
        session.prepareDevice(loadEngine=False)
        return session.getSummaryReport(reset_profile)


def _session(model: Any, outputs: Sequence[str] | None, options: CompilerOptions) -> InferenceSession:
    """A session for an offline device."""
    from podrun import popart

    proto = model_proto(model)
    if outputs is None:
        outputs = [value.name for value in proto.graph.output]
    _annotate(proto, options)
    version = options.ipu_version or "ipu2"
    device = popart.DeviceManager().createOfflineIPUDevice(
        {"numIPUs": options.num_ipus, "ipuVersion": version}
    )
    flow = popart.DataFlow(
        options.batches_per_step, {name: popart.AnchorReturnType("All") for name in outputs}
    )
    return popart.InferenceSession(
        proto.SerializeToString(), flow, device, userOptions=_session_options(options)
    )


def model_proto(model: Any) -> ModelProto:
    """The model of a path, of bytes, or a copy of a ModelProto. UsageError for anything else."""
    import onnx

    from podrun.onnx_models.model_loader import load_model

    if isinstance(model, onnx.ModelProto):
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        return copied
    if not isinstance(model, (bytes, str, os.PathLike)):
        raise UsageError(f"a model is a path, bytes or a ModelProto, not {type(model).__name__}")
    return load_model(model)


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
