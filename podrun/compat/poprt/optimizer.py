"""Passes by name over a model."""

from podrun.serving.convert.tools import PassOptimizer as Optimizer

__all__ = ["Optimizer"]
