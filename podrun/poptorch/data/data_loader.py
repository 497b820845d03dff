"""``poptorch.DataLoader``: torch's loader, whose batches have all samples of one call."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from podrun.core.errors import InternalError
from podrun.poptorch.api.enums import DataLoaderMode
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.data.data_accessor import (
    AsynchronousDataAccessor,
    JoinedBatches,
    PartitionSampler,
    element_count,
)
from podrun.poptorch.errors import ArgumentError, Error
from podrun.private_apis.torch import watch_workers

_log = logging.getLogger("poptorch::python")


@checks_methods()
class DataLoader(torch.utils.data.DataLoader[Any]):
    """Batches of ``batch_size`` x device iterations x replicas with data of their own x gradient accumulation samples.

    ``mode``: load in this process, ahead in a process of its own (Async), or so that the process of its own also forms
    the batches (AsyncRebatched: workers load ``rebatched_worker_size`` samples each; at most one batch in all is not
    full). ``async_options``: of the `AsynchronousDataAccessor`. ``auto_distributed_partitioning``: with several
    processes, each loads a part of a data set with a length; to shuffle it needs options.randomSeed, the same in all.
    ``batch_sampler``: its batches are micro-batches. Other arguments are those of torch's loader. The options cannot be
    changed afterwards.

    Raises AssertionError for arguments that do not fit together, Error for a ``batch_sampler`` with what it excludes.
    """

    def __init__(
        self,
        options: Options,
        dataset: torch.utils.data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: Mapping[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Collection[list[int]] | None = None,
        **kwargs: Any,  # Any: each argument of torch's loader has a type of its own.
    ) -> None:
        options.freeze()
        self._accessor: AsynchronousDataAccessor | None = None
        self._options = options
        factor = _micro_batches(options)
        self._combined_batch_size = None if batch_size is None else batch_size * factor
        iterable = isinstance(dataset, torch.utils.data.IterableDataset)
        chosen: dict[str, Any] = {"num_workers": num_workers, **kwargs}
        chosen["persistent_workers"] = num_workers > 0 if persistent_workers is None else persistent_workers
        if batch_sampler is not None:
            _check_batch_sampler(options, batch_size, shuffle, auto_distributed_partitioning)
            size = getattr(batch_sampler, "batch_size", None)
            self._combined_batch_size = None if size is None else size * factor
            chosen["batch_sampler"] = JoinedBatches(batch_sampler, factor, drop_last)
        else:
            mode = self._asynchronous_mode(mode, drop_last)
            rebatched = mode == DataLoaderMode.AsyncRebatched
            worker_size = rebatched_worker_size if rebatched else None
            chosen["batch_size"] = worker_size or self._combined_batch_size
            if batch_size is not None:
                chosen["drop_last"] = drop_last and not rebatched
            chosen |= self._ordering(
                dataset, iterable, shuffle, drop_last, auto_distributed_partitioning, kwargs
            )
        if rebatched_worker_size is not None and mode != DataLoaderMode.AsyncRebatched:
            raise ArgumentError("rebatched_worker_size goes with mode=DataLoaderMode.AsyncRebatched")
        self._mode, self.rebatched_drop_last = mode, drop_last
        _warn(dataset, iterable, self._combined_batch_size, drop_last, chosen)
        super().__init__(dataset, **chosen)
        self._start_accessor(async_options)

    def _start_accessor(self, async_options: Mapping[str, Any] | None) -> None:
        """Load ahead in a process of its own, if the mode asks for one. ArgumentError for its options without one."""
        if self._mode == DataLoaderMode.Sync:
            if async_options is not None:
                raise ArgumentError("async_options need an asynchronous mode")
            return
        size = self._combined_batch_size if self._mode == DataLoaderMode.AsyncRebatched else None
        self._accessor = AsynchronousDataAccessor(
            self, **{"load_indefinitely": True, **(async_options or {}), "rebatched_size": size}
        )

    def _asynchronous_mode(self, mode: DataLoaderMode, drop_last: bool) -> DataLoaderMode:
        """Rebatching where a last batch may not be full; none where batches have one sample."""
        several = self._combined_batch_size is not None and self._combined_batch_size > 1
        if mode == DataLoaderMode.Async and not drop_last and several:
            return DataLoaderMode.AsyncRebatched
        return DataLoaderMode.Async if mode == DataLoaderMode.AsyncRebatched and not several else mode

    def _ordering(
        self,
        dataset: torch.utils.data.Dataset[Any],
        iterable: bool,
        shuffle: bool | None,
        drop_last: bool,
        automatic: bool,
        loader_arguments: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Arguments of torch's loader that select the elements and their order."""
        distributed = self._options.Distributed
        if iterable:
            if distributed.numProcesses != 1 and automatic:
                raise ArgumentError(
                    "auto_distributed_partitioning=False is needed for an IterableDataset with several processes: "
                    "the data set itself has to give each process its part"
                )
            return {} if shuffle is None else {"shuffle": shuffle}
        if distributed.numProcesses == 1 or not automatic:
            return {"shuffle": bool(shuffle)} if loader_arguments.get("sampler") is None else {}
        if loader_arguments.get("sampler") is not None:
            raise ArgumentError("A sampler needs auto_distributed_partitioning=False with several processes")
        seed = self._options.extra("random_seed")
        if shuffle and seed is None:
            raise ArgumentError(
                "Shuffling with several processes needs options.randomSeed, the same one in all of them"
            )
        return {
            "sampler": PartitionSampler(
                dataset,  # type: ignore[arg-type]  # A data set that is not iterable has a length.
                distributed.processId,
                distributed.numProcesses,
                self._combined_batch_size or 1,
                drop_last,
                seed if shuffle else None,
            )
        }

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._mode != DataLoaderMode.AsyncRebatched:
            return super().__len__()
        if self._combined_batch_size is None:
            raise InternalError("batches are joined again, but have no size")
        count = element_count(self.sampler)
        if count is None:
            raise TypeError(f"{type(self.dataset).__name__} has no length")
        return (
            count // self._combined_batch_size
            if self.rebatched_drop_last
            else -(-count // self._combined_batch_size)
        )

    @property
    def combinedBatchSize(self) -> int | None:
        """Samples of a batch; None if the data set returns whole batches."""
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options that the loader was made with."""
        return self._options

    def terminate(self) -> None:
        """End the process that loads. May be called again; does nothing in mode Sync."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __iter__(self) -> Any:
        if self._accessor is not None:
            return iter(self._accessor)
        iterator = super().__iter__()
        watch_workers(iterator)
        return iterator

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_accessor": None}


def _micro_batches(options: Options) -> int:
    """Micro-batches of one call that have data of their own."""
    groups = int(options.replication_factor) // int(options.input_group_size)
    return int(options.device_iterations) * groups * int(options.Training.gradient_accumulation)


def _check_batch_sampler(
    options: Options, batch_size: int | None, shuffle: bool | None, automatic: bool
) -> None:
    if batch_size != 1 or shuffle:
        raise Error("batch_sampler excludes batch_size and shuffle: it decides both")
    if automatic and options.Distributed.numProcesses > 1:
        raise Error(
            "batch_sampler excludes auto_distributed_partitioning",
            hint="Use auto_distributed_partitioning=False and a batch_sampler of this process's elements.",
        )


def _warn(
    dataset: torch.utils.data.Dataset[Any],
    iterable: bool,
    combined: int | None,
    drop_last: bool,
    chosen: Mapping[str, Any],
) -> None:
    if iterable:
        if chosen["num_workers"] > 1 and chosen.get("worker_init_fn") is None:
            _log.warning(
                "An IterableDataset with several workers and no worker_init_fn: every worker gives all of its elements"
            )
        return
    count = element_count(dataset)
    if not drop_last and combined and count is not None and count % combined:
        _log.warning(
            "The last batch has %d of %d samples (drop_last=False): a compiled model takes whole batches only",
            count % combined,
            combined,
        )
