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

import tensorflow as tf

from podrun.core.errors import ConfigError
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
        """Read what `find_opaque_blob` gives. Returns the number of bytes."""
        read = {kind: [NamedTensor(name) for name in names] for kind, names in json.loads(serialized).items()}
        self.embedded_runtime_config = EmbeddedRuntimeConfig(ApplicationSignature(**read))
        return len(serialized)


def signature_blob(names: Mapping[str, Sequence[str]]) -> bytes:
    """The part of a file for the names of its tensors, by the fields of `ApplicationSignature`."""
    return json.dumps({kind: list(entries) for kind, entries in names.items()}).encode()


def find_opaque_blob(filename_tensor: str | bytes | tf.Tensor) -> bytes:
    """The signature in a file. ConfigError for a file that `experimental_application_compile_op` did not write."""
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
