"""`Checkpoints`: what a training loop calls. Saves while training goes on, resumes, keeps the last checkpoints."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from podrun.checkpoint.folder import Disk, Folder, LocalDisk, Part, PartHeader, whole_checkpoints
from podrun.checkpoint.policy import CheckpointPolicy, Spacing, WriteMode
from podrun.checkpoint.values import CheckpointError, DamagedCheckpointError, decode_values, encode_values
from podrun.core.environment import PODRUN_LAUNCH_ID, POPDIST_NUM_TOTAL_REPLICAS, environment
from podrun.core.executable import Array
from podrun.core.quick_dataclass import dataclass
from podrun.faults import program_faults
from podrun.record.recorder import process_recorder

_log = logging.getLogger("podrun.checkpoint")
_NONE = -1


class Checkpointed(Protocol):
    """Objects that can be saved: sessions of PopART, models of PopTorch."""

    def _checkpoint_state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """The tensors that are equal on all instances, and the values of this instance. Nobody changes the arrays any
        more.
        """

    def _restore_checkpoint(self, tensors: Mapping[str, Array], values: Mapping[str, Any]) -> None:
        """Continue from what `_checkpoint_state` returned. Raises an error for another program's state."""


class InstanceGroup(Protocol):
    """The instances of a run, of which this is number ``index`` of ``count``."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def gather(self, number: int) -> list[int]:
        """The numbers of all instances, in their order. All instances make the call."""


@dataclass(frozen=True, slots=True)
class OneInstance:
    """A run with one instance."""

    index: int = 0
    count: int = 1

    def gather(self, number: int) -> list[int]:
        return [number]


class LaunchedInstances:
    """The instances that ``podrun`` launched."""

    def __init__(self) -> None:
        from podrun import popdist

        self.index, self.count = popdist.getInstanceIndex(), popdist.getNumInstances()

    def gather(self, number: int) -> list[int]:
        from podrun import popdist

        popdist.init()
        return [int(value) for value in popdist.allGather(np.array([number], np.int64)).reshape(-1)]


@dataclass(frozen=True, slots=True)
class Resumed:
    """A checkpoint that a program goes on from: the batches done, and the ``state`` given to `Checkpoints.save`."""

    batch: int
    state: Any


class Checkpoints:
    """The checkpoints of a run in a folder, which all its instances share.

    ``keep``: how many stay. ``fresh``: checkpoints that are there are not resumed from; the first `save` renames them
    to ``.set-aside``. ``policy``: when `save_if_due` saves and how many stay.

    Use it in a ``with`` statement, which waits for the save under way.

        with Checkpoints("checkpoints") as checkpoints:
            resumed = checkpoints.resume(session)
            batch = resumed.batch if resumed else 0
            while batch < BATCHES:
                ...
                checkpoints.save(session, batch, {"losses": losses})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 2,
        fresh: bool = False,
        instances: InstanceGroup | None = None,
        disk: Disk | None = None,
        environ: Mapping[str, str] | None = None,
        policy: CheckpointPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy is not None:
            keep = policy.keep
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least one checkpoint has to stay.")
        variables = environment(environ)
        launched = POPDIST_NUM_TOTAL_REPLICAS in variables
        self._instances = instances or (LaunchedInstances() if launched else OneInstance())
        self._run = variables.get(PODRUN_LAUNCH_ID, "")
        self._notes = process_recorder(variables)
        disk = disk or LocalDisk(program_faults(variables))
        self._folder = Folder(Path(folder).absolute(), self._instances.index, self._instances.count, disk)
        self._keep, self._fresh = keep, fresh
        self._policy, self._clock = policy, clock
        self._last_done = clock()
        self._last: int | None = None
        self._started = False
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self.stalled_seconds = 0.0
        """Seconds in all by which `save` has held up training."""

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()

    def save(self, program: Checkpointed, batch: int, state: object = None, *, wait: bool = False) -> None:
        """Save after ``batch`` batches. Returns when the state has been copied; the file is written while training goes
        on, unless ``wait``. A save that is still under way is waited for first.

        ``state``: further values of this instance that the program needs to resume: numbers, texts, arrays, lists,
        tuples, dicts. Saving the batch that was saved or resumed last does nothing. Raises CheckpointError for an
        earlier batch, for values that cannot be saved, and if the previous save failed.
        """
        began = time.perf_counter()
        self.wait()
        self._start(batch)
        if batch == self._last:
            return
        tensors, values = program._checkpoint_state()
        tree, own = encode_values({"program": values, "state": state})
        own = [np.array(array) for array in own]
        here, parts = self._instances.index, self._instances.count
        part = Part(
            PartHeader(batch, here, parts, self._run, tree),
            {name: tensors[name] for name in share_of(tensors, here, parts)},
            own,
        )
        self._last = batch
        if self._notes is not None:
            self._notes.note("saving", batch=batch)
        self._thread = threading.Thread(target=self._write, args=(part,), name="podrun-checkpoint")
        self._thread.start()
        if wait:
            self.wait()
        self.stalled_seconds += time.perf_counter() - began

    def save_if_due(
        self,
        program: Checkpointed,
        batch: int,
        state: object = None,
        *,
        mttf_s: float = math.inf,
        total_batches: int = 0,
    ) -> bool:
        """`save` if the policy says that a checkpoint is due after ``batch`` batches; whether it was. ``mttf_s`` and
        ``total_batches``: as in `CheckpointPolicy.due`. Where seconds count, instance 0 decides for all."""
        if self._policy is None:
            raise CheckpointError(
                "These checkpoints have no policy.",
                hint="Say Checkpoints(folder, policy=CheckpointPolicy(Spacing.BATCHES, 10)), or call save().",
            )
        since = batch - max(self._last or 0, 0)
        due = self._policy.due(
            since, self._clock() - self._last_done, mttf_s=mttf_s, total_batches=total_batches
        )
        if self._policy.spacing not in (Spacing.BATCHES, Spacing.COUNT) and self._instances.count > 1:
            due = bool(self._instances.gather(int(due))[0])
        if due:
            self.save(program, batch, state, wait=self._policy.mode is WriteMode.BLOCKING)
            self._last_done = self._clock()
        return due

    def wait(self) -> None:
        """Wait for the save under way. Raises CheckpointError if it, or one before it, failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._last = None
            raise error

    def resume(self, program: Checkpointed, *, fallback: bool = False) -> Resumed | None:
        """Put the last whole checkpoint into a program; None if there is none. All instances make the call.

        With ``fallback`` a damaged checkpoint is passed over for the one before it, else DamagedCheckpointError names
        the file. Files of later batches are renamed to ``.set-aside``. CheckpointError for a checkpoint of
        another number of instances.
        """
        self.wait()
        if self._fresh and not self._started:
            return None
        for batch, parts in self._candidates():
            read = self._read_alike(batch, parts, fallback)
            if read is not None:
                resumed = self._restore(program, read)
                self._folder.clear_beyond(batch)
                self._instances.gather(batch)
                self._last, self._started = batch, True
                self._last_done = self._clock()
                if self._notes is not None:
                    self._notes.note("resumed", batch=batch)
                return resumed
        return None

    def batches(self) -> list[int]:
        """The batches of the complete checkpoints, newest first. Nothing is verified."""
        return [batch for batch, _ in whole_checkpoints(self._folder.present())]

    def _candidates(self) -> list[tuple[int, int]]:
        """The checkpoints that instance 0 finds, on all instances."""
        candidates = whole_checkpoints(self._folder.present())
        if self._instances.count == 1:
            return candidates
        agreed = []
        for place in range(self._instances.gather(len(candidates))[0]):
            batch, parts = candidates[place] if place < len(candidates) else (_NONE, _NONE)
            agreed.append((self._instances.gather(batch)[0], self._instances.gather(parts)[0]))
        return agreed

    def _read_alike(self, batch: int, parts: int, fallback: bool) -> list[Part] | None:
        """The parts of a checkpoint; None on all instances if one of them finds it damaged and ``fallback`` allows
        that.
        """
        error: CheckpointError | None = None
        read: list[Part] | None = None
        try:
            read = self._folder.get(batch, parts)
        except CheckpointError as found:
            error = found
        bad = [k for k, failed in enumerate(self._instances.gather(int(error is not None))) if failed]
        if not bad:
            return read
        if not fallback:
            raise error or DamagedCheckpointError(
                f"Instance {bad[0]} cannot read the checkpoint of batch {batch} in {self._folder.path}."
            )
        _log.warning("%s", error or f"Instance {bad[0]} cannot read the checkpoint of batch {batch}.")
        return None

    def _restore(self, program: Checkpointed, parts: list[Part]) -> Resumed:
        here, count = self._instances.index, self._instances.count
        if len(parts) != count:
            raise CheckpointError(
                f"The checkpoint of batch {parts[0].header.batch} in {self._folder.path} was saved by {len(parts)} "
                f"instances; this run has {count}, and each instance has a state of its own.",
                hint=f"Use podrun --num-instances {len(parts)}, or name another folder.",
            )
        tensors = {name: array for part in parts for name, array in part.shared.items()}
        own = decode_values(parts[here].header.state, parts[here].own)
        if not isinstance(own, dict) or set(own) != {"program", "state"}:
            raise DamagedCheckpointError(
                f"The checkpoint of batch {parts[0].header.batch} holds no state of a program."
            )
        program._restore_checkpoint(tensors, own["program"])
        return Resumed(parts[here].header.batch, own["state"])

    def _start(self, batch: int) -> None:
        """The first save of a run: the files in the folder have to be its own, or be cleared."""
        if self._last is not None and batch < self._last:
            raise CheckpointError(
                f"Batch {batch} comes before batch {self._last}, which was saved last.",
                hint="After resume() go on with the batch that it gives.",
            )
        if self._started:
            return
        present = self.batches()
        if present and not self._fresh:
            raise CheckpointError(
                f"{self._folder.path} holds checkpoints of an earlier run, up to batch {present[0]}.",
                hint="Call resume() first, name another folder, or say Checkpoints(folder, fresh=True).",
            )
        if self._fresh:
            self._folder.clear_beyond(_NONE)
            self._instances.gather(batch)  # No instance writes before all have cleared.
        self._started = True

    def _write(self, part: Part) -> None:
        try:
            self._folder.put(part, self._keep)
        except CheckpointError as error:
            _log.error("%s", error)
            self._error = error


def share_of(tensors: Mapping[str, Array], part: int, parts: int) -> list[str]:
    """The names of the tensors in one of ``parts`` parts of about equal size. All instances compute the same."""
    filled = [0] * parts
    mine = []
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = filled.index(min(filled))
        filled[least] += tensors[name].nbytes
        if least == part:
            mine.append(name)
    return mine
