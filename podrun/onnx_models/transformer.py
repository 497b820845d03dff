"""GraphTransformer: rewriting ONNX models before a session takes them (types, constants, external data)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.onnx_models import loader
from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.tensor_proto import raw_data, to_array, to_proto
from podrun.session.enums import DataType
from podrun.session.exceptions import popart_exception
from podrun.session.tensor_info import numpy_name, onnx_data_type

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

_TYPE_ATTRIBUTES = {"to", "dtype"}


class GraphTransformer:
    """``t = GraphTransformer(model); t.convertFloatsToHalfs(); model = t.getModelProto()``. Takes a path or
    bytes.
    """

    def __init__(self, modelProtoOrFilename: str | bytes | os.PathLike[str]) -> None:
        self._model = loader.read_model(modelProtoOrFilename)

    def getModelProto(self) -> bytes:
        """The model as it is now."""
        return LightModel(self._model).to_bytes()

    # -- types ------------------------------------------------------------------------------------

    def convertFloatsToHalfs(self) -> None:
        """FLOAT becomes FLOAT16 everywhere. Values beyond its range become infinite, as on the device."""
        self._convert(DataType.FLOAT, DataType.FLOAT16)

    def convertDoublesToFloats(self) -> None:
        """DOUBLE becomes FLOAT."""
        self._convert(DataType.DOUBLE, DataType.FLOAT)

    def convertDoublesToHalfs(self) -> None:
        """DOUBLE becomes FLOAT16."""
        self._convert(DataType.DOUBLE, DataType.FLOAT16)

    def convertBFloats16ToFloat32(self) -> None:
        """BFLOAT16 becomes FLOAT."""
        self._convert(DataType.BFLOAT16, DataType.FLOAT)

    def convertINT8ToINT32(self) -> None:
        """INT8 becomes INT32."""
        self._convert(DataType.INT8, DataType.INT32)

    def convertUINT8ToINT32(self) -> None:
        """UINT8 becomes INT32."""
        self._convert(DataType.UINT8, DataType.INT32)

    def convertINT16ToINT32(self) -> None:
        """INT16 becomes INT32."""
        self._convert(DataType.INT16, DataType.INT32)

    def convertUINT16ToINT32(self) -> None:
        """UINT16 becomes INT32."""
        self._convert(DataType.UINT16, DataType.INT32)

    def convertINT64ToINT32(self, clip: bool = False) -> None:
        """INT64 becomes INT32. popart_exception for a value that does not fit, unless ``clip``."""
        self._convert(DataType.INT64, DataType.INT32, clip=clip)

    def _convert(self, old: DataType, new: DataType, *, clip: bool = False) -> None:
        from onnx import numpy_helper

        before, after = onnx_data_type(old), onnx_data_type(new)
        target = np.dtype(numpy_name(new))

        def tensor(proto: TensorProto) -> None:
            if proto.data_type == before:
                array = _narrow(proto.name, to_array(proto), target, clip)
                # PopART's transformer puts the halves that it makes into raw_data.
                made = numpy_helper.from_array if new is DataType.FLOAT16 else _typed
                proto.CopyFrom(made(array, proto.name))

        for graph in _graphs(self._model.graph):
            for initializer in graph.initializer:
                tensor(initializer)
            for value in (*graph.input, *graph.output, *graph.value_info):
                if value.type.tensor_type.elem_type == before:
                    value.type.tensor_type.elem_type = after
            for node in graph.node:
                for attribute in node.attribute:
                    if attribute.HasField("t"):
                        tensor(attribute.t)
                    elif attribute.name in _TYPE_ATTRIBUTES and attribute.i == before:
                        attribute.i = after

    # -- structure --------------------------------------------------------------------------------

    def removeUnusedInputs(self) -> None:
        """Take away inputs and initializers that nothing reads."""
        graph = self._model.graph
        used = {name for part in _graphs(graph) for node in part.node for name in node.input}
        used |= {value.name for value in graph.output}
        _keep(graph.input, lambda value: value.name in used)
        _keep(graph.initializer, lambda tensor: tensor.name in used)

    def prepareNodesForTraining(self) -> None:
        """Give batch normalisation its five outputs and let dropout drop, where a model was saved for
        inference.
        """
        for node in self._model.graph.node:
            if node.op_type == "BatchNormalization" and len(node.output) == 1:
                node.output.extend(
                    f"{node.output[0]}_{part}" for part in ("mean", "var", "saved_mean", "saved_var")
                )

    def convertInitializersToConstants(self, ids: Iterable[str]) -> None:
        """These initializers become Constant nodes. popart_exception for a name that is no initializer."""
        from onnx import helper

        graph = self._model.graph
        chosen = list(ids)
        held = {tensor.name: tensor for tensor in graph.initializer}
        for name in chosen:
            if name not in held:
                raise popart_exception(
                    f"TensorId {name} not in the model initalizers", hint=f"They are {sorted(held)}."
                )
        made: list[NodeProto] = [
            helper.make_node("Constant", [], [name], value=held[name]) for name in chosen
        ]
        nodes = [*made, *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        _keep(graph.initializer, lambda tensor: tensor.name not in chosen)
        _keep(graph.input, lambda value: value.name not in chosen)

    def convertAllFixedPointInitializersToConstants(self) -> None:
        """Integer and boolean initializers become Constant nodes."""
        fixed = [
            tensor.name for tensor in self._model.graph.initializer if to_array(tensor).dtype.kind in "iub"
        ]
        self.convertInitializersToConstants(fixed)

    def saveInitializersExternally(self, ids: Sequence[str], filename: str) -> None:
        """Move values of initializers out of the model into ``filename``, whose folder must exist."""
        held = {tensor.name: tensor for tensor in self._model.graph.initializer}
        move_initializers(held, {}, ids, filename)


def _typed(array: np.ndarray, name: str) -> TensorProto:
    return to_proto(name, array)


def _graphs(graph: GraphProto) -> Iterable[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            yield from _subgraphs(attribute)


def _subgraphs(attribute: AttributeProto) -> Iterable[GraphProto]:
    if attribute.HasField("g"):
        yield from _graphs(attribute.g)
    for graph in attribute.graphs:
        yield from _graphs(graph)


def _keep(items: Any, wanted: Callable[..., bool]) -> None:
    kept = [item for item in items if wanted(item)]
    del items[:]
    items.extend(kept)


def _narrow(name: str, array: np.ndarray, target: np.dtype[np.generic], clip: bool) -> np.ndarray:
    if target.kind == "i" and array.dtype.kind in "iu":
        limits = np.iinfo(target.name)
        if clip:
            clipped: np.ndarray = np.clip(array, limits.min, limits.max).astype(target)
            return clipped
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise popart_exception(
                f"Tensor {name!r} has values that do not fit {target}: pass clip=True to cut them off."
            )
    with np.errstate(over="ignore"):
        converted: np.ndarray = array.astype(target)
    return converted


def move_initializers(
    held: Mapping[str, TensorProto],
    values: MutableMapping[str, np.ndarray],
    ids: Sequence[str],
    filename: str,
) -> None:
    """Write the values of ``ids``, which ``held`` has or which lie beside the model in ``values``, to a file, and leave
    references to it. popart_exception for a name that is no initializer or is external already, or a folder that is
    not there.
    """
    from onnx import TensorProto

    folder = Path(filename).absolute().parent
    if not folder.is_dir():
        raise popart_exception(
            f"External data cannot be saved in {filename!r}: its parent directory does not exist.",
            hint=f"mkdir -p {folder}",
        )
    for name in ids:
        if name not in held:
            raise popart_exception(
                f"Tensor {name!r} is not an initializer.", hint=f"There are {sorted(held)}."
            )
        if held[name].data_location == TensorProto.EXTERNAL:
            raise popart_exception(f"Tensor {name!r} already has an external data_location.")
    path = Path(filename).resolve()
    loader.written.add(path)
    with open(filename, "wb") as file:
        for name in ids:
            data = raw_data(values.pop(name) if name in values else to_array(held[name]))
            offset = file.tell()
            file.write(data)
            held[name].CopyFrom(reference_to(held[name], path, path.name, offset, len(data)))


def reference_to(tensor: TensorProto, path: Path, location: str, offset: int, length: int) -> TensorProto:
    """``tensor`` with its data in the file ``path``: at ``location`` below the model's folder, and in this process
    wherever the model lies.
    """
    from onnx import TensorProto

    reference = TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )
    base = str(path).removesuffix(location) or os.sep
    entries = {"location": location, "offset": offset, "length": length, "basepath": base}
    for key, value in entries.items():
        reference.external_data.add(key=key, value=str(value))
    return reference
