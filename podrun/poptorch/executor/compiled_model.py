"""A module on a device: its session, and the names that its values have in it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.enums import OutputMode
from podrun.poptorch.api.optim import ProgramOptimizer
from podrun.poptorch.capture.capture import Capture
from podrun.poptorch.capture.graph import CapturedGraph, GraphValue
from podrun.poptorch.capture.torch_names import to_numpy
from podrun.poptorch.compile.batches import BatchDimensions
from podrun.poptorch.compile.session_model import SessionModel
from podrun.poptorch.compile.session_optimizers import session_optimizer, shown_scalars
from podrun.poptorch.errors import translated
from podrun.poptorch.executor.torch_session import TorchSession
from podrun.poptorch.executor.watching import CallStamps
from podrun.report.model import Profile
from podrun.runtime.graph_text import graph_json
from podrun.runtime.replica_groups import ALL_REPLICAS
from podrun.runtime.words import SessionCall


@dataclass(slots=True)
class CompiledModel:
    """A module on a device. Tensors are known by the names of parameters and by positions among arguments.

    ``mode`` and ``period``: which results a call returns. ``anchors``: session's name, mode and period of each tensor
    that the options anchor, by its short name; ``last_anchors``: their values in the last call.
    ``input_updates``: the session's name of the new value of the input at a position. ``synthetic``: whether no data
    cross between host and IPUs. ``stamps``: times of the last call.
    """

    session: TorchSession
    captured: Capture
    model: SessionModel
    batches: BatchDimensions
    training: bool
    mode: OutputMode
    period: int
    anchors: Mapping[str, tuple[str, OutputMode, int]]
    input_updates: Mapping[int, str]
    synthetic: bool
    last_anchors: dict[str, np.ndarray]
    stamps: CallStamps | None = None

    @property
    def graph(self) -> CapturedGraph:
        """The captured graph."""
        return self.captured.graph

    def run(self, inputs: Mapping[int, torch.Tensor]) -> list[Any]:
        """The leaves of what forward returns, for inputs by position, with all micro-batches."""
        request = time.monotonic()
        data = {name: self._input(self.graph.inputs[p], inputs[p]) for p, name in self.model.inputs.items()}
        arrived = time.monotonic()
        with translated("running the model"):
            arrays = self.session.run(data)
        ready = time.monotonic()
        self.last_anchors = {
            short: arrays[name] for short, (name, _, _) in self.anchors.items() if name in arrays
        }
        leaves = [self._output(leaf, arrays) for leaf in self.graph.outputs]
        self._update_inputs(inputs, arrays)
        self._note_stamps(request, arrived, ready)
        return leaves

    def _input(self, value: GraphValue, tensor: torch.Tensor) -> np.ndarray:
        batches = self.batches
        data = to_numpy(tensor, copy=False)
        leading = (batches.iterations, batches.accumulation, batches.groups)
        data = data.reshape(*leading, *value.shape)
        if batches.groups != batches.replicas:
            data = data[:, :, batches.group_of_replica]
        return np.asarray(data, order="C")

    def _output(self, leaf: object, arrays: Mapping[str, np.ndarray]) -> object:
        if not isinstance(leaf, GraphValue):
            return leaf
        name = self.model.outputs[leaf.number]
        count = self.batches.outputs(self.mode, self.period)
        data = arrays[name]
        if leaf.shape:
            data = data.reshape(count * leaf.shape[0], *leaf.shape[1:])
        else:
            data = data.reshape(count) if count > 1 else data.reshape(())
        if data.dtype.name == "bfloat16":
            return torch.from_numpy(data.astype(np.float32)).to(torch.bfloat16)
        return torch.from_numpy(np.array(data))

    def _update_inputs(self, inputs: Mapping[int, torch.Tensor], arrays: Mapping[str, np.ndarray]) -> None:
        """Copy the values that forward wrote into its arguments to the caller's tensors."""
        batches = self.batches
        for position, name in self.input_updates.items():
            shape = self.graph.inputs[position].shape
            data = arrays[name].reshape(batches.iterations, batches.accumulation, batches.replicas, *shape)
            data = data[:, :, batches.replica_of_group]
            target = inputs[position]
            with torch.no_grad():
                target.copy_(torch.from_numpy(np.array(data)).reshape(target.shape))

    def _note_stamps(self, request: float, arrived: float, ready: float) -> None:
        batches = self.batches
        outputs = sum(isinstance(leaf, GraphValue) for leaf in self.graph.outputs)
        self.stamps = CallStamps(
            *((0.0,) * 4 if self.synthetic else (request, arrived, ready, time.monotonic())),
            inputs=len(self.model.inputs),
            input_crossings=batches.iterations * batches.accumulation * batches.replicas,
            outputs=outputs,
            output_crossings=batches.outputs(self.mode, self.period),
        )

    # --- Weights ------------------------------------------------------------------------------------------------------

    def read_weights(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Values of parameters and buffers on the device; those that it does not have are left out."""
        held = {name: self.session.parts.weights.get(name) for name in names}
        rows = {name: self._returned_rows(name) for name in names}
        arrays = {
            name: np.zeros((rows[name], *value.shape[1:]) if rows[name] else value.shape, value.dtype)
            for name, value in held.items()
            if value is not None
        }
        with translated("reading the weights"):
            self.session.parts.transfer.to_host()
            self.session.parts.transfer.read(arrays)
        return arrays

    def _returned_rows(self, name: str) -> int:
        """Rows of a parameter that is read of all replicas; 0 for any other."""
        settings = self.session.parts.model.built.groups.get(name)
        if settings is None or settings.retrieval != ALL_REPLICAS:
            return 0
        return int(self.session.parts.model.built.program.replicas)

    def write_weights(self, values: Mapping[str, np.ndarray]) -> None:
        """Send parameters and buffers to the device, or state of the optimizer."""
        known = {n: v for n, v in values.items() if self.session.parts.weights.get(n) is not None}
        with translated("writing the weights"):
            transfer = self.session.parts.transfer
            transfer.write({n: np.asarray(v, order="C") for n, v in known.items()})
            transfer.from_host()

    def bring_weights(self) -> None:
        """Copy weights and state from the device to the session's own copy."""
        with translated("reading the weights"):
            self.session.parts.transfer.to_host()

    @property
    def needs_weights(self) -> bool:
        """Whether the device has no weights, because its program was loaded again, or has to be after an error."""
        loader = self.session.parts.loader
        on_device = loader.weights_sent and loader.loaded
        return bool(not on_device and self.session.parts.model.built.weights)

    # --- Optimizer ----------------------------------------------------------------------------------------------------

    def change_optimizer(self, optimizer: ProgramOptimizer, names: Mapping[int, str]) -> None:
        """Use other hyper-parameters from the next run on. Error if a constant one differs."""
        with translated("changing the optimizer"):
            self.session.change_optimizer(session_optimizer(optimizer, names))

    def optimizer_values(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The optimizer's state and its variable hyper-parameters, by the session's names."""
        with translated("reading the optimizer's state"):
            parts = self.session.parts
            parts.transfer.to_host()
            state, scalars = (
                parts.weights.state_values(),
                parts.scalars.values(parts.program.prepared(SessionCall.RUN)),
            )
        shown = shown_scalars(scalars, self.session.parts.model.built.trained)
        return (
            {name: torch.from_numpy(np.array(value)) for name, value in state.items()},
            {name: torch.from_numpy(np.array(value)) for name, value in shown.items()},
        )

    # --- Device -------------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether the model holds its IPUs."""
        return self.session.device.is_attached

    def attach(self) -> None:
        """Take IPUs and load the program."""
        with translated("attaching to a device"):
            self.session.device.attach()
            self.session.parts.loader.load()

    def detach(self) -> None:
        """Release the IPUs. The executable stays."""
        with translated("detaching from the device"):
            self.session.device.detach()

    @property
    def random_state(self) -> list[int]:
        """The present seed, then the generator's words."""
        with translated("reading the random state"):
            return [self.session.parts.random.seed(), *self.session.parts.random.rng_state()]

    @random_state.setter
    def random_state(self, state: Sequence[int]) -> None:
        with translated("writing the random state"):
            self.session.parts.random.set_seed(int(state[0]))
            self.session.parts.random.set_rng_state([int(word) for word in state[1:]])

    # --- What it is ---------------------------------------------------------------------------------------------------

    def tensor_names(self) -> list[str]:
        """All tensors that `Options.anchorTensor` can name."""
        return sorted(self.session.parts.model.built.infos)

    def cycles(self) -> int | None:
        """Modelled cycles of the last run; None before one."""
        reports = self.session.parts.reports
        return None if reports.cycles is None else reports.cycle_count("")

    def report(self) -> Profile:
        """The tile model's report, a `podrun.report.Profile`."""
        with translated("making the report"):
            return self.session.parts.reports.profile()

    def ir_text(self) -> str:
        """The forward graph as JSON."""
        parts = self.session.parts
        built, source = parts.model.built, parts.source
        return graph_json(built, parts.model.placed.graph, source.settings, training=source.training)

    def executable(self) -> bytes:
        """The compiled program as a file has it. Error on a device whose programs cannot be saved."""
        with translated("saving the model"):
            return self.session.executable()
