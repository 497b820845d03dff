"""``import popdist.popart``: `podrun.popart.instances`."""

from podrun.popart.instances import configureSessionOptions, getDevice

__all__ = ["configureSessionOptions", "getDevice"]
