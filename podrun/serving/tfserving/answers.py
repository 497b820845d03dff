"""Answers of TensorFlow Serving's calls as values: arrays in, arrays out, by the names of clients. No protocol
in here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from podrun.core.errors import CallError, UnsupportedError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.compiler import ServedModel
from podrun.serving.fused_models import fused_graphs
from podrun.serving.instance import TensorBinding, as_anchor
from podrun.serving.loaded_model import DataDescription
from podrun.serving.model_folder import served_model
from podrun.serving.request_incidents import IncidentLog
from podrun.serving.runtime.config import RuntimeConfig
from podrun.serving.runtime.live_runner import LiveRunner
from podrun.serving.runtime.requests import QueuedRequest
from podrun.serving.tfserving.versions import ModelVersion, ServedVersions

SIGNATURE = "serving_default"
METHOD = "tensorflow/serving/predict"
REQUEST_SECONDS = 60.0
"""How long a request without a deadline of its own may take."""


class VersionOnIpus:
    """A version of a model on IPUs. ``names``: anchor -> name for clients, where they differ; ``label``: for incidents;
    ``delay_us``: how long an incomplete batch waits for other requests; ``turn``: machine to look for IPUs on first.
    """

    def __init__(
        self, label: str, compiled: ServedModel, names: Mapping[str, str], delay_us: int = 0, turn: int = 0
    ) -> None:
        config = RuntimeConfig(
            batching_dim=0, auto_reset=True, timeout_ns=max(1, delay_us * 1000), first_machine=turn
        )
        if fused_graphs(anchor.name for anchor in compiled.metadata.inputs()):
            raise UnsupportedError(
                f"{compiled.label} is a fused model: this protocol's requests have all inputs of a model",
                hint="Triton serves it: podrun serve REPOSITORY. Or compile its models apart.",
            )
        self._runner = LiveRunner(compiled, config, IncidentLog(label))
        self.inputs = {names.get(d.name, d.name): d for d in self._runner.get_execute_inputs()}
        self.outputs = {names.get(d.name, d.name): d for d in self._runner.get_execute_outputs()}

    def enqueue(
        self, inputs: Mapping[str, np.ndarray], wanted: Iterable[str], label: str = ""
    ) -> QueuedRequest:
        """Queue a request. UsageError for names, types and shapes that do not fit."""
        if inputs.keys() != self.inputs.keys():
            raise UsageError(f"the inputs are {sorted(self.inputs)}, not {sorted(inputs)}")
        arrays = {
            d.name: as_anchor(inputs[name], TensorBinding(name, d, d.dtype))
            for name, d in self.inputs.items()
        }
        sizes = {value.shape[0] if value.ndim else 0 for value in arrays.values()}
        if len(sizes) != 1:
            raise UsageError(f"the inputs have different numbers of rows: {sorted(sizes)}")
        rows = sizes.pop()
        outputs = {self.outputs[name].name: self._empty(self.outputs[name], rows) for name in wanted}
        request = self._runner.prepared(arrays, outputs, label)
        self._runner.current().enqueue(request)
        request.future.when_done(lambda: self._runner.note([request]))
        return request

    def _empty(self, description: DataDescription, rows: int) -> np.ndarray:
        shape = description.shape
        return np.empty(
            (rows * shape[0] // self._runner.rows_behind(description.name), *shape[1:]), description.dtype
        )

    def revive(self) -> None:
        """Take IPUs again where an error has cost them. ServiceError while there are none."""
        self._runner.current()

    def close(self) -> None:
        """Answer what is queued, then give the IPUs back. Idempotent."""
        self._runner.close()


def load_version(model: str, folder: Path, delay_us: int = 0) -> VersionOnIpus:
    """A version's folder on IPUs, under the names of its ``name_map.json``. ConfigError names the file that is
    wrong.
    """
    compiled, names = served_model(folder)
    return VersionOnIpus(f"{model}/{folder.name}", compiled, names, delay_us)


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Which model a request asks for: the protocol's model spec."""

    name: str
    number: int | None = None
    label: str = ""
    signature: str = ""

    def check(self) -> None:
        """UsageError for what no model has: labels, other signatures, no name."""
        if not self.name:
            raise UsageError("the request names no model: model_spec.name is empty")
        if self.label:
            raise UsageError(f"version labels are not supported: {self.label!r}", hint="Name a version.")
        if self.signature not in ("", SIGNATURE):
            raise UsageError(
                f'Serving signature key "{self.signature}" not found.', hint=f"Models have {SIGNATURE}."
            )


def predict(
    versions: ServedVersions,
    choice: ModelChoice,
    inputs: Mapping[str, np.ndarray],
    output_filter: Iterable[str] = (),
    seconds: float | None = None,
) -> tuple[ModelVersion, dict[str, np.ndarray]]:
    """The outputs of a request, in clients' names, and the version that gave them.

    UsageError and NotFoundError for what is wrong with the request, ServiceError for a model without IPUs,
    DeadlineError after ``seconds``, PoplarError for what the IPUs report.
    """
    choice.check()
    for attempt in range(2):
        version = versions.version(choice.name, choice.number)
        if version.runner is None:
            continue
        wanted = list(output_filter) or list(version.runner.outputs)
        if unknown := [name for name in wanted if name not in version.runner.outputs]:
            raise UsageError(
                f"output tensor alias not found in signature: {unknown[0]}",
                hint=f"The outputs are {', '.join(sorted(version.runner.outputs))}.",
            )
        try:
            request = version.runner.enqueue(inputs, wanted, "")
        except CallError:
            if attempt:
                raise
            continue  # A newer version has taken its place between the two lines: that one answers.
        request.future.wait(REQUEST_SECONDS if seconds is None else min(seconds, REQUEST_SECONDS))
        names = {name: version.runner.outputs[name].name for name in wanted}
        return version, {name: request.outputs[anchor] for name, anchor in names.items()}
    raise CallError(f"model {choice.name} is being unloaded")


def shape_for_clients(description: DataDescription) -> list[int]:
    """The shape of a tensor in a signature: any number of rows."""
    return [-1, *description.shape[1:]]
