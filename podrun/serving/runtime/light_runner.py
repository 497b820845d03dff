"""Runs exact batches and exchanges weights: `LightRunner`.

    with LightRunner("executable.popef") as runner:
        runner.execute({"x": x}, {"y": y})                  # x has the compiled shape, or whole multiples of its rows
        runner.set_input_anchor("w", new); runner.update_weights()

No queue, no thread, no filling up: what is given is run. `stop` gives the IPUs back and `reload` takes them again, so
that several models take turns on one device.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from podrun.core.errors import CallError, UsageError
from podrun.runtime.device import RunDevice
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import ServedModel
from podrun.serving.loaded_model import DataDescription, LoadedModel, ModelledTime, StartedBatches
from podrun.serving.runtime.config import LightRunnerConfig, RuntimeConfig


class LightFuture:
    """A run that was started by a `LightRunner`; ``modelled`` is what it cost, when it is done."""

    def __init__(self, started: StartedBatches, outputs: Mapping[str, np.ndarray]) -> None:
        self._started, self._outputs = started, outputs
        self.modelled: ModelledTime | None = None

    def wait(self) -> None:
        """Return when the outputs are filled; raises what the system reports."""
        results, modelled = self._started.wait()
        for name, target in self._outputs.items():
            if not np.shares_memory(target, results[name]):
                target.reshape(-1)[...] = results[name].reshape(-1)
        self.modelled = modelled


class LightRunner(ClosedAtEnd):
    """Runs exact batches and exchanges weights. ``device``: IPUs that the caller holds, else any that are free."""

    def __init__(
        self,
        executable: str | bytes | ServedModel,
        config: LightRunnerConfig | None = None,
        device: RunDevice | None = None,
    ) -> None:
        self.config = config or LightRunnerConfig()
        self._model = executable if isinstance(executable, ServedModel) else ServedModel(executable)
        self._device = device
        self._changed: dict[str, np.ndarray] = {}
        self._updated: dict[str, np.ndarray] = {}
        self._loaded: LoadedModel | None = self.config.put_on_ipus(self._model, device)
        self._variables = self._loaded.variable_names

    def get_execute_inputs(self) -> list[DataDescription]:
        """The inputs of a run."""
        return list(self._running.inputs.values())

    def get_execute_outputs(self) -> list[DataDescription]:
        """The outputs of a run."""
        return list(self._running.outputs.values())

    def get_model_inputs(self) -> list[DataDescription]:
        """The inputs of a run, then the weights, which the file has values for."""
        weights = [
            DataDescription(name, value.shape, value.dtype, popef_contains_tensor_data=True)
            for name, value in self._model.variables().items()
            if name in self._variables
        ]
        return [*self.get_execute_inputs(), *weights]

    get_model_outputs = get_execute_outputs

    def execute(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Run, and fill the arrays of ``outputs``."""
        self.execute_async(inputs, outputs).wait()

    def execute_async(
        self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> LightFuture:
        """Start a run; waits for an earlier one where too many are in flight. UsageError for what does not fit."""
        loaded = self._running
        count = self._count(loaded, inputs, outputs)
        depth = self.config.depth if isinstance(self.config, RuntimeConfig) else 2
        return LightFuture(loaded.start(inputs, count, outputs, depth=depth), outputs)

    executeAsync = execute_async

    def set_input_anchor(self, name: str, value: np.ndarray) -> None:
        """Keep new values of a weight for `update_weights`. UsageError for another name, shape or type."""
        if name not in self._variables:
            raise UsageError(
                f"{name!r} is no weight on the IPUs: there are {sorted(self._variables) or 'none'}",
                hint="Weights can be replaced where the model was compiled with constant_weights=False.",
            )
        held = self._model.variables()[name]
        if value.shape != held.shape or value.dtype != held.dtype:
            raise UsageError(
                f"weight {name!r} is {held.dtype}{list(held.shape)}, not {value.dtype}{list(value.shape)}"
            )
        self._changed[name] = np.array(value)

    def update_weights(self) -> None:
        """Write the weights that were set; runs that were started before are done with the old ones."""
        self._running.write_variables(self._changed)
        self._updated.update(self._changed)
        self._changed = {}

    def stop(self) -> None:
        """Give the IPUs back; runs in flight end with an error. Idempotent."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()

    def reload(self) -> None:
        """Take IPUs again after `stop`, with the weights as they were. UsageError where none are free."""
        if self._loaded is None:
            self._loaded = self.config.put_on_ipus(self._model, self._device)
            if self._updated:
                self._loaded.write_variables(self._updated)

    def close(self) -> None:
        """`stop` under another name."""
        self.stop()

    @property
    def _running(self) -> LoadedModel:
        if self._loaded is None:
            raise CallError("the runner is stopped", hint="reload() takes IPUs again.")
        return self._loaded

    def _count(
        self, loaded: LoadedModel, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> int:
        """The micro-batches of a run."""
        if inputs.keys() != loaded.inputs.keys():
            raise UsageError(f"the inputs are {sorted(loaded.inputs)}, not {sorted(inputs)}")
        counts = {multiple(value, loaded.inputs[name], "input") for name, value in inputs.items()}
        for name, value in outputs.items():
            if name not in loaded.outputs:
                raise UsageError(f"there is no output {name!r}: there are {sorted(loaded.outputs)}")
            counts.add(multiple(value, loaded.outputs[name], "output"))
        if len(counts) != 1:
            raise UsageError(f"the arrays have different numbers of batches: {sorted(counts)}")
        return counts.pop()


def multiple(value: np.ndarray, description: DataDescription, what: str) -> int:
    """How many of the described arrays ``value`` holds, one after the other along the first axis. UsageError unless it
    is a whole number above 0, and for another type.
    """
    shape, name = description.shape, description.name
    if not isinstance(value, np.ndarray):
        raise UsageError(f"{what} {name!r} is {type(value).__name__}, not an array")
    if value.dtype != description.dtype:
        raise UsageError(f"{what} {name!r} has type {value.dtype}; the model has {description.dtype}")
    fits = value.shape[1:] == shape[1:] and value.ndim in (len(shape), max(1, len(shape)))
    compiled = shape[0] if shape else 1
    rows = value.shape[0] if value.ndim else 1
    if not fits or not compiled or rows % compiled or not rows:
        raise UsageError(
            f"{what} {name!r} has shape {list(value.shape)}; the model has {list(shape)}",
            hint="The first axis may have whole multiples.",
        )
    return rows // compiled
