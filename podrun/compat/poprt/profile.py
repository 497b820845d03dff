"""Operations of models."""

from podrun.serving.convert.tools import OperationCounter as Profiler
from podrun.serving.convert.tools import get_model_flops

__all__ = ["Profiler", "get_model_flops"]
