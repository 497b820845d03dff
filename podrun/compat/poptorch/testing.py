"""``poptorch.testing``: compares a model's results on the host and on IPUs."""

from podrun.poptorch.executor.wrappers import allclose

__all__ = ["allclose"]
