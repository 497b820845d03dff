"""Runs the models of a fused program: `ModelFusionRunner`.

    runner = ModelFusionRunner("executable.popef", RuntimeConfig(batching_dim=0))
    runner.execute({"graph1/x": x}, {"graph1/y": y})            # model 1 computes

A request has the inputs and outputs of one model; the names say of which. Each model has requests, batches and timeouts
of its own, as in a `ModelRunner`; they take turns on the IPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from podrun.core.errors import PodrunError, UsageError
from podrun.runtime.device import RunDevice
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import ServedModel
from podrun.serving.fused_models import INDEX, FusedGraph, fused_graphs, graph_of
from podrun.serving.loaded_model import DataDescription
from podrun.serving.runner import ModelRunner
from podrun.serving.runtime.config import RuntimeConfig
from podrun.serving.runtime.requests import QueuedRequest, RunFuture


class ModelFusionRunner(ClosedAtEnd):
    """Runs the models of a fused program. ``device``: IPUs that the caller holds, else any that are free. ``close`` (or
    ``with``) gives them back. UsageError for a file that is no fused model.
    """

    def __init__(
        self,
        model: str | bytes | ServedModel,
        config: RuntimeConfig | None = None,
        device: RunDevice | None = None,
    ) -> None:
        self.config = config or RuntimeConfig()
        compiled = model if isinstance(model, ServedModel) else ServedModel(model)
        numbers = fused_graphs(anchor.name for anchor in compiled.metadata.inputs())
        if not numbers:
            raise UsageError(
                f"{compiled.label} is no fused model",
                hint="poprt --config_yaml with model_fusion makes one; Runner(file) runs this one.",
            )
        self._loaded = self.config.put_on_ipus(compiled, device)
        self._label = compiled.label
        try:
            self._runners = {n: ModelRunner(FusedGraph(self._loaded, n), self.config) for n in numbers}
        except UsageError:
            self._loaded.close()
            raise

    def graph(self, number: int) -> ModelRunner:
        """The runner of one model. UsageError if there is none of that number."""
        if number not in self._runners:
            raise UsageError(
                f"{self._label} has no graph {number}", hint=f"It has {', '.join(map(str, self._runners))}."
            )
        return self._runners[number]

    @property
    def graphs(self) -> list[int]:
        """The numbers of the models."""
        return list(self._runners)

    def get_execute_inputs(self) -> list[DataDescription]:
        """The inputs of all models."""
        return [told for runner in self._runners.values() for told in runner.get_execute_inputs()]

    def get_execute_outputs(self) -> list[DataDescription]:
        """The outputs of all models."""
        return [told for runner in self._runners.values() for told in runner.get_execute_outputs()]

    get_model_inputs, get_model_outputs = get_execute_inputs, get_execute_outputs

    @property
    def failure(self) -> PodrunError | None:
        """The error that all requests get from now on; None if the runner works."""
        return self._loaded.failure

    def execute(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Run a request of one model, and fill the arrays of ``outputs``."""
        self._runner_for(inputs).execute(*self._own(inputs, outputs))

    def execute_async(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> RunFuture:
        """Give a request of one model to the runner. UsageError for what does not fit."""
        return self._runner_for(inputs).execute_async(*self._own(inputs, outputs))

    executeAsync = execute_async

    def prepared(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> QueuedRequest:
        """A checked request of one model that is not queued, for `enqueue` and `run_now`."""
        return self._runner_for(inputs).prepared(*self._own(inputs, outputs))

    def enqueue(self, request: QueuedRequest) -> None:
        """Queue a prepared request, where requests to the same model join it."""
        self._runner_for(request.inputs).enqueue(request)

    def run_now(self, requests: Sequence[QueuedRequest]) -> None:
        """Run requests in this thread, those of one model together; their futures have the results."""
        together: dict[ModelRunner, list[QueuedRequest]] = {}
        for request in requests:
            together.setdefault(self._runner_for(request.inputs), []).append(request)
        for runner, group in together.items():
            runner.run_now(group)

    def rows_behind(self, name: str) -> int:
        """Rows of the compiled batch of the model that a tensor belongs to."""
        return self.graph(graph_of(name) or 0).compiled_rows

    def close(self) -> None:
        """Answer what is queued, then give the IPUs back. Idempotent."""
        for runner in self._runners.values():
            runner.close()
        self._loaded.close()

    def _runner_for(self, inputs: Mapping[str, np.ndarray]) -> ModelRunner:
        numbers = {graph_of(name) for name in inputs if name != INDEX} - {None}
        index = {int(number) for number in np.asarray(inputs.get(INDEX, ())).reshape(-1)}
        if len(numbers) != 1 or (index and index != numbers):
            named = f"{sorted(inputs)}" + (f" with index {sorted(index)}" if index else "")
            raise UsageError(
                f"a request to a fused model has the inputs of one graph, not {named}",
                hint="Names begin with graph0/, graph1/ and so on; index need not be given.",
            )
        return self.graph(int(numbers.pop() or 0))

    @staticmethod
    def _own(
        inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], Mapping[str, np.ndarray]]:
        return {name: value for name, value in inputs.items() if name != INDEX}, outputs
