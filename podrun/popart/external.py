"""Weights whose data lie in files beside the model, and where they go when the model is written again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.popart import loader, names
from podrun.popart.errors import popart_exception

if TYPE_CHECKING:
    from onnx import ModelProto


class ExternalFiles:
    """The files of external data of the model a session was made from, and where they are to be written."""

    def __init__(self, source: str | bytes | os.PathLike[str]) -> None:
        self._source = source
        self._targets: dict[str, Path] = {}

    def move(self, old: str, new: str) -> None:
        """Write tensors that came from file ``old`` to file ``new`` from now on.

        popart_exception if ``new`` is there already, ``old`` is not, or no tensor lies in it.
        """
        before, after = Path(old).resolve(), Path(new).resolve()
        if after.exists():
            raise popart_exception(
                f"Updating externally saved tensor locations from {old!r} to {new!r}: the file {new!r} already exists."
            )
        found = [name for name, path in self._locations().items() if path == before]
        if not before.is_file() and not any(self._targets.get(name) == before for name in found):
            raise popart_exception(f"There is no file {old!r} of externally saved tensors.")
        if not found:
            raise popart_exception(f"No tensor of the model is saved in {old!r}.")
        self._targets |= dict.fromkeys(found, after)

    def _locations(self) -> dict[str, Path]:
        """The file of every tensor that has one."""
        from onnx import ModelProto, TensorProto

        model = ModelProto()
        if isinstance(self._source, bytes):
            folder = loader.data_folder(self._source)
            model.ParseFromString(self._source)
        else:
            folder = Path(self._source).resolve().parent
            model.ParseFromString(Path(self._source).read_bytes())
        found: dict[str, Path] = {}
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL and folder is not None:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                found[tensor.name] = (folder / entries["location"]).resolve()
        return found | self._targets

    def put_out(self, model: ModelProto, path: str | os.PathLike[str]) -> None:
        """Move the data of tensors that have a file out of ``model``, which is to be written to ``path``.

        Optimizer state goes where its weight goes. popart_exception for a file outside of the model's folder: nobody
        would read it there.
        """
        from onnx import TensorProto, numpy_helper

        folder = Path(path).resolve().parent
        offsets: dict[Path, int] = {}
        for tensor in model.graph.initializer:
            weight = next(
                (tensor.name.removeprefix(p) for p in names.STATE_PREFIXES if tensor.name.startswith(p)), ""
            )
            target = self._targets.get(tensor.name) or self._targets.get(weight)
            if target is None:
                continue
            if not target.is_relative_to(folder):
                raise popart_exception(
                    f"Tensor {tensor.name!r} is to be saved in {str(target)!r}, which is not below the folder of the "
                    f"model {os.fspath(path)!r}."
                )
            data = numpy_helper.to_array(tensor).tobytes()
            with open(target, "ab" if target in offsets else "wb") as file:
                file.write(data)
            offset = offsets.get(target, 0)
            offsets[target] = offset + len(data)
            kept = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
            entries = {
                "location": target.relative_to(folder).as_posix(),
                "offset": offset,
                "length": len(data),
            }
            for key, value in entries.items():
                entry = kept.external_data.add()
                entry.key, entry.value = key, str(value)
            kept.data_location = TensorProto.EXTERNAL
            tensor.CopyFrom(kept)
