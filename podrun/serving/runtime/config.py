"""Settings of runners, `RuntimeConfig` and its relatives, and how they put a model on IPUs. Names and defaults are
the SDK's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, fields

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.device.connection import MOST_IN_FLIGHT
from podrun.popef.container import PACKAGE
from podrun.runtime.device import RunDevice
from podrun.serving.compiler import ServedModel
from podrun.serving.loaded_model import DeviceWait, LoadedModel, acquire_device

OFF = 0xFFFFFFFF
"""`RuntimeConfig.batching_dim` of a runner that does not batch."""
FOREVER = (1 << 64) - 1
"""Nanoseconds of a timeout that never ends."""
MODEL_RUNNER, PACK_RUNNER, MODEL_FUSION_RUNNER = range(3)
"""Values of ``runner_type``."""


@dataclass(slots=True)
class LightRunnerConfig:
    """How a `LightRunner` gets its IPUs. ``replica_to_device``: device id of each replica; empty: any that is free.
    ``check_package_hash``: refuse files that another release of podrun compiled. ``first_machine``: podrun's own:
    where to look for free IPUs first, counted around, so that instances spread over machines.
    ``time_scale``, podrun's own: runs take their modelled time, times this; 0: as long as their emulation.
    """

    replica_to_device: Mapping[int, int] = field(default_factory=dict)
    check_package_hash: bool = True
    device_wait_config: DeviceWait = field(default_factory=lambda: DeviceWait(timeout_s=1.0, sleep_s=6.0))
    first_machine: int = 0
    time_scale: float = 0.0

    def device_identifier(self, replicas: int) -> int | None:
        """The device that the map names, None for any. UsageError for a map that leaves replicas out, or that puts
        them on several devices: one device holds all replicas of a program.
        """
        if not self.replica_to_device:
            return None
        if sorted(self.replica_to_device) != list(range(replicas)):
            raise UsageError(
                f"replica_to_device has replicas {sorted(self.replica_to_device)}; the model has 0 to {replicas - 1}"
            )
        devices = set(self.replica_to_device.values())
        if len(devices) > 1:
            raise UsageError(
                f"replica_to_device names devices {sorted(devices)}; one device holds all replicas of a program",
                hint="gc-info -l lists devices of several IPUs.",
            )
        return devices.pop()

    def put_on_ipus(self, model: str | bytes | ServedModel, device: RunDevice | None = None) -> LoadedModel:
        """A model on IPUs. ``device``: IPUs that the caller holds and gives back; several models may share them, and
        the program of the one that runs is loaded when it runs.

        UsageError for a file of another release, for a device of another size, and where no IPUs are free.
        """
        compiled = model if isinstance(model, ServedModel) else ServedModel(model)
        metadata, ipus = compiled.metadata, compiled.program().layout.ipus
        if self.check_package_hash and metadata.hash != PACKAGE:
            raise UsageError(
                f"{compiled.label} was compiled by {metadata.hash or 'an unknown release'}; this is {PACKAGE}",
                hint="Compile it again, or set check_package_hash to False.",
            )
        if device is not None:
            if device.ipu_count != ipus:
                raise UsageError(f"the device has {device.ipu_count} IPUs; {compiled.label} takes {ipus}")
            return LoadedModel(compiled, device, shared=True, time_scale=self.time_scale)
        identifier = self.device_identifier(metadata.replicationFactor)
        own = acquire_device(ipus, None, self.device_wait_config, identifier, self.first_machine)
        try:
            return LoadedModel(compiled, own, time_scale=self.time_scale)
        except BaseException:
            own.detach()
            raise


@dataclass(slots=True)
class RuntimeConfig(LightRunnerConfig):
    """How a runner works.

    ``timeout_ns``: how long an incomplete batch waits for other requests, 0 for ever. ``batching_dim``: 0, or `OFF`.
    ``ring_buffer_size_multiplier``: runs in flight. ``auto_reset``: load the program again after an error that an IPU
    reset mends. ``flush_on_waiting_outputs``: an incomplete batch runs as soon as somebody waits for a request in it.
    ``batch_size_timeout_ns``, where ``is_batch_size_timeout_enabled``: takes the place of ``timeout_ns`` while a
    replica's batch is incomplete; ``data_parallel_timeout_ns``: while batches of replicas are missing.
    ``validate_io_params``: refuse names that the model does not have, else they are passed over.
    ``request_tracepoints_buffer_size``: of the last requests whose times are kept, 0 for all. ``thread_safe`` and
    ``flush_by_name`` change nothing: runners are always thread-safe, and flush all inputs together.
    """

    timeout_ns: int = 10_000_000
    batching_dim: int = OFF
    thread_safe: bool = True
    validate_io_params: bool = True
    ring_buffer_size_multiplier: int = 2
    auto_reset: bool = False
    flush_on_waiting_outputs: bool = False
    batch_size_timeout_ns: int = FOREVER
    data_parallel_timeout_ns: int = FOREVER
    is_batch_size_timeout_enabled: bool = False
    request_tracepoints_buffer_size: int = 1000
    flush_by_name: str = ""
    runner_type: int = MODEL_RUNNER

    def changed(self, options: Mapping[str, object]) -> RuntimeConfig:
        """These settings with some replaced. UsageError for a name or a value that cannot be."""
        known = {f.name for f in fields(self)}
        values = {name: getattr(self, name) for name in known}
        for name, value in options.items():
            if name not in known:
                raise UsageError(
                    f"there is no runtime option {name!r}", hint=f"They are {', '.join(sorted(known))}."
                )
            values[name] = value
        new = type(self)(**values)
        new.check()
        return new

    def check(self) -> None:
        """UsageError for values that cannot be."""
        if self.batching_dim not in (0, OFF):
            raise UsageError(f"batching_dim is 0 or off, not {self.batching_dim}")
        for name in ("timeout_ns", "batch_size_timeout_ns", "data_parallel_timeout_ns"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value <= FOREVER:
                raise UsageError(f"{name} is nanoseconds from 0 to 2^64 - 1, not {value!r}")
        depth = self.ring_buffer_size_multiplier
        if not isinstance(depth, int) or not 1 <= depth <= MOST_IN_FLIGHT:
            raise UsageError(f"ring_buffer_size_multiplier is 1 to {MOST_IN_FLIGHT}, not {depth!r}")

    @property
    def depth(self) -> int:
        """Runs in flight: the next power of two of the multiplier, as the device connection takes them."""
        return 1 << (self.ring_buffer_size_multiplier - 1).bit_length()

    def delay_s(self, rows: int, batch: int) -> float:
        """How long ``rows`` of waiting requests wait for others, seconds; ``batch``: rows of one replica's batch."""
        nanoseconds = self.timeout_ns or FOREVER
        if rows < batch and self.is_batch_size_timeout_enabled:
            nanoseconds = self.batch_size_timeout_ns
        elif rows >= batch and self.data_parallel_timeout_ns != FOREVER:
            nanoseconds = self.data_parallel_timeout_ns
        return math.inf if nanoseconds >= FOREVER else nanoseconds / 1e9
