"""``poptorch.testing``: comparing what a model gives on the host and on IPUs."""

from podrun.poptorch.wrappers import allclose

__all__ = ["allclose"]
