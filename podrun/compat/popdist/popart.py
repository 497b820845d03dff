"""``import popdist.popart``: `podrun.popdist.popart`."""

from podrun.popdist.popart import configureSessionOptions, getDevice

__all__ = ["configureSessionOptions", "getDevice"]
