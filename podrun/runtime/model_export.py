"""A session's program, its variables and what servers have to know of both, as one PopEF file.

Programs, their order and the handles of streams are PopART's (`PROGRAMS`; ``h2d_<tensor>``, ``d2h_<tensor>``,
``anchor_d2h_<tensor>``). The variables are those of the host's copy: bring them from the device first if it is ahead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from podrun.core import executable_file
from podrun.core.executable import Executable, StreamDirection, TensorSpec, VariableRole
from podrun.core.quick_dataclass import dataclass
from podrun.popef.container import PACKAGE
from podrun.popef.metadata import (
    AnchorDirection,
    ElementType,
    PopefAnchor,
    PopefMetadata,
    PopefTensor,
    ProgramFlow,
)
from podrun.popef.writer import PopefWriter
from podrun.runtime.device import ipu_version

PROGRAMS = (
    "WeightsFromHost",
    "OptimizerFromHost",
    "RandomSeedFromHost",
    "RandomSeedToHost",
    "RngStateFromHost",
    "Program",
    "RngStateToHost",
    "WeightsToHost",
    "CycleCountTensorToHost",
    "CustomProgramsStart",
)
"""PopART's programs in order of their indices."""
_INDEX = {name: index for index, name in enumerate(PROGRAMS)}
INPUT_HANDLE, ANCHOR_HANDLE = "h2d_", "anchor_d2h_"


@dataclass(frozen=True, slots=True)
class ExportedProgram:
    """What goes into a file. ``outputs``: tensors that come back, with the streams that carry them. ``variables``:
    values that a run starts with. ``blobs``: bytes of the front end, by name. ``constant``: no program writes or reads
    the weights again.
    """

    name: str
    executable: Executable
    iterations: int
    outputs: Mapping[str, str]
    variables: Mapping[str, np.ndarray]
    engine_options: Mapping[str, str]
    blobs: Mapping[str, bytes]
    constant: bool = False


def metadata_of(exported: ExportedProgram) -> PopefMetadata:
    """The metadata of a program."""
    executable = exported.executable
    layout = executable.layout
    roles = {variable.role for variable in executable.variables.values()}
    seeded = VariableRole.RANDOM_SEED in roles
    load = ["WeightsFromHost", "OptimizerFromHost", *(["RandomSeedFromHost"] if seeded else [])]
    seed = next((n for n, v in executable.variables.items() if v.role is VariableRole.RANDOM_SEED), "")
    return PopefMetadata(
        executable=exported.name,
        anchors=tuple(_anchors(exported)),
        programsMap=dict(enumerate(PROGRAMS)),
        programFlow=ProgramFlow(
            tuple(_INDEX[name] for name in load), (_INDEX["Program"],), (_INDEX["WeightsToHost"],)
        ),
        replicationFactor=layout.replicas,
        numIpus=layout.ipus,
        ipuVersion=ipu_version(executable.target),
        isPOD=layout.ipus > 4,
        isInference=not executable.training,
        engineOptions=dict(exported.engine_options),
        deviceOptions={"target": executable.target},
        seedHandle=INPUT_HANDLE + seed if seed else "",
        deviceIterations=exported.iterations,
        hash=PACKAGE,
    )


def _anchors(exported: ExportedProgram) -> Iterator[PopefAnchor]:
    executable = exported.executable
    main = (_INDEX["Program"],)
    for name, stream in executable.streams.items():
        if stream.direction is StreamDirection.TO_DEVICE:
            form = _form(stream.spec)
            yield PopefAnchor(
                name, INPUT_HANDLE + name, form, not stream.broadcast, AnchorDirection.INPUT, main
            )
    for name, held in exported.outputs.items():
        form = _form(executable.streams[held].spec)
        yield PopefAnchor(name, ANCHOR_HANDLE + held, form, True, AnchorDirection.OUTPUT, main)
    weights = () if exported.constant else (_INDEX["WeightsFromHost"], _INDEX["WeightsToHost"])
    programs = {
        VariableRole.WEIGHT: weights,
        VariableRole.OPTIMIZER_STATE: weights,
        VariableRole.SCALAR: (_INDEX["OptimizerFromHost"],),
        VariableRole.RANDOM_SEED: (_INDEX["RandomSeedFromHost"], _INDEX["RandomSeedToHost"]),
    }
    for name, variable in executable.variables.items():
        if variable.role is VariableRole.COMPUTED:
            continue
        kind = AnchorDirection.INPUT if variable.role is VariableRole.SCALAR else AnchorDirection.BOTH
        form = _form(variable.host_spec)
        yield PopefAnchor(name, INPUT_HANDLE + name, form, bool(variable.rows), kind, programs[variable.role])


def _form(spec: TensorSpec) -> PopefTensor:
    return PopefTensor(ElementType(spec.dtype), spec.shape)


def write_program(exported: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write the file. ConfigError if the disk refuses."""
    with PopefWriter(path) as writer:
        writer.writeMetadata(metadata_of(exported))
        writer.createExecutable(exported.name).write(executable_file.dumps(exported.executable))
        for name, value in exported.variables.items():
            writer.add_tensor(name, value)
        for name, data in exported.blobs.items():
            writer.createOpaqueBlob(name, exported.name).write(data)
