"""Weights whose data lie in files beside the model, and where they go when the model is written again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from podrun.onnx_models import loader
from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.tensor_proto import raw_data
from podrun.session import names
from podrun.session.exceptions import popart_exception

if TYPE_CHECKING:
    from podrun.onnx_models.model_loader import ExternalPlace


class ExternalFiles:
    """The files of external data of the model a session was made from. `put_out` writes them anew.

    As in PopART, a tensor keeps its file: modelToHost overwrites the data there, and puts the optimizer state behind
    them, unless `move` has said where they are to go from now on.
    """

    def __init__(self, places: Mapping[str, ExternalPlace]) -> None:
        self._places = dict(places)

    def move(self, old: str, new: str) -> None:
        """Have tensors of the file ``old`` in ``new`` from now on; what is in ``old`` is copied there.

        popart_exception if ``new`` is there already, ``old`` is not, or no tensor lies in it.
        """
        before, after = Path(old).resolve(), Path(new).resolve()
        what = f"External tensor data are to move from file {old!r} to file {new!r}"
        if after.exists():
            raise popart_exception(f"{what}, but file {new!r} already exists.")
        if not before.is_file():
            raise popart_exception(f"{what}, but file {old!r} does not exist.")
        if not after.parent.is_dir():
            raise popart_exception(f"{what}, but its parent directory does not exist.")
        found = {name: place for name, place in self._places.items() if place.path == before}
        if not found:
            raise popart_exception(
                f"{what}. No ONNX model initializers have external location set to {old!r}."
            )
        shutil.copyfile(before, after)
        loader.written.add(after)
        self._places |= {name: replace(place, path=after) for name, place in found.items()}

    def put_out(self, model: LightModel, path: str | os.PathLike[str]) -> LightModel:
        """``model``, which is to be written to ``path``, with the data of tensors that have a file moved there.

        Optimizer state goes behind the data of its weight's file. Other processes find the data again if they lie
        below the model's folder; this one does wherever they lie.
        """
        from podrun.onnx_models.transformer import reference_to

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
        """Where a tensor goes; with length -1 if it is optimizer state that has no place yet."""
        if name in self._places:
            return self._places[name]
        weight = next((name.removeprefix(p) for p in names.STATE_PREFIXES if name.startswith(p)), "")
        return replace(self._places[weight], length=-1) if weight in self._places else None

    def _end(self, path: Path) -> int:
        """The first byte behind the tensors of a file."""
        return max(place.end for place in self._places.values() if place.path == path)


def _write(place: ExternalPlace, data: memoryview) -> None:
    loader.written.add(place.path)
    with open(place.path, "r+b" if place.path.exists() else "w+b") as file:
        file.seek(place.offset)
        file.write(data)
