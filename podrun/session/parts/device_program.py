"""A session's compiled program and the device it is for: what the other parts of a session read, write and ask."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.executable import Executable
from podrun.onnx_models.tensor_proto import raw_data
from podrun.session.device import DeviceInfo
from podrun.session.enums import DeviceType
from podrun.session.exceptions import popart_exception, poplar_exception, surfaced
from podrun.session.program.build import BuiltModel

if TYPE_CHECKING:
    from podrun.onnx_models.light_model import LightModel


class DeviceProgram:
    """The program of a session. ``session``: the object by which the device knows whose program it holds."""

    def __init__(self, device: DeviceInfo, session: object) -> None:
        self.device = device
        self.executable: Executable | None = None
        """None before prepareDevice."""
        self._session = weakref.ref(session)  # A session that nobody refers to lets its device go at once.

    def prepared(self, call: str) -> Executable:
        """The compiled program. popart_exception before prepareDevice, which names ``call``."""
        if self.executable is None:
            raise popart_exception(
                f"Devicex::prepare() must be called before {call} is called.", hint="session.prepareDevice()"
            )
        return self.executable

    def profiled(self) -> Executable:
        """The compiled program for a report. popart_exception before prepareDevice, poplar_exception on a device
        without profiling."""
        if self.executable is None:
            raise popart_exception("Session must have been prepared before a report can be fetched")
        if self.device.type is DeviceType.Cpu:
            raise poplar_exception("Profiling is disabled for current device type.")
        return self.executable

    @property
    def on_device(self) -> bool:
        """Whether the device holds this program, and not another session's."""
        return self.device._loaded is self._session()

    @on_device.setter
    def on_device(self, value: bool) -> None:
        self.device._loaded = self._session() if value else None

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Write variables on the device."""
        if values:
            with surfaced():
                self.device.connection.write_variables(values)

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Variables as they stand on the device."""
        with surfaced():
            return self.device.connection.read_variables(list(names))


def fingerprint(light: LightModel, built: BuiltModel) -> str | None:
    """Equal digests, equal forward functions and update rules. None where the model does not say it all: with
    operators of the program's own.

    Values of weights are left out where the program does not bake them in, so training can go on from a
    checkpoint without compiling again.
    """
    from podrun.onnx_models import custom

    if any(custom.registered(node.domain, node.op_type) for node in built.lowered.graph.nodes):
        return None
    shape = light.copy().proto
    baked = [tensor for tensor in shape.graph.initializer if tensor.name not in built.program.parameters]
    del shape.graph.initializer[:]
    shape.graph.initializer.extend(baked)
    del shape.metadata_props[:]
    digest = hashlib.sha256(shape.SerializeToString(deterministic=True))
    for tensor in baked:
        if tensor.name in light.values:
            digest.update(raw_data(light.values[tensor.name]))
    digest.update(repr(sorted(built.program.inputs.items())).encode())
    digest.update(repr((built.lowered.training, sorted(built.lowered.outputs))).encode())
    if built.rule is not None:
        digest.update(repr(_rule(built)).encode())
    return digest.hexdigest()


def _rule(built: BuiltModel) -> tuple[object, ...]:
    rule = built.rule
    assert rule is not None
    weights = []
    for name in sorted(built.trained):
        spec = built.program.parameters[name].spec
        state = sorted((prefix, repr(value)) for prefix, value in rule.state(spec).items())
        weights.append(
            (name, rule.group_key(name), state, sorted(rule.scalars(name)), rule.gradient_dtype(spec))
        )
    return (type(rule).__name__, rule.optimizer._modes(), rule.context, tuple(weights))
