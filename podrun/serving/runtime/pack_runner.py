"""Puts short samples into one batch: `PackRunner`, for models whose attention keeps samples of a row apart.

    config = PackRunnerConfig(timeout_microseconds=500, dynamic_input_name="ids")
    config.enable_input_single_row_mode("mask")
    with PackRunner("executable.popef", config) as runner:
        future = runner.execute_async({"ids": ids}, {"y": y})     # ids: one sample, shorter than a row

A sample's inputs that are as long as the dynamic one are packed with it; others must be the same for all samples. The
runner makes what tells samples apart: the *mask*, int32, whose values number the samples of a row from 1, and
``unpack_info``, int32, the samples' lengths. A batch runs when the next sample does not fit, when it has
``max_valid_num`` samples, or when its first sample has waited for the timeout; without a timeout what waits runs at
once. An output with ``max_valid_num`` rows has a row for each sample, of any other a sample gets its own places.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np

from podrun.core.errors import CallError, PodrunError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.device import RunDevice
from podrun.serving.closing import ClosedAtEnd
from podrun.serving.compiler import ServedModel
from podrun.serving.loaded_model import DataDescription, ModelledTime, ends_runner
from podrun.serving.runtime.config import PACK_RUNNER, RuntimeConfig
from podrun.serving.runtime.packing import OpenPack, PackAlgorithm, PackedSample, PackingShape
from podrun.serving.runtime.requests import RunFuture

_CLOSE_SECONDS = 30.0


@dataclass(slots=True)
class PackRunnerConfig(RuntimeConfig):
    """How a `PackRunner` packs. ``max_valid_num``: most samples of a batch, 0 for as many as fit."""

    timeout_microseconds: int = 0
    max_valid_num: int = 0
    dynamic_input_name: str = ""
    algorithm: PackAlgorithm = PackAlgorithm.next_fit
    unpack_info: str = ""
    mask: str = ""
    delimiter_num: int = 0
    single_row: bool = False
    padded_inputs: tuple[str, ...] = ()
    runner_type: int = PACK_RUNNER

    def enable_input_single_row_mode(self, mask: str, unpack_info: str = "", delimiter_num: int = 0) -> None:
        """No sample crosses the end of a row; ``delimiter_num`` empty places between samples."""
        self.single_row, self.mask = True, mask
        self.unpack_info, self.delimiter_num = unpack_info or self.unpack_info, delimiter_num

    def enable_padding_remove_mode(self, mask: str, dynamic_inputs: Sequence[str]) -> None:
        """Requests come padded: with ``mask``, 0 where a place is padding. The runner takes that out of the inputs."""
        self.single_row, self.mask, self.padded_inputs = True, mask, tuple(dynamic_inputs)
        if dynamic_inputs and not self.dynamic_input_name:
            self.dynamic_input_name = dynamic_inputs[0]


@dataclass(slots=True, eq=False)
class _Sample:
    """A request in the queue: one sample without padding."""

    inputs: dict[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    length: int
    place: PackedSample = field(default=PackedSample(0, 0, 0))
    future: RunFuture = field(default_factory=RunFuture)
    since: float = field(default_factory=time.monotonic)


class PackRunner(ClosedAtEnd):
    """Runs samples of different lengths of a packed model: several lie in one row of a batch. It takes arrays by name,
    one sample a call, and fills the caller's output arrays; `close` (or ``with``) gives the IPUs back.
    """

    def __init__(
        self,
        model: str | bytes | ServedModel,
        config: PackRunnerConfig,
        device: RunDevice | None = None,
    ) -> None:
        self.config = config
        self._loaded = config.put_on_ipus(model, device)
        try:
            self._shape = self._packing_shape()
        except UsageError:
            self._loaded.close()
            raise
        self._waiting: deque[_Sample] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._failed: PodrunError | None = None
        self._thread = threading.Thread(target=self._serve, name="podrun-pack-runner", daemon=True)
        self._thread.start()

    def get_execute_inputs(self) -> list[DataDescription]:
        """The inputs of a request: those that the runner makes are left out."""
        own = {self.config.unpack_info, "" if self.config.padded_inputs else self.config.mask}
        return [d for d in self._loaded.inputs.values() if d.name not in own]

    def get_execute_outputs(self) -> list[DataDescription]:
        """The outputs of a batch."""
        return list(self._loaded.outputs.values())

    get_model_inputs, get_model_outputs = get_execute_inputs, get_execute_outputs

    def execute(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> None:
        """Run a sample and fill the arrays of ``outputs``."""
        self.execute_async(inputs, outputs).wait()

    def execute_async(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> RunFuture:
        """Give a sample to the runner; returns at once. UsageError for names, types and shapes that do not fit."""
        sample = self._checked(inputs, outputs)
        with self._changed:
            if self._closed:
                raise CallError("the runner is closed")
            self._waiting.append(sample)
            self._changed.notify()
        return sample.future

    executeAsync = execute_async

    def close(self) -> None:
        """Answer what is queued, then give the IPUs back. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        self._loaded.close()

    # -- checks ---------------------------------------------------------------------------------------------

    def _packing_shape(self) -> PackingShape:
        name, inputs, config = self.config.dynamic_input_name, self._loaded.inputs, self.config
        if name not in inputs or len(inputs[name].shape) < 2:
            raise UsageError(
                f"dynamic_input_name is {name!r}; the model's inputs are {sorted(inputs)}, and the dynamic one is "
                "[rows, places, ...]"
            )
        rows, places = inputs[name].shape[:2]
        for special, size in ((config.mask, rows * places), (config.unpack_info, None)):
            held = inputs.get(special)
            if special and (held is None or held.dtype.kind != "i"):
                raise UsageError(f"the model has no input {special!r} of integers")
            if held is not None and size not in (None, int(np.prod(held.shape))):
                raise UsageError(f"the mask {special!r} has shape {list(held.shape)}, not {[rows, places]}")
        if not config.single_row and not config.unpack_info:
            raise UsageError(
                "samples that cross rows need unpack_info, an input with their lengths",
                hint="config.enable_input_single_row_mode(MASK) keeps samples in rows.",
            )
        most = config.max_valid_num
        if config.unpack_info:
            room = inputs[config.unpack_info].shape[0]
            most = min(most or room, room)
        return PackingShape(rows, places, most, config.delimiter_num, not config.single_row, config.algorithm)

    def _checked(self, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]) -> _Sample:
        wanted = {d.name for d in self.get_execute_inputs()}
        if inputs.keys() != wanted:
            raise UsageError(f"the inputs are {sorted(wanted)}, not {sorted(inputs)}")
        arrays = {name: _without_row(value, self._loaded.inputs[name]) for name, value in inputs.items()}
        if self.config.padded_inputs:
            kept = arrays.pop(self.config.mask) != 0
            for name in self.config.padded_inputs:
                if name not in arrays or len(arrays[name]) != len(kept):
                    raise UsageError(f"input {name!r} has not the {len(kept)} places of the mask")
                arrays[name] = arrays[name][kept]
        length = len(arrays[self.config.dynamic_input_name])
        most = self._shape.rows * self._shape.row_length if self._shape.end_to_end else self._shape.row_length
        if not 1 <= length <= most:
            raise UsageError(f"a sample of {length} places: 1 to {most} can be packed")
        for name in outputs:
            if name not in self._loaded.outputs:
                raise UsageError(f"there is no output {name!r}: there are {sorted(self._loaded.outputs)}")
        return _Sample(arrays, outputs, length)

    # -- the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (batch := self._take()) is not None:
            self._run(*batch)

    def _take(self) -> tuple[OpenPack, list[_Sample]] | None:
        """The samples of the next batch, when it is time; None when the runner is closed and nothing waits."""
        seconds = self.config.timeout_microseconds / 1e6
        pack, taken = OpenPack(self._shape), []
        with self._changed:
            while True:
                while self._waiting and (place := pack.add(self._waiting[0].length)) is not None:
                    sample = self._waiting.popleft()
                    sample.place = place
                    taken.append(sample)
                left = taken[0].since + seconds - time.monotonic() if taken else 0.0
                if taken and (self._waiting or pack.is_full or left <= 0 or self._closed):
                    return pack, taken
                if self._closed and not taken:
                    return None
                self._changed.wait(left if taken else None)

    def _run(self, pack: OpenPack, samples: list[_Sample]) -> None:
        try:
            if self._failed is not None:
                raise self._failed
            begin = time.monotonic()
            for sample in samples:
                sample.future.queue_seconds = begin - sample.since
            # Zeros in free places may not be what the program asserts.
            places = sum(sample.length for sample in samples)
            checked = int(places == self._shape.rows * self._shape.row_length)
            results, modelled = self._loaded.run(self._packed(pack, samples), 1, None, checked)
            for index, sample in enumerate(samples):
                self._answer(sample, index, results, modelled)
        except Exception as error:
            if isinstance(error, PodrunError) and ends_runner(error, self.config.auto_reset):
                self._failed = self._failed or error
            for sample in samples:
                sample.future.finish(error)

    def _packed(self, pack: OpenPack, samples: Sequence[_Sample]) -> dict[str, np.ndarray]:
        arrays = {d.name: np.zeros(d.shape, d.dtype) for d in self._loaded.inputs.values()}
        for sample in samples:
            for name, value in sample.inputs.items():
                if len(value) == sample.length:
                    places = arrays[name].reshape(-1, *arrays[name].shape[2:])
                    places[sample.place.begin : sample.place.begin + sample.length] = value
                else:
                    arrays[name][...] = value
        if self.config.mask:
            mask = arrays[self.config.mask]
            mask[...] = pack.numbers().reshape(mask.shape)
        if self.config.unpack_info:
            lengths = arrays[self.config.unpack_info]
            lengths.reshape(lengths.shape[0], -1)[: len(samples), 0] = [s.length for s in samples]
        return arrays

    def _answer(
        self,
        sample: _Sample,
        index: int,
        results: Mapping[str, np.ndarray],
        modelled: ModelledTime,
    ) -> None:
        """Fill the outputs of the batch's sample ``index``."""
        place = sample.place
        for name, target in sample.outputs.items():
            value = results[name]
            if value.shape[:2] == (self._shape.rows, self._shape.row_length):
                part = value.reshape(-1, *value.shape[2:])[place.begin : place.begin + place.length]
            else:
                part = value[index]
            if target.size != part.size or target.dtype != part.dtype:
                wrong = f"{target.dtype}{list(target.shape)}"
                sample.future.finish(
                    UsageError(f"output {name!r} is {part.dtype}{list(part.shape)}; the array is {wrong}")
                )
            else:
                target.reshape(-1)[...] = part.reshape(-1)
        sample.future.modelled = modelled
        sample.future.finish()


def _without_row(value: np.ndarray, description: DataDescription) -> np.ndarray:
    """One sample: without the axis of rows, where it has one. UsageError for another type or number of axes."""
    name, shape = description.name, description.shape
    if not isinstance(value, np.ndarray) or value.dtype != description.dtype:
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise UsageError(f"input {name!r} has type {kind}; the model takes {description.dtype}")
    sample = value[0] if value.ndim == len(shape) and value.shape[0] == 1 else value
    if sample.ndim != len(shape) - 1 or sample.shape[1:] != shape[2:]:
        raise UsageError(
            f"input {name!r} has shape {list(value.shape)}; a sample has {['places', *shape[2:]]}"
        )
    return sample
