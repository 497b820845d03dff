"""The devices that models are served on, and one way to any runner: `make_runner` looks at the settings, as the SDK's
``Runner`` does.
"""

from __future__ import annotations

from podrun.core.errors import UsageError
from podrun.runtime.device import RunDevice, ipu_version
from podrun.runtime.device_pool import DevicePool
from podrun.serving.compiler import ServedModel
from podrun.serving.fused_models import fused_graphs
from podrun.serving.loaded_model import DeviceWait, acquire_device
from podrun.serving.runner import ModelRunner
from podrun.serving.runtime.config import (
    MODEL_FUSION_RUNNER,
    MODEL_RUNNER,
    PACK_RUNNER,
    LightRunnerConfig,
    RuntimeConfig,
)
from podrun.serving.runtime.fusion_runner import ModelFusionRunner
from podrun.serving.runtime.host_concat import HostConcatRunner, HostConcatRunnerConfig
from podrun.serving.runtime.light_runner import LightRunner
from podrun.serving.runtime.pack_runner import PackRunner, PackRunnerConfig

AnyRunner = ModelRunner | ModelFusionRunner | LightRunner | PackRunner | HostConcatRunner


def make_runner(
    popef: str | bytes | ServedModel,
    config: LightRunnerConfig | None = None,
    *,
    runner_type: int | None = None,
    device: RunDevice | None = None,
) -> AnyRunner:
    """The runner for a file: by the type of ``config``, or by ``runner_type`` (`ModelRunner` 0, `PackRunner` 1,
    `ModelFusionRunner` 2). A fused model has a `ModelFusionRunner` where others have a `ModelRunner`.

    UsageError for settings that are of no runner, or that contradict ``runner_type`` or the file.
    """
    if isinstance(config, RuntimeConfig):
        config.check()
    wanted = getattr(config, "runner_type", MODEL_RUNNER) if runner_type is None else runner_type
    if isinstance(config, HostConcatRunnerConfig):
        return HostConcatRunner(popef, config, device)
    if isinstance(config, PackRunnerConfig):
        return PackRunner(popef, config, device)
    if wanted == PACK_RUNNER:
        raise UsageError("runner_type is PackRunner, but the settings are not a PackRunnerConfig")
    if config is None or isinstance(config, RuntimeConfig):
        model = popef if isinstance(popef, ServedModel) else ServedModel(popef)
        settings = (config or RuntimeConfig()).changed({"runner_type": wanted})
        fused = fused_graphs(anchor.name for anchor in model.metadata.inputs())
        kind = ModelFusionRunner if fused or wanted == MODEL_FUSION_RUNNER else ModelRunner
        return kind(model, settings, device)
    if isinstance(config, LightRunnerConfig):
        return LightRunner(popef, config, device)
    raise UsageError(f"{type(config).__name__} is the settings of no runner")


class ServingDevices:
    """The devices that models are served on: the SDK's ``DeviceManager`` of its runtimes."""

    def __init__(self, wait: DeviceWait | None = None) -> None:
        self._pool, self._wait = DevicePool(), wait

    def get_num_devices(self) -> int:
        """How many IPUs there are."""
        return self._pool.total_ipus

    def get_device(self, ipus: int) -> RunDevice:
        """A free device of that many IPUs, attached. UsageError with who holds them."""
        return acquire_device(ipus, None, self._wait)

    def get_specific_device(self, identifier: int) -> RunDevice:
        """The device of an id, attached. UsageError if it is taken, PoplarError if there is none of that id."""
        device = self._pool.acquire_by_id(identifier)
        if device is None:
            raise UsageError(f"device {identifier} is taken", hint="gc-monitor shows who holds it.")
        return device

    def ipu_hardware_version(self) -> str:
        """The version of the IPUs as compilers take it: ``ipu2`` (``ipu21`` is the C600's)."""
        device = self._pool.device(0, self._pool.devices(1)[0].ipus)
        return ipu_version(device.target)
