"""``RunConfig`` and ``IPURunConfig``: how estimators for IPUs run."""

from __future__ import annotations

from typing import Any

from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.sdk.config import IPUConfig
from podrun.tensorflow.sdk.estimator_parts import EstimatorRunConfig

_OLD = {"compile_summary", "autosharding", "autosharding_backwards_only", "iterations_per_loop_in_summary"}


class IPURunConfig:
    """``iterations_per_loop`` steps in each call of the device; ``num_replicas`` of ``num_shards`` IPUs on the device
    number ``ordinal``. ValueError for counts below 1, for several IPUs without options, and for an ordinal or number of
    IPUs that the options do not have; TypeError for options of another class.
    """

    def __init__(
        self,
        iterations_per_loop: int = 1,
        ipu_options: IPUConfig | None = None,
        num_replicas: int = 1,
        num_shards: int = 1,
        ordinal: int = 0,
        prefetch_depth: int | None = None,
        **old: object,
    ) -> None:
        unknown = sorted(old.keys() - _OLD)
        if unknown:
            raise TypeError(f"IPURunConfig got an unexpected keyword argument {unknown[0]!r}")
        for name, value in (
            ("iterations_per_loop", iterations_per_loop),
            ("num_replicas", num_replicas),
            ("num_shards", num_shards),
        ):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}.")
        if num_replicas * num_shards > 1 and ipu_options is None:
            raise ValueError(
                "`IPURunConfig` configuration requires more than one device, but `ipu_options` is not set."
            )
        self.iterations_per_loop, self.ipu_options, self.ordinal = iterations_per_loop, ipu_options, ordinal
        self.num_replicas, self.num_shards, self.prefetch_depth = num_replicas, num_shards, prefetch_depth
        if ipu_options is not None:
            self._check_options(ipu_options)

    def _check_options(self, options: IPUConfig) -> None:
        if not isinstance(options, IPUConfig):
            raise TypeError(f"`ipu_options` must be an IPUConfig instance, got {type(options)}.")
        counts = options.auto_select_ipus
        counts = [counts] if isinstance(counts, int) and counts else list(counts or ())
        if not counts:
            return
        if self.ordinal >= len(counts):
            raise ValueError(f"ordinal must be in the range [0, {len(counts)}), got {self.ordinal}.")
        wanted = self.num_replicas * self.num_shards
        if counts[self.ordinal] != wanted:
            raise ValueError(
                f"`IPURunConfig` configured with {wanted} devices ({self.num_replicas} replicas times "
                f"{self.num_shards} shards), but `IpuOptions` configured with {counts[self.ordinal]} devices"
            )

    def configure(self) -> None:
        """Apply the options, unless these are applied already."""
        options = self.ipu_options
        if options is None:
            return
        if DEVICES.config is None or DEVICES.config.to_dict() != options.to_dict():
            options.configure_ipu_system()


class RunConfig(EstimatorRunConfig):
    """``tf.estimator.RunConfig`` with an `IPURunConfig`."""

    def __init__(
        self, ipu_run_config: IPURunConfig | None = None, master: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.ipu_run_config = ipu_run_config or IPURunConfig()
