"""Small tools for programs on the host: printing annotated modules, comparing results, reading exported files."""

from __future__ import annotations

import builtins
import importlib
from typing import Any

import torch

from podrun.poptorch.annotations import module_repr
from podrun.poptorch.export_file import read_metadata

BlockId = str
"""What identifies a block in stages and phases."""


def print(m: Any) -> None:
    """Print a module with the blocks that its parts begin, then the object itself."""
    if isinstance(m, torch.nn.Module):
        builtins.print(module_repr(m))
    builtins.print(m)


def allclose(ref: Any, other: Any) -> bool:
    """Whether two results have the same structure and are close. AssertionError for other types and lengths."""
    assert type(ref) is type(other), f"{type(ref).__name__} and {type(other).__name__} cannot be compared"
    if isinstance(ref, (list, tuple)):
        assert len(ref) == len(other), f"{len(ref)} and {len(other)} results"
        return all(allclose(a, b) for a, b in zip(ref, other, strict=True))
    assert isinstance(ref, torch.Tensor), f"results of type {type(ref).__name__} cannot be compared"
    return torch.allclose(ref, other)


def importPoptorchMetadataFromFile(filename: str) -> bytes:
    """The metadata of a file that `PoplarExecutor.save` wrote. Error for another file."""
    return read_metadata(filename)


def registerGeometricCustomArgParsers() -> None:
    """Let batches of poptorch_geometric be arguments of models, where that library is installed."""
    try:
        importlib.import_module("poptorch_geometric.types")
    except ImportError:
        return
