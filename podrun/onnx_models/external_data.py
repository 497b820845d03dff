"""Tensors whose data lie in files of their own: which files a model may name, and what is read from them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import onnx.external_data_helper

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ExternalPlace:
    """Where a tensor's data lie outside of its model: the file, the first byte, how many."""

    path: Path
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte behind the data."""
        return self.offset + self.length


def entries_of(tensor: onnx.TensorProto) -> dict[str, str]:
    """The entries of an external tensor about its data: ``location``, ``offset``, ``length``, ``basepath``."""
    return {entry.key: entry.value for entry in tensor.external_data}


def external_file(
    tensor: onnx.TensorProto, folder: Path | None, trusted: Collection[Path], label: str = "the model"
) -> Path:
    """The file with an external tensor's data: in ``folder`` or below, else one of the ``trusted``.

    Raises `UsageError` for a file that lies elsewhere or does not exist.
    """
    entries = entries_of(tensor)
    location = entries.get("location", "")
    name = f"tensor '{tensor.name}' in {label}"
    if "\0" not in location and entries.get("basepath"):
        own = (Path(entries["basepath"]) / location).resolve()
        if own in trusted and not (folder is not None and (folder / location).is_file()):
            if not own.is_file():
                raise UsageError(f"{name} keeps its data in {str(own)!r}, which is gone")
            return own
    if folder is None:
        raise UsageError(
            f"{name} keeps its data in '{location}', but a model from bytes has no folder",
            hint="Give the model's path instead of its bytes.",
        )
    if not location or "\0" in location:
        raise UsageError(
            f"{name} keeps its data in {location!r}, which is not a path within the model's folder"
        )
    try:
        path = (folder / location).resolve()
        exists = path.is_file()
    except OSError as error:
        raise UsageError(f"{name} keeps its data in a file that cannot be: {error.strerror}") from error
    if not path.is_relative_to(folder.resolve()):
        raise UsageError(
            f"{name} keeps its data in {location!r}, which leaves the model's folder",
            hint="Put the file beside the model.",
        )
    if not exists:
        raise UsageError(
            f"{name} keeps its data in {location}, but it doesn't exist or is not accessible",
            hint=f"Put that file beside the model, in {str(folder)!r}.",
        )
    return path
