"""``poptorch.testing``: comparing what a model gives on the host and on IPUs."""

from podrun.poptorch.host_tools import allclose

__all__ = ["allclose"]
