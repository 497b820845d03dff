"""Devices of TensorFlow: which IPUs ``/device:IPU:n`` has, as the configuration and the launch say."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import field
from datetime import datetime
from typing import Any

from podrun.core.environment import chosen_by_user
from podrun.core.errors import UsageError
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass
from podrun.popdist.core import layout
from podrun.runtime.device import DeviceKind, RunDevice, partition_configured
from podrun.runtime.environment import import_jax, ours
from podrun.runtime.planner_options import CONVOLUTIONS, PRODUCTS, partials_of
from podrun.runtime.session_reports import SessionReports
from podrun.runtime.settings import RunSettings
from podrun.tensorflow.execution.poplar_flags import flags

_COMPILED = "Compiled cluster using XLA!  This line is logged at most once for the lifetime of the process."


@dataclass(slots=True)
class DeviceTable:
    """The devices of this process. ``ipus``: how many IPUs each has; ``distributed``: process number and count, if
    the configuration says that several processes share a program.
    """

    ipus: tuple[int, ...] = ()
    distributed: tuple[int, int] | None = None
    config: Any = None
    held: dict[int, RunDevice] = field(default_factory=dict)
    streams: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Device -> the seed that the program last asked for, and the runs since then."""
    turns: threading.RLock = field(default_factory=threading.RLock)
    """Held while a program runs: threads of a session may start several at once."""
    compiled: dict[str, SessionReports] = field(default_factory=dict)
    """The contents of the programs that were compiled since the configuration, with their reports: equal ones share a
    compilation.
    """
    generation: int = 0
    """Counts configurations, and how often compiled programs were cleared: older programs are compiled again."""
    said: set[str] = field(default_factory=set)
    """Which messages were written: those about devices once for a configuration, the others once in a process."""

    def configure(self, config: Any, ipus: tuple[int, ...], distributed: tuple[int, int] | None) -> None:
        """Take a new configuration; devices of the old one are released."""
        self.release()
        self.config, self.ipus, self.distributed = config, ipus, distributed

    def release(self) -> None:
        """Give all IPUs back."""
        for device in self.held.values():
            if device.kind is not DeviceKind.OFFLINE:
                device.detach()
        self.held.clear()
        self.compiled.clear()
        self.said &= {_COMPILED}
        self.config, self.ipus, self.distributed = None, (), None
        self.generation += 1

    @property
    def recomputes(self) -> bool:
        """Whether the configuration allows activations to be computed again."""
        return self.config is not None and bool(self.config.allow_recompute)

    def start_stream(self, ordinal: int, seed: int) -> None:
        """Start the random numbers of a device from ``seed``."""
        self.streams[ordinal] = (int(seed), 0)

    def next_seed(self, ordinal: int) -> int:
        """The seed of a device's next run: equal after equal seeds and equally many runs, 63 bits."""
        seed, runs = self.streams.get(ordinal, (ordinal, 0))
        self.streams[ordinal] = (seed, runs + 1)
        mixed = (seed * 0x9E3779B97F4A7C15 + runs * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
        return (mixed ^ mixed >> 31) & (1 << 63) - 1

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
            self.held[ordinal] = self._made(ordinal)
        return self.held[ordinal]

    def _made(self, ordinal: int) -> RunDevice:
        launched, ipus = layout(), self._ipus(ordinal)
        if self.connection in ("NEVER", "PRE_COMPILE"):
            return RunDevice(DeviceKind.OFFLINE, ipus)
        if flags().ipu_model:
            return RunDevice(DeviceKind.MODEL, ipus, target=self._model_target())
        if launched is not None and self.distributed is not None:
            return RunDevice(DeviceKind.IPU, ipus, job=launched.job)
        modelled = launched is None and not partition_configured(ours())
        return RunDevice(DeviceKind.IPU, ipus, target=self._model_target() if modelled else "gc200")

    def _model_target(self) -> str:
        """The chip of an IPU that is no machine's: ``ipu_model.tiles_per_ipu`` says how many tiles it has."""
        tiles = 0 if self.config is None else int(self.config.ipu_model.tiles_per_ipu)
        return f"gc200:tiles={tiles}" if tiles > 0 else "gc200"

    def _ipus(self, ordinal: int) -> IpuRange:
        count, launched = self.count(ordinal), layout()
        first = sum((self.ipus or (1,))[:ordinal])
        if launched is None or self.connection in ("NEVER", "PRE_COMPILE") or flags().ipu_model:
            return IpuRange(first, count)
        return launched.ipus if self.distributed is not None else IpuRange(launched.ipus.first + first, count)

    @property
    def connection(self) -> str:
        """When the process attaches to its IPUs: the name of a DeviceConnectionType."""
        return "ALWAYS" if self.config is None else str(self.config.device_connection.type.name)

    def attach_now(self) -> None:
        """Attach to all devices of a partition, if the configuration says to do so at once. UsageError if that
        fails.
        """
        if self.connection != "ALWAYS":
            return
        for ordinal in range(len(self.ipus or (1,))):
            if not flags().ipu_model and partition_configured(ours()):
                self.device(ordinal).ensure_attached()
            self.say_attached(ordinal)

    def say_attached(self, ordinal: int) -> None:
        """Write which IPUs a device has, as the SDK does when it attaches."""
        key = f"attached {ordinal}"
        if key in self.said or flags().ipu_model or self.connection in ("NEVER", "PRE_COMPILE"):
            return
        ipus = self._ipus(ordinal)
        ids = ",".join(map(str, ipus))
        several = "s" if ipus.count > 1 else ""
        self._say(
            key,
            "plugin/poplar/driver/poplar_executor.cc",
            f"TensorFlow device /device:IPU:{ordinal} attached to {ipus.count} IPU{several} with Poplar device "
            f"ID{several}: {ids}",
        )

    def say_compiled(self) -> None:
        """Write once in the life of the process that a program was compiled, as TensorFlow does."""
        if _COMPILED not in self.said:
            self._say(_COMPILED, "jit/xla_compilation_cache.cc", _COMPILED)

    def _say(self, key: str, source: str, text: str) -> None:
        self.said.add(key)
        if (chosen_by_user("TF_CPP_MIN_LOG_LEVEL") or "0") == "0":
            moment = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")
            sys.stderr.write(f"{moment}: I tensorflow/compiler/{source}] {text}\n")

    def settings(self, ordinal: int, shards: int) -> RunSettings:
        """How programs of so many shards run on a device: as many replicas as its IPUs allow."""
        count = self.count(ordinal)
        whole = 1 << (max(shards, 1) - 1).bit_length()
        if count % whole:
            import tensorflow as tf

            raise tf.errors.InternalError(
                None,
                None,
                f"Trying to compile a graph for an IPU device with {count} IPUs and {whole} shards. The number of "
                "shards needs to divide the number of IPUs.",
            )
        replicas = count // whole
        total, first = replicas, 0
        if self.distributed is not None:
            index, processes = self.distributed
            total, first = replicas * processes, replicas * index
        return RunSettings(
            replicas=total,
            local_replicas=replicas,
            first_replica=first,
            keeps_replica_state=True,
            cache_directory=flags().cache_directory,
            cache_suffix=".poplar_exec",
            **self._precision(),
        )

    def _precision(self) -> dict[str, Any]:
        """What the configuration says of rounding, exceptions and partial sums."""
        if self.config is None:
            return {}
        planners = {
            PRODUCTS: _texts(self.config.matmuls.poplar_options),
            CONVOLUTIONS: _texts(self.config.convolutions.poplar_options),
        }
        return {
            "engine_options": _texts(self.config.compilation_poplar_options),
            "stochastic_rounding": self.rounds_stochastically,
            "floating_point_checks": self.stops_at_exceptions,
            "partials": partials_of(planners[PRODUCTS]),
            "convolution_partials": partials_of(planners[CONVOLUTIONS]),
            "planner_options": planners,
        }

    @property
    def stops_at_exceptions(self) -> bool:
        """Whether a result that is not finite ends the run."""
        if self.config is None:
            return False
        behaviour = self.config.floating_point_behaviour
        return bool(behaviour.set_all or behaviour.inv or behaviour.div0 or behaviour.oflo)

    @property
    def rounds_stochastically(self) -> bool:
        """Whether results are rounded stochastically."""
        if self.config is None:
            return False
        behaviour = self.config.floating_point_behaviour
        return bool(behaviour.set_all or behaviour.esr.name != "OFF")

    @property
    def nan_on_overflow(self) -> bool:
        """Whether a half that overflows becomes NaN, and not the largest finite one."""
        if self.config is None:
            return False
        behaviour = self.config.floating_point_behaviour
        return bool(behaviour.set_all or behaviour.nanoo)

    @property
    def batch_norm_replicas(self) -> int:
        """Neighbouring replicas over whose batches training takes the statistics of a batch normalization."""
        if self.config is None:
            return 1
        return int(self.config.norms.experimental.distributed_batch_norm_replica_group_size)

    def memory_shares(self) -> dict[str, float]:
        """The part of the tiles that products may take for temporary data, by their operator in the planner."""
        if self.config is None:
            return {}
        shares: dict[str, float] = {}
        for category, kinds in (
            (self.config.matmuls, ("Gemm", "MatMul")),
            (self.config.convolutions, ("Conv",)),
        ):
            share = category.poplar_options.get("availableMemoryProportion")
            if share is not None:
                shares |= dict.fromkeys(kinds, float(share))
        return shares


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Options of a planner as it takes them: truth values are ``true`` and ``false``."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()
    }


DEVICES = DeviceTable()
"""The devices of this process."""
