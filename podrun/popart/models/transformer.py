"""PopART's tools on ONNX models: GraphTransformer and NumericsReport.

**GraphTransformer** rewrites models before a session takes them (types, constants, external data). External data are
weights in files beside the model; they are read, and written again when the model is.

**NumericsReport** says how far two trainings that started alike have moved apart, weight by weight. ``A0`` and ``A1``
are a model's files before and after training in one place, ``B0`` and ``B1`` in another (PyTorch, say). With dA and dB
the changes of a weight, its relative error is ``sum (dA - dB)^2 / (|dA| |dB| + 1e-8)``: 0 if both moved alike, about 2
if they moved at random by as much (PopART's numerics report).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.tensor_proto import raw_data, to_array, to_proto
from podrun.popart.models import loader
from podrun.popart.values.enums import DataType
from podrun.popart.values.exceptions import popart_exception, surfacing
from podrun.popart.values.tensor_info import numpy_name, onnx_data_type
from podrun.runtime.tensor_names import STATE_PREFIXES

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

    from podrun.onnx_models.external_data import ExternalPlace

_TYPE_ATTRIBUTES = {"to", "dtype"}


def _conversion(old: DataType, new: DataType) -> Callable[[GraphTransformer], None]:
    """A method that makes tensors of one type those of another."""

    def convert(self: GraphTransformer) -> None:
        self._convert(old, new)

    convert.__doc__ = f"{old.name} becomes {new.name}, everywhere. Values beyond its range become infinite."
    return convert


@surfacing
class GraphTransformer:
    """``t = GraphTransformer(model); t.convertFloatsToHalfs(); model = t.getModelProto()``. Takes a path or
    bytes.
    """

    def __init__(self, modelProtoOrFilename: str | bytes | os.PathLike[str]) -> None:
        self._model = loader.read_model(modelProtoOrFilename)

    def getModelProto(self) -> bytes:
        """The model in its present form."""
        return LightModel(self._model).to_bytes()

    # -- types ------------------------------------------------------------------------------------

    convertFloatsToHalfs = _conversion(DataType.FLOAT, DataType.FLOAT16)
    convertDoublesToFloats = _conversion(DataType.DOUBLE, DataType.FLOAT)
    convertDoublesToHalfs = _conversion(DataType.DOUBLE, DataType.FLOAT16)
    convertBFloats16ToFloat32 = _conversion(DataType.BFLOAT16, DataType.FLOAT)
    convertINT8ToINT32 = _conversion(DataType.INT8, DataType.INT32)
    convertUINT8ToINT32 = _conversion(DataType.UINT8, DataType.INT32)
    convertINT16ToINT32 = _conversion(DataType.INT16, DataType.INT32)
    convertUINT16ToINT32 = _conversion(DataType.UINT16, DataType.INT32)

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
                to_proto = numpy_helper.from_array if new is DataType.FLOAT16 else _typed
                proto.CopyFrom(to_proto(array, proto.name))

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
        """Remove inputs and initializers that nothing reads."""
        graph = self._model.graph
        used = {name for part in _graphs(graph) for node in part.node for name in node.input}
        used |= {value.name for value in graph.output}
        _keep(graph.input, lambda value: value.name in used)
        _keep(graph.initializer, lambda tensor: tensor.name in used)

    def prepareNodesForTraining(self) -> None:
        """Give batch normalisation its five outputs and let dropout drop, in a model that was saved for inference."""
        for node in self._model.graph.node:
            if node.op_type == "BatchNormalization" and len(node.output) == 1:
                node.output.extend(
                    f"{node.output[0]}_{part}" for part in ("mean", "var", "saved_mean", "saved_var")
                )

    def convertInitializersToConstants(self, ids: Iterable[str]) -> None:
        """Turn these initializers into Constant nodes. popart_exception for a name that is no initializer."""
        from onnx import helper

        graph = self._model.graph
        chosen = list(ids)
        held = {tensor.name: tensor for tensor in graph.initializer}
        for name in chosen:
            if name not in held:
                raise popart_exception(
                    f"TensorId {name} not in the model initalizers", hint=f"They are {sorted(held)}."
                )
        constants: list[NodeProto] = [
            helper.make_node("Constant", [], [name], value=held[name]) for name in chosen
        ]
        nodes = [*constants, *graph.node]
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
    """Write the values of ``ids``, from ``held`` or from ``values`` beside the model, to a file, and leave references
    to it. popart_exception for a name that is not an initializer or is external already, or a missing folder.
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


class ExternalFiles:
    """The files of external data of a session's model. `put_out` writes them again.

    As in PopART, a tensor keeps its file: modelToHost overwrites the data there, and puts the optimizer state behind
    them, unless `move` has named another file.
    """

    def __init__(self, places: Mapping[str, ExternalPlace]) -> None:
        self._places = dict(places)

    def move(self, old: str, new: str) -> None:
        """Keep tensors of the file ``old`` in ``new`` from now on; the present content of ``old`` is copied there.

        popart_exception if ``new`` exists already, ``old`` does not, or no tensor lies in it.
        """
        before, after = Path(old).resolve(), Path(new).resolve()
        what = f"External tensor data are to move from file {old!r} to file {new!r}"
        if after.exists():
            raise popart_exception(f"{what}, but file {new!r} already exists.")
        if not before.is_file():
            raise popart_exception(f"{what}, but file {old!r} does not exist.")
        if not after.parent.is_dir():
            raise popart_exception(f"{what}, but its parent directory does not exist.")
        moved = {name: place for name, place in self._places.items() if place.path == before}
        if not moved:
            raise popart_exception(
                f"{what}. No ONNX model initializers have external location set to {old!r}."
            )
        shutil.copyfile(before, after)
        loader.written.add(after)
        self._places |= {name: replace(place, path=after) for name, place in moved.items()}

    def put_out(self, model: LightModel, path: str | os.PathLike[str]) -> LightModel:
        """``model``, ready to be written to ``path``, with the data of tensors that have a file moved there.

        Optimizer state goes behind the data of its weight's file. Other processes find the data again if they lie below
        the model's folder; this one does wherever they lie.
        """

        if not self._places:
            return model
        model = model.copy()
        folder, moved = Path(path).resolve().parent, set()
        for tensor in model.proto.graph.initializer:
            place = self._place(tensor.name)
            if place is None:
                continue
            data = raw_data(model.value(tensor))
            if place.length < 0:
                place = replace(place, offset=self._end(place.path), length=len(data))
                self._places[tensor.name] = place
            _write(place, data)
            below = place.path.is_relative_to(folder)
            location = place.path.relative_to(folder).as_posix() if below else place.path.name
            tensor.CopyFrom(reference_to(tensor, place.path, location, place.offset, len(data)))
            moved.add(tensor.name)
        return LightModel(model.proto, {n: v for n, v in model.values.items() if n not in moved})

    def _place(self, name: str) -> ExternalPlace | None:
        """The place of a tensor; with length -1 for optimizer state that has no place yet."""
        if name in self._places:
            return self._places[name]
        weight = next((name.removeprefix(p) for p in STATE_PREFIXES if name.startswith(p)), "")
        return replace(self._places[weight], length=-1) if weight in self._places else None

    def _end(self, path: Path) -> int:
        """The first byte behind the tensors of a file."""
        return max(place.end for place in self._places.values() if place.path == path)


def _write(place: ExternalPlace, data: memoryview) -> None:
    loader.written.add(place.path)
    with open(place.path, "r+b" if place.path.exists() else "w+b") as file:
        file.seek(place.offset)
        file.write(data)


Source = str | bytes | os.PathLike[str]


@surfacing
class NumericsReport:
    """How far two trainings that started alike have moved apart, weight by weight. popart_exception if the models do
    not hold the same weights.
    """

    def __init__(self, A0: Source, A1: Source, B0: Source, B1: Source) -> None:
        models = {name: _weights(loader.read_model(source)) for name, source in zip(
            ("A0", "A1", "B0", "B1"), (A0, A1, B0, B1), strict=True
        )}  # fmt: skip
        self._models = models
        first = models["A0"]
        for name, weights in models.items():
            for weight in sorted(first.keys() ^ weights.keys()):
                raise popart_exception(
                    f"NumericsReport: only one of A0 and {name} has the weight {weight!r}."
                )
            for weight, value in weights.items():
                if value.shape != first[weight].shape:
                    raise popart_exception(
                        f"NumericsReport: weight {weight!r} has shape {list(value.shape)} in {name}, but "
                        f"{list(first[weight].shape)} in A0."
                    )

    def getRelativeErrors(self) -> dict[str, float]:
        """The relative error of every weight."""
        return {name: self._errors(name)[3] for name in sorted(self._models["A0"])}

    def report(self, id: str) -> str:
        """One weight's changes in words."""
        if id not in self._models["A0"]:
            raise popart_exception(f"NumericsReport: there is no weight {id!r}.")
        a, b, apart, relative = self._errors(id)
        return f"{id}: |dA|^2 = {a:.6g}, |dB|^2 = {b:.6g}, |dA - dB|^2 = {apart:.6g}, relative error = {relative:.6g}"

    def fullReport(self) -> str:
        """All weights, a line each."""
        return "\n".join(self.report(name) for name in sorted(self._models["A0"]))

    def _errors(self, name: str) -> tuple[float, float, float, float]:
        start_a, end_a, start_b, end_b = (self._models[m][name] for m in ("A0", "A1", "B0", "B1"))
        a, b = end_a - start_a, end_b - start_b
        square_a, square_b, apart = float((a * a).sum()), float((b * b).sum()), float(((a - b) ** 2).sum())
        return square_a, square_b, apart, apart / (np.sqrt(square_a * square_b) + 1e-8)


def _weights(model: ModelProto) -> dict[str, np.ndarray]:
    """Floating-point initializers as float64."""
    arrays = {tensor.name: np.asarray(to_array(tensor)) for tensor in model.graph.initializer}
    return {name: value.astype(np.float64) for name, value in arrays.items() if value.dtype.kind == "f"}
