"""``import model_runtime`` for programs written for the SDK's runtime of compiled models: podrun's runtime.

runner = model_runtime.ModelRunner(model_runtime.PopefPaths("executable.popef"))
view = model_runtime.InputMemoryView()
view["x"] = x
runner.execute(view)["y"]
"""

from podrun.serving.runtime.factory import ServingDevices as DeviceManager
from podrun.serving.runtime.session import LaunchPolicy
from podrun.serving.runtime.session import PopefSession as Session
from podrun.serving.runtime.session import SessionQueues as QueueManager
from podrun.serving.runtime.session import SessionSettings as SessionConfig
from podrun.serving.runtime.views import CallableRunner as ModelRunner
from podrun.serving.runtime.views import (
    DeviceWaitConfig,
    DeviceWaitStrategy,
)
from podrun.serving.runtime.views import InputViews as InputMemoryView
from podrun.serving.runtime.views import OutputViews as OutputFutureMemory
from podrun.serving.runtime.views import OutputViews as OutputMemory
from podrun.serving.runtime.views import PopefFiles as PopefPaths
from podrun.serving.runtime.views import TensorDescription as DataDesc
from podrun.serving.runtime.views import ViewRunnerConfig as ModelRunnerConfig

__all__ = [
    "DataDesc",
    "DeviceManager",
    "DeviceWaitConfig",
    "DeviceWaitStrategy",
    "InputMemoryView",
    "LaunchPolicy",
    "ModelRunner",
    "ModelRunnerConfig",
    "OutputFutureMemory",
    "OutputMemory",
    "PopefPaths",
    "QueueManager",
    "Session",
    "SessionConfig",
]
