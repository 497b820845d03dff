"""``poprt.runtime`` for programs written for PopRT: podrun's runtime of compiled models.

runner = poprt.runtime.Runner("executable.popef", poprt.runtime.RuntimeConfig())
runner.execute({"x": x}, {"y": y})
"""

from podrun.serving.loaded_model import DataDescription as DataDesc
from podrun.serving.loaded_model import DeviceWait as DeviceWaitConfig
from podrun.serving.runner import ModelRunner
from podrun.serving.runtime.config import LightRunnerConfig, RuntimeConfig
from podrun.serving.runtime.factory import ServingDevices as DeviceManager
from podrun.serving.runtime.factory import make_runner as Runner
from podrun.serving.runtime.fusion_runner import ModelFusionRunner
from podrun.serving.runtime.host_concat import HostConcatConfig, HostConcatRunner, HostConcatRunnerConfig
from podrun.serving.runtime.light_runner import LightRunner
from podrun.serving.runtime.pack_runner import PackRunner, PackRunnerConfig
from podrun.serving.runtime.packing import PackAlgorithm
from podrun.serving.runtime.views import InputViews as InputMemoryView
from podrun.serving.runtime.views import OutputViews as OutputMemoryView

ReplicaIdToDevice = dict

__all__ = [
    "DataDesc",
    "DeviceManager",
    "DeviceWaitConfig",
    "HostConcatConfig",
    "HostConcatRunner",
    "HostConcatRunnerConfig",
    "InputMemoryView",
    "LightRunner",
    "LightRunnerConfig",
    "ModelFusionRunner",
    "ModelRunner",
    "OutputMemoryView",
    "PackAlgorithm",
    "PackRunner",
    "PackRunnerConfig",
    "ReplicaIdToDevice",
    "Runner",
    "RuntimeConfig",
]
