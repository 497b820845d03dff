"""Devices of TensorFlow: which IPUs ``/device:IPU:n`` has, as the configuration and the launch say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from podrun.core.errors import UsageError
from podrun.core.layout import IpuRange
from podrun.popdist.core import layout
from podrun.runtime.device import DeviceKind, RunDevice
from podrun.runtime.environment import import_jax
from podrun.runtime.settings import RunSettings


@dataclass(slots=True)
class DeviceTable:
    """The devices of this process. ``ipus``: how many IPUs each has; ``distributed``: process number and count, if
    the configuration says that several processes share a program.
    """

    ipus: tuple[int, ...] = ()
    distributed: tuple[int, int] | None = None
    config: Any = None
    held: dict[int, RunDevice] = field(default_factory=dict)
    seeds: dict[int, int] = field(default_factory=dict)
    """Device -> the seed that the program last asked for."""
    seed_changes: int = 0
    generation: int = 0
    """Counts configurations: a program of an old one is compiled again."""

    def configure(self, config: Any, ipus: tuple[int, ...], distributed: tuple[int, int] | None) -> None:
        """Take a new configuration; devices of the old one are released."""
        self.release()
        self.config, self.ipus, self.distributed = config, ipus, distributed

    def release(self) -> None:
        """Give all IPUs back."""
        for device in self.held.values():
            device.detach()
        self.held.clear()
        self.config, self.ipus, self.distributed = None, (), None
        self.generation += 1

    @property
    def recomputes(self) -> bool:
        """Whether the configuration allows activations to be computed again."""
        return self.config is not None and bool(self.config.allow_recompute)

    def count(self, ordinal: int) -> int:
        """IPUs of a device. UsageError for a number that the configuration does not have."""
        counts = self.ipus or (1,)
        if ordinal >= len(counts):
            raise UsageError(
                f"/device:IPU:{ordinal} does not exist: {len(counts)} device(s) are configured.",
                hint="Let auto_select_ipus have an entry for each device.",
            )
        return counts[ordinal]

    def device(self, ordinal: int) -> RunDevice:
        """A device, made at first use."""
        if ordinal not in self.held:
            import_jax()
            count = self.count(ordinal)
            first = sum((self.ipus or (1,))[:ordinal])
            launched = layout()
            if launched is not None and self.distributed is not None:
                self.held[ordinal] = RunDevice(DeviceKind.IPU, launched.ipus, job=launched.job)
            else:
                self.held[ordinal] = RunDevice(DeviceKind.IPU, IpuRange(first, count))
        return self.held[ordinal]

    def settings(self, ordinal: int, shards: int) -> RunSettings:
        """How programs of so many shards run on a device: as many replicas as its IPUs allow."""
        count = self.count(ordinal)
        whole = 1 << (max(shards, 1) - 1).bit_length()
        if count % whole:
            import tensorflow as tf

            raise tf.errors.InternalError(
                None,
                None,
                f"The number of shards needs to divide the number of IPUs: {whole} shards, {count} IPUs.",
            )
        replicas = count // whole
        total, first = replicas, 0
        if self.distributed is not None:
            index, processes = self.distributed
            total, first = replicas * processes, replicas * index
        return RunSettings(
            replicas=total, local_replicas=replicas, first_replica=first, keeps_replica_state=True
        )


DEVICES = DeviceTable()
"""The devices of this process."""
