"""Running the batches of a session: the checks before and the work after a run, and loops over a feed."""

from __future__ import annotations

import numpy as np

from podrun.core.errors import ApplicationRuntimeError, CallError, PoplarError
from podrun.runtime.device_program import ProgramLoader, StreamedScalars
from podrun.runtime.feeds import DataFeed, FedData, Results
from podrun.runtime.replica_check import ReplicaCheck
from podrun.runtime.runner import StepRunner
from podrun.runtime.session_reports import SessionReports
from podrun.runtime.settings import StepData
from podrun.runtime.weights import HostWeights
from podrun.runtime.words import SessionCall


def ignored(name: str, value: np.ndarray) -> None:
    """Takes a result and drops it, where the program asks for none."""


class BatchRunner:
    """Runs the batches of a session, with the checks before and the work after a run."""

    def __init__(
        self,
        runner: StepRunner,
        loader: ProgramLoader,
        weights: HostWeights,
        scalars: StreamedScalars,
        check: ReplicaCheck,
        reports: SessionReports,
    ) -> None:
        self._runner, self._loader, self._program = runner, loader, loader.program
        self._weights, self._scalars, self._check = weights, scalars, check
        self._reports = reports

    def ensure_ready(self) -> None:
        """Make sure that the program is loaded and has its weights. CallError if they were not sent."""
        self._loader.ensure_loaded()
        if self._weights.built.weights and not self._loader.weights_sent and not self._weights.constant:
            raise CallError(
                f"{self._program.words.weights_not_sent}: they have not been sent to the "
                "device since the program was loaded or the host's weights changed."
            )

    def run(self, io: StepData, batches: int | None = None, cycles: int = 0) -> None:
        """Run so many batches, or those of a run of the session. ``cycles``: modelled ones of the loop so far."""
        self._runner.check(io, batches)
        executable, replicas = self._program.prepared(SessionCall.RUN), self._weights.built.program.replicas
        if self._scalars.changed:
            self._program.write(self._scalars.values(executable))
            self._scalars.changed = False
        try:
            result = self._runner.run(io, self._program.device.connection, batches)
            self._check.after_run(executable, self._program.device, result.batches_done, replicas)
        except PoplarError:
            self._program.on_device = (
                False  # The memory of the IPUs cannot be trusted: the next call loads anew.
            )
            raise
        step = executable.tile_report.get("step", {})
        passes = self._runner.passes(batches)
        self._reports.cycles = cycles + int(step.get("cycles") or 0) * passes
        self._weights.device_is_ahead = True
        try:
            self._runner.observe(result)
        except ApplicationRuntimeError:
            self._program.on_device = False
            raise
        self._runner.store(io, result, batches)

    def loop(self, iterations: int, feed: DataFeed, results: Results = ignored) -> None:
        """Run so many batches with the elements of a feed; ``results`` gets what comes back, by name.

        The batches run in parts of at most the plan's number. ``results`` gets all values of a tensor part by part,
        ``[batches, micro-batches, replicas, ...]``, and the last value, where only that comes back, once. If the feed
        ends or its iterator raises, the batches that have all their elements run first; then the iterator's error is
        raised, or `FeedEndedError`.
        """
        self._runner.check_loop(iterations)
        self.ensure_ready()
        last: dict[str, np.ndarray] = {}
        done = 0

        def take(name: str, value: np.ndarray) -> None:
            if self._runner.is_final(name):
                last[name] = value
            else:
                results(name, value)

        while done < iterations:
            asked = min(iterations - done, self._runner.most_batches)
            first, elements = feed.taken, feed.take(asked * self._runner.crossings)
            batches = self._runner.whole(len(elements) // self._runner.crossings)
            if batches:
                data = FedData(elements[: batches * self._runner.crossings], take, first)
                self.run(data, batches, (self._reports.cycles or 0) if done else 0)
                done += batches
            if batches < asked:
                raise feed.reason(iterations, done)
        for name, value in last.items():
            results(name, value)
