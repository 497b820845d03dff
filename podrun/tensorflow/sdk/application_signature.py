"""What a file of ``application_compile_op`` says that it takes and gives, as programs and tests of the SDK read it:

    executable = poplar_executable_pb2.PoplarExecutableProto()
    executable.ParseFromString(embedded_runtime._find_opaque_blob(path))
    executable.embedded_runtime_config.signature.streamed_inputs

Inputs are given when a file is started, streamed inputs at each call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from podrun.core.errors import ConfigError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.compiler import ServedModel

SIGNATURE = "podrun.tensorflow.signature"
"""The part of a file that has its signature."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a signature."""

    name: str


@dataclass(frozen=True, slots=True)
class ApplicationSignature:
    """The tensors that a file takes and gives."""

    inputs: Sequence[NamedTensor] = ()
    streamed_inputs: Sequence[NamedTensor] = ()
    outputs: Sequence[NamedTensor] = ()
    streamed_outputs: Sequence[NamedTensor] = ()


@dataclass(frozen=True, slots=True)
class EmbeddedRuntimeConfig:
    """``embedded_runtime_config`` of a file."""

    signature: ApplicationSignature


class PoplarExecutableProto:
    """``poplar_executable_pb2.PoplarExecutableProto``, of which podrun has the signature."""

    def __init__(self) -> None:
        self.embedded_runtime_config = EmbeddedRuntimeConfig(ApplicationSignature())

    def ParseFromString(self, serialized: bytes) -> int:
        """Read what `find_opaque_blob` gives into ``embedded_runtime_config``, without fields that are not known.
        Returns the number of bytes. ``DecodeError`` of protobuf for other bytes.
        """
        try:
            fields = {kind: list(map(str, names)) for kind, names in json.loads(serialized).items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise DecodeError(
                "Error parsing message: no signature of an application. Pass what _find_opaque_blob returns."
            ) from error
        known = ApplicationSignature.__dataclass_fields__.keys() & fields.keys()
        read = {kind: [NamedTensor(name) for name in fields[kind]] for kind in known}
        self.embedded_runtime_config = EmbeddedRuntimeConfig(ApplicationSignature(**read))
        return len(serialized)


def signature_blob(names: Mapping[str, Sequence[str]]) -> bytes:
    """The names of a compiled application's tensors, by field of `ApplicationSignature`, as a part of its file.

    The bytes are JSON in UTF-8, which `PoplarExecutableProto.ParseFromString` reads.
    """
    return json.dumps({kind: list(entries) for kind, entries in names.items()}).encode()


def find_opaque_blob(filename_tensor: str | bytes | tf.Tensor) -> bytes:
    """The signature in a file, as `signature_blob` wrote it. ``filename_tensor``: its path, or a string tensor with it.
    ConfigError for a file that `experimental_application_compile_op` did not write.
    """
    named = filename_tensor
    if isinstance(named, tf.Tensor):
        named = named.numpy() if hasattr(named, "numpy") else tf.get_static_value(named).item()
    path = os.fsdecode(named)
    blob = ServedModel(path).reader.blob(SIGNATURE)
    if blob is None:
        raise ConfigError(
            f"{path} has no signature.",
            hint="Compile it again with experimental_application_compile_op.",
        )
    return blob


def taken_input(place: int, value: object, dtype: np.dtype) -> tf.Tensor:
    """A tensor for an input of a program in a file: Python values of its type, tensors and arrays of any width of it.
    UsageError for values of another kind, such as whole numbers or text for float32.
    """
    wanted = tf.as_dtype(dtype)
    try:
        tensor = tf.convert_to_tensor(value, dtype_hint=None if hasattr(value, "dtype") else wanted)
    except (TypeError, ValueError) as error:
        raise UsageError(f"Input {place} is no tensor: {error}") from error
    own = tensor.dtype
    if own != wanted and not (
        (own.is_floating and wanted.is_floating) or (own.is_integer and wanted.is_integer)
    ):
        raise UsageError(
            f"Input {place} has type {own.name}; the program takes {wanted.name}.",
            hint=f"tf.cast(value, tf.{wanted.name})",
        )
    return tensor
